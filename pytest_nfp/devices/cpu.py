"""The CPU as a device: perf_counter_ns around a forward, /proc for other processes' load, cpufreq for the clock."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from pytest_nfp.devices import Device, Reading

_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
CLOCK_DRIFT = 0.25
"""A processor's cores change their clocks by themselves all the time; T(N0) shows what matters of it."""
DEFAULT_CACHE_BYTES = 64 * 2**20
"""Where the system does not tell: larger than most, so that more is rotated, not less."""
LARGE_CACHE_BYTES = 64 * 2**20
"""Above this the host's number is not taken for what a process can use: it is measured, which takes seconds."""
ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Variables by which a library of torch keeps to an older instruction set than torch itself."""


def device() -> Device:
    """This machine's processor with torch's present thread count."""
    identity = {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
    }
    identity |= {name: os.environ[name] for name in ISA_VARIABLES if name in os.environ}
    cache_bytes, told = _usable_cache()
    return Device(
        gpu="cpu",
        title=f"{identity['processor']}, {identity['threads']} threads, {identity['isa']}",
        identity=identity,
        time_us=time_us,
        cache_bytes=cache_bytes,
        torch_release=torch.__version__.split("+")[0],
        read=read,
        clock_drift=CLOCK_DRIFT,
        known_length=spin,
        kernels=kernels,
        notes={"platform": platform.platform()} | told,
    )


def kernels(forward: Callable[[], object]) -> list[str]:
    """Names of the operators that one forward computes with, as the dispatcher runs them; views and allocations are none.

    An operator may still choose between kernels by itself: on a CPU no name tells.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[str] = []

    class Names(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not (func.is_view or func.overloadpacket.__name__.startswith(("empty", "new_empty", "zero"))):
                found.append(str(func.overloadpacket).replace(".", "::", 1))
            return func(*args, **kwargs or {})

    # Under inference mode a composite operator would stay whole: which attention runs is inside one.
    with torch.no_grad(), Names():
        forward()
    return found


def time_us(forward: Callable[[], object]) -> float:
    """Latency of one forward in microseconds."""
    with torch.inference_mode():
        start = time.perf_counter_ns()
        forward()
        return (time.perf_counter_ns() - start) / 1e3


def spin(us: float) -> Callable[[], object]:
    """A forward that keeps the processor busy for so long, by another clock than the timer's."""

    def run() -> None:
        end = time.monotonic() + us / 1e6
        while time.monotonic() < end:
            pass

    return run


def read() -> Reading:
    """Time of all processes and of this one, the clock and the threads; what the system does not tell is left out."""
    own = sum(os.times()[:4])
    busy = 0.0
    try:
        fields = [int(f) for f in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
        user, nice, system, _idle, _iowait, irq, softirq, _steal = fields
        busy = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        own = 0.0
    return Reading(time.monotonic(), busy, own, clock_mhz=_clock_mhz(), threads=torch.get_num_threads())


def _clock_mhz() -> float | None:
    """The mean clock of the cores, where the kernel tells it: a virtual machine's is often a constant."""
    clocks = []
    for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
        try:
            clocks.append(int(path.read_text(encoding="ascii")) / 1e3)
        except (OSError, ValueError):
            return None
    return sum(clocks) / len(clocks) if clocks else None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@lru_cache(maxsize=1)
def _usable_cache() -> tuple[int, dict[str, Any]]:
    """Bytes of the last-level cache that this process can use, and how they were found where the host's number is not taken."""
    reported = _cache_bytes() * _cache_domains()
    if reported <= LARGE_CACHE_BYTES:
        return reported, {}
    from pytest_nfp.devices import reachable

    found, latencies = reachable.measure(reported, _free_bytes())
    return found, {
        "cache": {
            "reported_mib": round(reported / 2**20),
            "reached_mib": round(found / 2**20),
            "load_ns": {str(round(size / 2**20)): round(ns, 1) for size, ns in latencies},
        }
    }


def _cache_bytes() -> int:
    """What the host says of one last-level cache."""
    sizes = []
    for path in _CACHE.glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        unit = {"K": 2**10, "M": 2**20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes, default=DEFAULT_CACHE_BYTES)


def _cache_domains() -> int:
    """How many last-level caches the processors of this process have: weights are spread over all of them."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    shared = set()
    for cpu in allowed:
        levels = sorted(_CACHE.parent.parent.glob(f"cpu{cpu}/cache/index*/shared_cpu_list"))
        if levels:
            shared.add(levels[-1].read_text(encoding="ascii").strip())
    return max(1, len(shared))


def _free_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return 0
