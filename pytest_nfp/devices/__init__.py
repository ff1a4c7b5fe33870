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
    """What a device says of itself at one moment; a figure that it does not give is None or empty."""

    wall_s: float = 0.0
    """Seconds on the clock."""
    busy_s: float = 0.0
    """Seconds that all processes spent on the processors."""
    own_s: float = 0.0
    """Seconds that this process spent on them."""
    clock_mhz: float | None = None
    """What it runs at."""
    limits: tuple[str, ...] = ()
    """Why it runs slower than it could, such as "power cap"."""
    others: tuple[int, ...] = ()
    """Processes that use it beside this one."""
    threads: int | None = None
    """What the framework computes with."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device at hand: what it is, its clock, and what tells whether a measurement can be trusted."""

    gpu: str
    """Its catalog name, or cpu."""
    title: str
    """Its name for people."""
    identity: dict[str, Any]
    """What decides the kernels and the speed: compared between runs."""
    time_us: Callable[[Forward], float]
    """Runs a forward once and returns its latency in microseconds."""
    cache_bytes: int
    """Of the last-level cache."""
    torch_release: str
    """The torch that it is reached by."""
    processors: int | None = None
    """Multiprocessors of a GPU; None for a CPU."""
    timer: str = "perf-counter"
    """The clock's name, which is part of what a latency means."""
    read: Callable[[], Reading] = Reading
    """Gives a Reading of this moment."""
    clock_drift: float = 0.04
    """How far its clock may move within a run, as a share."""
    known_length: Callable[[float], Forward] | None = None
    """Microseconds -> a forward that lasts so long, for the self-test of the timer; None where there is none."""
    launch_us: Callable[[Forward], tuple[float, float]] | None = None
    """(device, host) microseconds of one forward, where the two differ."""
    kernels: Callable[[Forward], list[str]] | None = None
    """The names of what one forward runs; None where that is not told."""
    ready: Callable[[Forward, int], Forward] = as_it_is
    """What is timed in place of a forward (a captured graph), given how many forwards its banks take in turn."""
    clean: Callable[[], None] = nothing
    """Gives back the memory that nothing uses any more."""
    now: Callable[[], float] = time.monotonic
    """The clock of budgets, in seconds."""
    rest: Callable[[float], None] = time.sleep
    """Waits for so many seconds."""
    prepare: Callable[[Any, int, int], Any] | None = None
    """(case, seed, cache bytes) -> the forwards of a case, of a stand-in that has its own; None: the backends' forwards."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Recorded, never compared."""


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
