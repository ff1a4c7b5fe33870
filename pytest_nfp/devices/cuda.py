"""An NVIDIA GPU as a device: CUDA events around a forward, its identity and its L2 size.

Not run on a GPU yet: the logic is tested with a stand-in for torch.cuda.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pytest_nfp.devices import Device


def device(gpu: str) -> Device:
    """Device 0 of the caller's visible devices, under its catalog name."""
    properties = torch.cuda.get_device_properties(0)
    identity = {
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
    }
    return Device(
        gpu=gpu,
        title=str(properties.name),
        identity=identity,
        time_us=time_us,
        cache_bytes=properties.L2_cache_size,
        # What other processes do on the GPU is not read yet: the reading says no time has passed.
        load=lambda: (time.monotonic(), 0.0, 0.0),
        torch_release=torch.__version__.split("+")[0],
        notes={"timer": "cuda-events"},
    )


def time_us(forward: Callable[[], object]) -> float:
    """Device time of one forward in microseconds, between two events and an explicit synchronisation."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.inference_mode():
        torch.cuda.synchronize()
        start.record()
        forward()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end) * 1e3)
