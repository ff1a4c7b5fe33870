"""What the driver says, with a stand-in for its library; and nothing where it is missing."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from pytest_nfp.devices import nvml


class Refused(RuntimeError):
    pass


def library(**changed: object) -> SimpleNamespace:
    def refuse(*arguments: object) -> object:
        raise Refused

    parts: dict[str, object] = {
        "NVMLError": Refused,
        "NVML_CLOCK_SM": 1,
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.65.06",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetClockInfo": lambda handle, which: 1965,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 4 | 32,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
            SimpleNamespace(pid=os.getpid()),
            SimpleNamespace(pid=7),
        ],
        "nvmlClocksThrottleReasonSwPowerCap": 4,
        "nvmlClocksThrottleReasonHwSlowdown": 8,
        "nvmlClocksThrottleReasonSwThermalSlowdown": 32,
        "nvmlClocksThrottleReasonHwThermalSlowdown": 64,
        "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": 128,
    }
    return SimpleNamespace(**parts | {name: refuse if value is None else value for name, value in changed.items()})


def test_a_reading_holds_clock_limits_and_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is not among the others."""
    monkeypatch.setitem(sys.modules, "pynvml", library())
    reading = nvml.read(nvml.open_device("abc"))
    assert reading.clock_mhz == 1965
    assert reading.limits == ("power cap", "thermal slowdown")
    assert reading.others == (7,)
    assert nvml.driver() == "580.65.06"
    assert nvml.uuids() == ["GPU-0", "GPU-1"]
    assert nvml.open_device("abc") == "GPU-abc"
    assert nvml.open_device("MIG-abc") == "MIG-abc"


def test_what_the_driver_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MIG instance has neither clocks nor processes of its own."""
    refused = library(
        nvmlDeviceGetClockInfo=None,
        nvmlDeviceGetCurrentClocksThrottleReasons=None,
        nvmlDeviceGetComputeRunningProcesses=None,
        nvmlDeviceGetHandleByUUID=None,
    )
    monkeypatch.setitem(sys.modules, "pynvml", refused)
    reading = nvml.read("handle")
    assert (reading.clock_mhz, reading.limits, reading.others) == (None, (), ())
    assert nvml.open_device("abc") is None


@pytest.mark.parametrize("module", [None, library(nvmlInit=None)])
def test_without_library_or_driver_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    """Readings still carry the time."""
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert nvml.uuids() == []
    assert nvml.driver() is None
    assert nvml.open_device("abc") is None
    assert nvml.clock_mhz("handle") is None
    reading = nvml.read(None)
    assert reading.wall_s > 0
    assert reading.clock_mhz is None
