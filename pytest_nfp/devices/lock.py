"""One measurement on a device at a time, whoever asks, and not for ever."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from filelock import FileLock

from pytest_nfp.devices import Device

GRACE = 1.5
"""A forward that hangs in a library does not see the signal: a worker ends itself after this many limits."""


class TooLong(Exception):
    """A measurement took longer than it may; the message says so."""


@contextlib.contextmanager
def device_lock(device: Device) -> Iterator[None]:
    """Exclusive use of the processor, or of one GPU by its UUID, across all processes of the machine that ask for it.

    A process that has it may ask again: a calibration may be the first thing that a measurement needs.
    """
    name = re.sub(r"[^A-Za-z0-9-]", "_", str(device.notes.get("uuid") or device.gpu))
    path = Path(tempfile.gettempdir()) / f"pytest-nfp-{name}.lock"
    # Other users wait for it too, so they must be able to open it.
    with FileLock(path, mode=0o666, is_singleton=True):
        with contextlib.suppress(OSError):
            path.chmod(0o666)
        yield


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooLong in the main thread after so long; under pytest-xdist a worker that can't even do that ends itself."""
    is_main = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    is_worker = "PYTEST_XDIST_WORKER" in os.environ

    def too_long(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"the measurement took longer than {seconds:g} s (--nfp-case-timeout) and was given up")

    if is_worker:
        faulthandler.dump_traceback_later(seconds * GRACE, exit=True)
    before = signal.signal(signal.SIGALRM, too_long) if is_main else None
    if is_main:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        if is_worker:
            faulthandler.cancel_dump_traceback_later()
