"""The device that is found, and the one reason when it is not."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from pytest_nfp import devices
from pytest_nfp.catalog import UnknownName


def test_the_cpu_has_an_identity_that_no_jitter_enters() -> None:
    """Processor, cores, threads, ISA, torch: the same twice; a clock or a load is not in it."""
    device, reason = devices.find_device("cpu")
    assert device is not None
    assert reason == ""
    assert set(device.identity) == {"processor", "cores", "threads", "isa", "torch"}
    again, _ = devices.find_device("cpu")
    assert again is not None
    assert again.identity == device.identity
    assert device.cache_bytes > 2**18


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


def test_cuda_events_bracket_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Synchronise, start, forward, end, wait for the end; milliseconds become microseconds."""
    from pytest_nfp.devices import cuda

    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("record")

        def synchronize(self) -> None:
            order.append("wait")

        def elapsed_time(self, end: object) -> float:
            return 0.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronize"))
    assert cuda.time_us(lambda: order.append("forward")) == 250.0
    assert order == ["synchronize", "record", "forward", "record", "wait"]
    properties = SimpleNamespace(name="NVIDIA H20", total_memory=96, L2_cache_size=60)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)
    device = cuda.device("h20")
    assert (device.title, device.cache_bytes, device.timer) == ("NVIDIA H20", 60, "cuda-events")
