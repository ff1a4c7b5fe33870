"""A wheel on the package index as a zip archive, read by byte ranges: the index at its end first, then what is asked
for.

The files of one rule lie side by side in a wheel, and a request costs more than its bytes. So each request reads ahead
over one connection, and later reads are answered from memory.
"""

from __future__ import annotations

import io
import zipfile
from functools import lru_cache
from typing import Any

READ_AHEAD_BYTES = 256 * 1024
"""Bytes that a request reads on: some forty compressed source files."""


@lru_cache(maxsize=8)
def open_zip(url: str, timeout_s: float) -> zipfile.ZipFile:
    """The archive at a URL. All rules that are read from it share one.

    Raises ImportError without the extra `artifacts`. Reading it raises the errors of remotezip and requests.
    """
    import requests
    from remotezip import PartialBuffer, RemoteFetcher, RemoteZip

    class ReadAhead(RemoteFetcher):  # type: ignore[misc]  # remotezip has no types
        """Keeps the ranges that were read, and reads on beyond what is asked for."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._kept: dict[int, bytes] = {}

        def fetch(self, data_range: tuple[int, int | None], stream: bool = False) -> Any:
            first, last = data_range
            if last is None:  # The end of the file, where its index is.
                return super().fetch(data_range, stream)
            start = next((s for s, data in self._kept.items() if s <= first and last < s + len(data)), None)
            if start is None:
                start = first
                # Up to the next range that was read already.
                ahead = min([first + READ_AHEAD_BYTES, *(s for s in self._kept if s > last)])
                self._kept[start] = super().fetch((first, max(last, ahead - 1)), stream=False).read()
            part = self._kept[start][first - start : last + 1 - start]
            return PartialBuffer(io.BytesIO(part), first, len(part), stream)

    archive: zipfile.ZipFile = RemoteZip(url, session=requests.Session(), fetcher=ReadAhead, timeout=timeout_s)
    return archive
