"""The device that is found, and the one reason when it is not."""

from __future__ import annotations

import contextlib
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_nfp import devices
from pytest_nfp.catalog import UnknownName
from pytest_nfp.devices import cpu, reachable


def test_the_cpu_has_an_identity_that_no_jitter_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor, cores, threads, ISA, torch: the same twice; a clock or a load is not in it. An older ISA of a library is."""
    for name in cpu.ISA_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    device, reason = devices.find_device("cpu")
    assert device is not None
    assert reason == ""
    assert set(device.identity) == {"processor", "cores", "threads", "isa", "torch"}
    again, _ = devices.find_device("cpu")
    assert again is not None
    assert again.identity == device.identity
    assert device.cache_bytes > 2**18
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    older, _ = devices.find_device("cpu")
    assert older is not None
    assert older.identity == device.identity | {"ONEDNN_MAX_CPU_ISA": "AVX2"}


def test_a_large_cache_is_measured_and_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """480 MiB by the host, 40 reached: what is rotated is held to 40 or a little more, and the record has both."""
    monkeypatch.setattr(cpu, "_cache_bytes", lambda: 480 * 2**20)
    monkeypatch.setattr(reachable, "chase_ns", lambda size: 45.0 if size <= 40 * 2**20 else 190.0)
    cpu._usable_cache.cache_clear()
    try:
        device = cpu.device()
    finally:
        monkeypatch.undo()
        cpu._usable_cache.cache_clear()
    assert 40 * 2**20 < device.cache_bytes < 80 * 2**20
    told = device.notes["cache"]
    assert (told["reported_mib"], told["reached_mib"]) == (480, round(device.cache_bytes / 2**20))


def test_time_and_load_move_forward() -> None:
    """A forward of known length takes that long, and the load reading counts this process as its own."""
    device, _ = devices.find_device("cpu")
    assert device is not None
    before = device.read()
    assert device.known_length is not None
    assert device.time_us(device.known_length(3000.0)) >= 3000
    after = device.read()
    assert after.wall_s > before.wall_s
    assert after.busy_s >= before.busy_s
    assert after.own_s >= before.own_s
    assert after.threads == torch.get_num_threads()


def test_a_gpu_that_is_not_here_gives_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, another GPU, no torch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.find_device("h20")[1].startswith("no h20 here: torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA H800")
    assert devices.find_device("h20") == (None, "no h20 here: the device is NVIDIA H800")
    assert devices.detect() == "h800"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA X1")
    with pytest.raises(UnknownName, match="unknown GPU 'NVIDIA X1'"):
        devices.detect()
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install 'pytest-nfp[cpu]'" in devices.find_device("cpu")[1]
    assert devices.detect() == "cpu"


class Cuda:
    """A stand-in for torch.cuda that notes what is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        done = self.done

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                done.append("record")

            def synchronize(self) -> None:
                done.append("wait")

            def elapsed_time(self, end: object) -> float:
                return 0.25

        class Stream:
            def wait_stream(self, other: object) -> None:
                done.append("wait_stream")

        properties = SimpleNamespace(
            name="NVIDIA H20", total_memory=96, L2_cache_size=60, uuid="abc", multi_processor_count=78
        )
        for name, value in {
            "Event": Event,
            "Stream": Stream,
            "current_stream": Stream,
            "stream": lambda s: contextlib.nullcontext(),
            "graph": lambda g: contextlib.nullcontext(),
            "synchronize": lambda: done.append("synchronize"),
            "get_device_properties": lambda i: properties,
            "_sleep": lambda cycles: done.append(f"sleep {cycles}"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value, raising=False)


def test_cuda_events_bracket_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Synchronise, start, forward, end, wait for the end; milliseconds become microseconds."""
    from pytest_nfp.devices import cuda

    order = Cuda(monkeypatch).done
    assert cuda.time_us(lambda: order.append("forward")) == 250.0
    assert order == ["synchronize", "record", "forward", "record", "wait"]
    device = cuda.device("h20")
    assert (device.title, device.cache_bytes, device.timer) == ("NVIDIA H20", 60, "cuda-events")


def test_a_graph_is_captured_for_each_bank_and_replayed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three banks, three graphs; the forward runs for warm-up and capture alone."""
    from pytest_nfp.devices import cuda

    Cuda(monkeypatch)
    runs = []
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: done.append("x")))
    device = cuda.device("h20", "cuda-graph")
    assert device.timer == "cuda-graph"
    replay = device.ready(lambda: runs.append(1), 3)
    assert len(runs) == 6
    for _ in range(4):
        replay()
    assert len(runs) == 6
    assert len(done) == 4


def test_host_and_device_time_of_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's by events, the host's until the call returns."""
    from pytest_nfp.devices import cuda

    Cuda(monkeypatch)
    device_us, host_us = cuda.launch_us(lambda: time.sleep(0.01))
    assert device_us == 250.0
    assert host_us > 9000


def test_the_known_length_is_cycles_at_the_drivers_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """2000 us at 1500 MHz are three million cycles; without a clock there is no self-test."""
    from pytest_nfp.devices import cuda, nvml

    fake = Cuda(monkeypatch)
    monkeypatch.setattr(nvml, "clock_mhz", lambda handle: 1500.0)
    known = cuda.device("h20").known_length
    assert known is not None
    known(2000)()
    assert fake.done == ["sleep 3000000"]
    monkeypatch.setattr(nvml, "clock_mhz", lambda handle: None)
    assert cuda.device("h20").known_length is None


def test_cupti_sums_the_kernels_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activity records of one forward, without the gaps between them; another kind of record does not count."""
    from pytest_nfp.devices import cuda

    Cuda(monkeypatch)
    given: dict[str, Any] = {}
    kinds = SimpleNamespace(CONCURRENT_KERNEL=1, KERNEL=2)
    records = [
        SimpleNamespace(kind=1, start=0, end=3000),
        SimpleNamespace(kind=1, start=9000, end=11000),
        SimpleNamespace(kind=5, start=0, end=10**9),
    ]
    cupti = SimpleNamespace(
        ActivityKind=kinds,
        activity_register_callbacks=lambda more, done: given.update(more=more, done=done),
        activity_enable=lambda kind: given.update(kind=kind),
        activity_flush_all=lambda flag: given["done"](records),
    )
    monkeypatch.setitem(sys.modules, "cupti", SimpleNamespace(cupti=cupti))
    device = cuda.device("h20", "cupti")
    assert given["kind"] == 1
    assert given["more"]()[0] > 0
    assert [device.time_us(lambda: None) for _ in range(2)] == [5.0, 5.0]


def test_a_timer_that_can_not_be_had_is_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUPTI that is not installed or not allowed; a name that is no GPU timer; a GPU timer on a CPU."""
    from pytest_nfp.devices import cuda

    Cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA H20")
    monkeypatch.setitem(sys.modules, "cupti", None)
    assert "pip install cupti-python" in devices.find_device("h20", "cupti")[1]

    def refuse(*arguments: object) -> None:
        raise RuntimeError("insufficient privileges")

    cupti = SimpleNamespace(activity_register_callbacks=refuse)
    monkeypatch.setitem(sys.modules, "cupti", SimpleNamespace(cupti=cupti))
    assert "CUPTI can't record here: insufficient privileges" in devices.find_device("h20", "cupti")[1]
    assert "a GPU has no timer perf-counter" in devices.find_device("h20", "perf-counter")[1]
    assert "a CPU has no timer cupti" in devices.find_device("cpu", "cupti")[1]
    found, _ = devices.find_device("h20")
    assert found is not None
    assert isinstance(cuda.NoTimer("x"), Exception)


def test_a_cpus_operators_are_named_by_what_they_compute() -> None:
    """The attention that runs inside the composite operator; views and allocations are no kernels; the same at every call."""
    from pytest_nfp.devices import cpu

    q, k = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 40, 16)
    w = torch.randn(8, 16)

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, k).view(6, 16) @ w.T

    assert cpu.kernels(forward) == ["aten::_scaled_dot_product_flash_attention_for_cpu", "aten::mm"]
    assert cpu.kernels(forward) == cpu.kernels(forward)


def test_a_gpu_gives_back_what_its_allocator_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two cases, and after an N that did not fit."""
    from pytest_nfp.devices import cuda

    done = Cuda(monkeypatch).done
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty_cache"))
    cuda.device("h20").clean()
    assert done == ["empty_cache"]
