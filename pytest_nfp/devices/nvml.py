"""What the NVIDIA driver says of a GPU (nvidia-ml-py, extra `torch` or `profile`). Without it every figure is missing."""

from __future__ import annotations

import os
import time
from typing import Any

from pytest_nfp.devices import Reading

LIMITS = {
    "nvmlClocksThrottleReasonSwPowerCap": "power cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "thermal slowdown",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "thermal slowdown by hardware",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
}


def _library() -> Any:
    """The initialised library, or None where it or the driver is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def driver() -> str | None:
    """The driver's version."""
    library = _library()
    return None if library is None else str(library.nvmlSystemGetDriverVersion())


def uuids() -> list[str]:
    """UUIDs of all GPUs of the machine, in the driver's (PCI bus) order; empty without a driver."""
    library = _library()
    if library is None:
        return []
    return [
        str(library.nvmlDeviceGetUUID(library.nvmlDeviceGetHandleByIndex(i)))
        for i in range(library.nvmlDeviceGetCount())
    ]


def open_device(uuid: str) -> Any:
    """A handle of the GPU with this UUID (with or without the prefix GPU-), or None."""
    library = _library()
    if library is None or not uuid:
        return None
    try:
        return library.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    except library.NVMLError:
        return None


def clock_mhz(handle: Any) -> float | None:
    """The clock of the multiprocessors."""
    library = _library()
    if library is None or handle is None:
        return None
    try:
        return float(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM))
    except library.NVMLError:
        return None


def read(handle: Any) -> Reading:
    """Clock, limits in force, and other processes that compute on the GPU."""
    library = _library()
    if library is None or handle is None:
        return Reading(time.monotonic())
    try:
        reasons = library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        limits = tuple(name for constant, name in LIMITS.items() if reasons & getattr(library, constant))
    except library.NVMLError:
        limits = ()
    try:
        running = library.nvmlDeviceGetComputeRunningProcesses(handle)
        others = tuple(sorted(p.pid for p in running if p.pid != os.getpid()))
    except library.NVMLError:
        others = ()
    return Reading(time.monotonic(), clock_mhz=clock_mhz(handle), limits=limits, others=others)
