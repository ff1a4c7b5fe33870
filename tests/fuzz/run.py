"""One reader under hostile input: python -m tests.fuzz.run READER SECONDS."""

from __future__ import annotations

import hashlib
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from .hostile import hostile
from .readers import READERS, Reader

SEEDS = Path(__file__).with_name("seeds")
HANG_S = 5
MEMORY_BYTES = 1 << 30
WRITES = (
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.link",
    "os.symlink",
    "os.rmdir",
    "os.chmod",
    "os.truncate",
    "subprocess.Popen",
    "os.exec",
)


class Broken(Exception):
    """What a reader must not do; the message says what."""


_is_reading = False


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not _is_reading:
        return
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if writes or event in WRITES:
        raise Broken(f"it wrote: {event} {arguments[:1]}")


@contextmanager
def _reading() -> Iterator[None]:
    global _is_reading  # noqa: PLW0603  # an audit hook can't be handed a value

    def hang(number: int, frame: FrameType | None) -> None:
        raise Broken(f"it took more than {HANG_S} s")

    signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    _is_reading = True
    try:
        yield
    finally:
        _is_reading = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def attempt(reader: Reader, path: Path) -> str:
    """What is wrong with how a file is read; "" where it is read, or refused as it may be."""
    try:
        with _reading(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader.read(path)
    except reader.errors as refused:
        text = str(refused)
        return "" if len(text) < 5000 and "\x1b" not in text else f"its message is no message: {text[:200]!r}"
    except Exception:
        return traceback.format_exc(limit=-4)
    return ""


def main() -> int:
    name, seconds = sys.argv[1], float(sys.argv[2])
    reader = READERS[name]
    sys.addaudithook(_watch)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"input{reader.suffix}"
        for example in reader.examples:  # Imports that a first read makes are no writes and no memory of the input's.
            path.write_bytes(example)
            attempt(reader, path)
        virtual = (
            int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            if Path("/proc/self/statm").exists()
            else used
        )
        resource.setrlimit(resource.RLIMIT_AS, (virtual + MEMORY_BYTES, resource.RLIM_INFINITY))
        strategy = st.one_of([hostile(example, reader.suffix) for example in reader.examples])
        count = 0
        end = time.monotonic() + seconds
        worst: tuple[bytes, str] | None = None
        number = 0
        while time.monotonic() < end and worst is None:
            number += 1

            @seed(number)
            @settings(
                max_examples=500,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate, Phase.shrink],
            )
            @given(strategy)
            def reads(data: bytes) -> None:
                nonlocal count, worst
                count += 1
                path.write_bytes(data)
                if wrong := attempt(reader, path):
                    worst = data, wrong
                    raise AssertionError

            try:
                reads()
            except AssertionError:
                break
    if worst is None:
        print(f"{name:<20} {count:>8} inputs in {seconds:g} s: nothing open", flush=True)
        return 0
    data, wrong = worst
    kept = SEEDS / name / hashlib.sha256(data).hexdigest()[:16]
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(data)
    print(f"{name:<20} {count:>8} inputs: OPEN, kept as {kept}\n{wrong}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
