"""The CPU as a device: perf_counter_ns around a forward, /proc for other processes' load."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pytest_nfp.devices import Device

_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
DEFAULT_CACHE_BYTES = 64 * 2**20
"""Where the system does not tell: larger than most, so that more is rotated, not less."""


def device() -> Device:
    """This machine's processor with torch's present thread count."""
    identity = {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
    }
    return Device(
        gpu="cpu",
        title=f"{identity['processor']}, {identity['threads']} threads, {identity['isa']}",
        identity=identity,
        time_us=time_us,
        cache_bytes=_cache_bytes(),
        load=load,
        torch_release=torch.__version__.split("+")[0],
        notes={"timer": "perf_counter_ns", "platform": platform.platform()},
    )


def time_us(forward: Callable[[], object]) -> float:
    """Latency of one forward in microseconds."""
    with torch.inference_mode():
        start = time.perf_counter_ns()
        forward()
        return (time.perf_counter_ns() - start) / 1e3


def load() -> tuple[float, float, float]:
    """(wall seconds, busy CPU seconds of all processes, CPU seconds of this one); busy is 0 where /proc is missing."""
    own = sum(os.times()[:4])
    try:
        fields = [int(f) for f in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return time.monotonic(), 0.0, 0.0
    user, nice, system, _idle, _iowait, irq, softirq, _steal = fields
    return time.monotonic(), (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK"), own


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cache_bytes() -> int:
    sizes = []
    for path in _CACHE.glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        unit = {"K": 2**10, "M": 2**20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes, default=DEFAULT_CACHE_BYTES)
