"""The device that forwards run on: identity, clock, cache size and signs that a measurement can't be trusted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pytest_nfp import catalog

Forward = Callable[[], object]


def as_it_is(forward: Forward, turns: int) -> Forward:
    """A forward that is timed itself."""
    return forward


def nothing() -> None:
    """A device whose memory needs no cleaning."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a device says of itself at one moment; a figure that it does not give is None or empty.

    wall_s, busy_s, own_s: seconds on the clock, of all processes on the processors, of this process. clock_mhz: what it
    runs at. limits: why it runs slower than it could, such as "power cap". others: processes that use it beside this one.
    threads: what the framework computes with.
    """

    wall_s: float = 0.0
    busy_s: float = 0.0
    own_s: float = 0.0
    clock_mhz: float | None = None
    limits: tuple[str, ...] = ()
    others: tuple[int, ...] = ()
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """A device at hand.

    gpu: its catalog name, or cpu. identity: what decides the kernels and the speed, compared between runs. timer: the
    clock's name, which is part of what a latency means. time_us: runs a forward once and returns its latency in
    microseconds. cache_bytes: last-level cache. processors: multiprocessors of a GPU. read: a Reading. clock_drift: how far its clock may move within a run.
    known_length: a forward that lasts that many microseconds, for the self-test of the timer. launch_us: (device, host)
    microseconds of one forward, where the two differ. kernels: names of what one forward runs. ready: what is timed in
    place of a forward (a captured graph), given how many forwards its banks take in turn. clean: gives back the memory that
    nothing uses any more. now and rest: the clock of
    budgets, and how to wait. notes: recorded, never compared.
    """

    gpu: str
    title: str
    identity: dict[str, Any]
    time_us: Callable[[Forward], float]
    cache_bytes: int
    torch_release: str
    processors: int | None = None
    timer: str = "perf-counter"
    read: Callable[[], Reading] = Reading
    clock_drift: float = 0.04
    known_length: Callable[[float], Forward] | None = None
    launch_us: Callable[[Forward], tuple[float, float]] | None = None
    kernels: Callable[[Forward], list[str]] | None = None
    ready: Callable[[Forward, int], Forward] = as_it_is
    clean: Callable[[], None] = nothing
    now: Callable[[], float] = time.monotonic
    rest: Callable[[float], None] = time.sleep
    notes: dict[str, Any] = field(default_factory=dict)


def find_device(gpu: str, timer: str = "auto") -> tuple[Device | None, str]:
    """The device for a catalog name with a timer, or None and the one reason why it is not here."""
    try:
        import torch
    except ImportError:
        extra = "cpu" if gpu == "cpu" else "torch"
        return None, f"torch is not installed, so nothing can be measured: pip install 'pytest-nfp[{extra}]'"
    if gpu == "cpu":
        if timer not in ("auto", "perf-counter"):
            return None, f"a CPU has no timer {timer}: perf-counter is its only one"
        from pytest_nfp.devices import cpu

        return cpu.device(), ""
    if not torch.cuda.is_available():
        return None, f"no {gpu} here: torch {torch.__version__} sees no GPU"
    from pytest_nfp.devices import cuda

    name = torch.cuda.get_device_name(0)
    if name not in catalog.gpu(gpu).driver_names:
        return None, f"no {gpu} here: the device is {name}"
    try:
        return cuda.device(gpu, timer), ""
    except cuda.NoTimer as reason:
        return None, str(reason)


def detect() -> str:
    """The catalog name of the device here, for --nfp-gpu=auto: the GPU if there is one, else cpu.

    Raises UnknownName for a GPU that the catalog lacks.
    """
    try:
        import torch
    except ImportError:
        return "cpu"
    return catalog.gpu(torch.cuda.get_device_name(0)).name if torch.cuda.is_available() else "cpu"
