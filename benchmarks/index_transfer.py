"""Bytes and requests that reading a release from the package index costs: python benchmarks/index_transfer.py.

Each release is read into an empty cache of its own. Target: vLLM's wheel of 336 MB under 5 MB transferred.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

import requests

RELEASES = ("vllm==0.33.0", "sglang==0.5.23", "flashinfer-python==0.7.4", "flash-attn==2.8.3")
MODELS = {"vllm": "llada-2.1-mini", "sglang": "llada-2.1-mini"}


def main() -> None:
    totals = {"requests": 0, "bytes": 0}
    send = requests.adapters.HTTPAdapter.send

    def counted(self: Any, request: Any, **kwargs: Any) -> Any:
        response = send(self, request, **kwargs)
        read = response.raw.read

        def count(*args: Any, **options: Any) -> bytes:
            data: bytes = read(*args, **options)
            totals["bytes"] += len(data)
            return data

        response.raw.read = count
        totals["requests"] += 1
        return response

    requests.adapters.HTTPAdapter.send = counted  # type: ignore[method-assign]
    from pytest_nfp.cli import main as nfp

    for release in sys.argv[1:] or RELEASES:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache
            totals.update(requests=0, bytes=0)
            start = time.perf_counter()
            model = MODELS.get(release.partition("==")[0], "qwen3-8b")
            code = nfp(["granularity", release, "--gpu", "h20", "--model", model, "--json"])
            seconds = time.perf_counter() - start
            if code:
                raise SystemExit(code)
        print(
            f"{release}: {totals['bytes'] / 1e6:.2f} MB in {totals['requests']} requests, {seconds:.1f} s",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
