"""An NVIDIA GPU as a device: timers, identity, L2 size, what the driver says of clocks, limits and other processes.

Not run on a GPU yet: the logic is tested with stand-ins for torch.cuda, NVML and CUPTI.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch

from pytest_nfp.devices import Device, Forward, as_it_is, nvml

EVENTS, GRAPH, CUPTI = "cuda-events", "cuda-graph", "cupti"


class NoTimer(Exception):
    """The timer can't be had here; the message says why."""


def device(gpu: str, timer: str = "auto") -> Device:
    """Device 0 of the caller's visible devices, under its catalog name. Raises NoTimer."""
    timer = EVENTS if timer == "auto" else timer
    if timer not in (EVENTS, GRAPH, CUPTI):
        raise NoTimer(f"a GPU has no timer {timer}: there are {EVENTS}, {GRAPH} and {CUPTI}")
    properties = torch.cuda.get_device_properties(0)
    handle = nvml.open_device(str(getattr(properties, "uuid", "")))
    identity = {
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "driver": nvml.driver(),
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
    }
    clock = nvml.clock_mhz(handle)
    return Device(
        gpu=gpu,
        title=str(properties.name),
        identity=identity,
        time_us=_cupti_timer() if timer == CUPTI else time_us,
        cache_bytes=properties.L2_cache_size,
        torch_release=torch.__version__.split("+")[0],
        processors=properties.multi_processor_count,
        timer=timer,
        read=lambda: nvml.read(handle),
        known_length=None if clock is None else lambda us: lambda: torch.cuda._sleep(int(us * clock)),
        launch_us=launch_us,
        kernels=kernels,
        ready=captured if timer == GRAPH else as_it_is,
        clean=clean,
        notes={"uuid": str(getattr(properties, "uuid", ""))},
    )


def clean() -> None:
    """What the allocator keeps of tensors that are gone goes back to the driver: the next case finds the memory free."""
    gc.collect()
    torch.cuda.empty_cache()


def time_us(forward: Forward) -> float:
    """Device time of one forward in microseconds, between two events and an explicit synchronisation."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.inference_mode():
        torch.cuda.synchronize()
        start.record()
        forward()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end) * 1e3)


def launch_us(forward: Forward) -> tuple[float, float]:
    """(device, host) microseconds of one forward: events around it, and the host's clock until the call returns."""
    host = 0.0

    def called() -> None:
        nonlocal host
        began = time.perf_counter_ns()
        forward()
        host = (time.perf_counter_ns() - began) / 1e3

    return time_us(called), host


def captured(forward: Forward, turns: int) -> Forward:
    """The forward as CUDA graphs, one for each of the banks that it takes in turn; a call replays the next.

    Raises RuntimeError where the forward can't be captured (it allocates on the host, synchronises, or branches on data).
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(turns):  # Kernels are compiled and workspaces made outside a capture.
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graphs = []
    with torch.inference_mode():
        for _ in range(turns):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                forward()
            graphs.append(graph)
    turn = cycle(graphs)
    return lambda: next(turn).replay()


def kernels(forward: Forward) -> list[str]:
    """Names of the kernels that one forward runs, in order. Raises RuntimeError where profiling is not allowed."""
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode(), profile(activities=[ProfilerActivity.CUDA]) as profiled:
        forward()
        torch.cuda.synchronize()
    return [str(e.name) for e in profiled.events() if "memcpy" not in e.name.lower() and "memset" not in e.name.lower()]


def _cupti_timer() -> Callable[[Forward], float]:
    """Sum of the kernels' own times, by CUPTI's activity records (cupti-python): no launch gaps. Raises NoTimer."""
    try:
        from cupti import cupti
    except ImportError as error:
        raise NoTimer(f"the timer {CUPTI} needs cupti-python: pip install cupti-python ({error})") from None
    ended: list[tuple[int, int]] = []

    def more() -> tuple[int, int]:
        return 8 * 1024 * 1024, 0

    def done(activities: list[Any]) -> None:
        kinds = (cupti.ActivityKind.CONCURRENT_KERNEL, cupti.ActivityKind.KERNEL)
        ended.extend((a.start, a.end) for a in activities if a.kind in kinds)

    try:
        cupti.activity_register_callbacks(more, done)
        cupti.activity_enable(cupti.ActivityKind.CONCURRENT_KERNEL)
    except Exception as error:  # CUPTI's own error class, which only it can name
        raise NoTimer(f"CUPTI can't record here: {error}") from error

    def timed(forward: Forward) -> float:
        ended.clear()
        with torch.inference_mode():
            torch.cuda.synchronize()
            forward()
            torch.cuda.synchronize()
        cupti.activity_flush_all(1)
        return sum(end - start for start, end in ended) / 1e3

    return timed
