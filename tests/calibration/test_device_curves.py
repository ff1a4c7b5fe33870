"""A short run on a GPU becomes curves that the fit takes; what can't be trusted is left out with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from pytest_nfp import catalog, cli
from pytest_nfp.backends import Prepared, Unsupported
from pytest_nfp.calibration import device_curves, fit, kernel_work
from pytest_nfp.cases import Case
from pytest_nfp.devices import Device
from pytest_nfp.files import read_yaml
from pytest_nfp.predict import calibrations, module_work
from pytest_nfp.predict.calibration_files import CalibrationsFile
from pytest_nfp.principle import Calibration
from pytest_nfp.testing import Noise, Simulated

PLANTED = Calibration(0.7 * 148e12, 0.8 * 4.0e12, 3.0, 1.0, 8.0)


class Machine:
    """A GPU that runs every case as the planted roofline says, on one virtual clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wrong: str = "", gpu: str = "h20") -> None:
        self._monkeypatch = monkeypatch
        self.machine = Simulated(lambda n: 1.0, Noise(0.01), 1)
        self.prepared: list[Case] = []

        def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
            self.prepared.append(case)
            if case.module == "moe":
                raise Unsupported("CUDA out of memory: 3 GiB were asked for")
            work = module_work(case, None)

            def forward(n: int) -> Callable[[], object]:
                return lambda: work(n).latency_us(PLANTED) + PLANTED.fixed_us

            return Prepared(forward, 100, 200, "torch.matmul", 2, lambda n: wrong)

        self.device = self.machine.device(
            gpu=gpu,
            title="NVIDIA H20",
            identity={"driver": "570.1", "cuda": "12.8"},
            processors=78,
            cache_bytes=60,
            prepare=prepare,
        )

    def is_here(self) -> None:
        """The GPU of this machine, where a vLLM is installed."""
        self._monkeypatch.setattr("pytest_nfp.devices.find_device", lambda gpu: (self.device, ""))
        self._monkeypatch.setattr(device_curves, "installed", lambda: {"vllm": "0.33.0"})


def test_shapes_are_none_that_a_suite_tests_and_none_that_fits_a_cache() -> None:
    """The calibration has not seen what it is asked about."""
    device = Simulated(lambda n: 1.0).device(gpu="h20")
    cases = device_curves.calibration_cases(device, {"vllm": "0.33.0", "sglang": "0.5.9"})
    tested = catalog.models()
    experts = {(m.moe.experts, m.moe.top_k, m.hidden, m.moe.width) for m in tested if m.moe is not None}
    gemms = {
        (n, k)
        for m in tested
        if m.dense is not None
        for n, k in ((m.dense.width, m.hidden), (m.hidden, m.dense.width), (2 * m.dense.width, m.hidden))
    }
    assert {c.backend.framework for c in cases} == {"torch", "vllm", "sglang"}
    assert not gemms & set(device_curves.GEMMS)
    assert not experts & set(device_curves.EXPERTS)
    assert all(2 * n * k > 60e6 for n, k in device_curves.GEMMS)
    assert all(2 * 3 * e * d * f > 150e6 for e, _, d, f in device_curves.EXPERTS)
    assert min(len(device_curves.GEMMS), len(device_curves.EXPERTS)) >= fit.MIN_SHAPES + fit.FOLDS


def test_planted_numbers_come_back_from_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bandwidth within 3%, compute within 10%, at 1% noise."""
    machine = Machine(monkeypatch)
    curves = device_curves.measured(device_curves.calibration_cases(machine.device, {}), machine.device)
    assert len(curves) == len(device_curves.GEMMS)
    assert {c.source for c in curves} == {"NVIDIA H20, driver 570.1, cuda 12.8, torch 2.13.0, simulated"}
    joined, left_out = kernel_work.join(curves)
    assert not left_out
    found = fit.fit(joined, fit.peaks_of("h20", "bf16", 78))
    assert found.bandwidth == pytest.approx(PLANTED.bandwidth, rel=0.03)
    assert found.flops == pytest.approx(PLANTED.flops, rel=0.10)
    assert found.processors == 78


def test_experts_are_curves_from_n0_on() -> None:
    """E, k, hidden and width of the case, the framework's Triton kernel, N0 = ceil(E / k) and no row below."""
    one = Prepared(lambda n: lambda: 100.0 + n, 1, 200, "vllm.fused_experts", 1)
    device = Simulated(lambda n: 1.0).device(gpu="h20", prepare=lambda case, seed, cache_bytes: one)
    cases = [c for c in device_curves.calibration_cases(device, {"vllm": "0.33.0"}) if c.module == "moe"]
    (c,) = device_curves.measured(cases[:1], device)
    assert (c.experts, c.top_k, c.hidden, c.width) == device_curves.EXPERTS[0]
    assert (c.family, c.release, c.base, c.distribution) == ("triton", "0.33.0", 8, "balanced")
    assert c.points[0].positions == 8


@pytest.mark.parametrize(
    ("wrong", "trouble", "reason"),
    [
        ("the result is 1e-1 off an FP64 reference", {}, "left out: torch==2.13.0 gemm-6144x6144: the result is 1e-1 off"),
        ("", {"others": (4711,)}, "left out: torch==2.13.0 gemm-6144x6144: .*4711"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_untrusted_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, wrong: str, trouble: dict[str, object], reason: str
) -> None:
    """A wrong result is never timed; another process on the GPU makes the curve unusable."""
    machine = Machine(monkeypatch, wrong)
    machine.machine.reading = trouble
    said: list[str] = []
    cases = device_curves.calibration_cases(machine.device, {})[:1]
    assert device_curves.measured(cases, machine.device, say=said.append) == []
    assert any(re.search(reason, line) for line in said), said


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The machine's own file, away from the developer's."""
    path = tmp_path / "gpus.yaml"
    for module in (calibrations, cli.calibrate):
        monkeypatch.setattr(module, "own_calibrations", lambda: path)
    forget()
    yield path
    forget()


def forget() -> None:
    calibrations.calibrations.cache_clear()
    calibrations.figures.cache_clear()


def test_the_command_writes_a_calibration_that_is_used_before_the_catalogs(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """H20 has none in the catalog: before, H200's is carried over; after, its own is used, for every caller of GEMMs."""
    Machine(monkeypatch).is_here()
    assert "carried over" in calibrations.figures("h20", "vllm", "gemm", "bf16").basis
    assert "recorded curves of vllm on h200" in calibrations.figures("h200", "vllm", "gemm", "bf16").basis
    assert cli.main(["calibrate", "--from", "device", "--gpu", "h20"]) == 0
    said = capsys.readouterr()
    assert "h20 torch gemm bf16: 14 curves of 14 shapes, T error" in said.out
    assert "left out: vllm==0.33.0 experts-32x2048x1024: CUDA out of memory: 3 GiB were asked for" in said.err
    (fitted,) = read_yaml(own, CalibrationsFile).calibrations
    assert (fitted.kind, fitted.releases) == ("measured", ("2.13.0",))
    forget()
    found = calibrations.figures("h20", "vllm", "gemm", "bf16")
    assert "calibrated on 14 measured curves of torch on this machine's NVIDIA H20, driver 570.1" in found.basis
    assert found.is_proven
    # Where the catalog has one, the machine's own stands before it.
    text = own.read_text(encoding="utf-8").replace("gpu: h20", "gpu: h200")
    own.write_text(text, encoding="utf-8")
    (own.parent / "residuals" / "h20-torch-gemm-bf16.json").rename(
        own.parent / "residuals" / "h200-torch-gemm-bf16.json"
    )
    forget()
    assert "measured curves of torch" in calibrations.figures("h200", "vllm", "gemm", "bf16").basis


def test_a_kernel_that_breaks_in_its_check_costs_its_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python raises of a moved argument is the reason; the memory is given back after every case."""
    machine = Machine(monkeypatch)
    cleaned: list[int] = []

    def check(n: int) -> str:
        raise TypeError("fused_experts() missing 1 required positional argument")

    one = Prepared(lambda n: lambda: 1.0, 1, 200, "k", 1, check)
    device = replace(machine.device, clean=lambda: cleaned.append(1), prepare=lambda case, seed, cache_bytes: one)
    said: list[str] = []
    cases = device_curves.calibration_cases(device, {})[:2]
    assert device_curves.measured(cases, device, say=said.append) == []
    assert len(cleaned) == 2
    assert "left out: torch==2.13.0 gemm-6144x6144: fused_experts() missing 1 required" in said[1]


def test_nothing_measured_writes_nothing(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every case out of memory: exit 2, with the reason of each."""
    Machine(monkeypatch).is_here()
    assert cli.main(["calibrate", "--from", "device", "--gpu", "h20", "--module", "moe"]) == 2
    said = capsys.readouterr()
    assert "nothing could be fitted, so nothing was written" in said.err
    assert said.err.count("CUDA out of memory") == len(device_curves.EXPERTS)
    assert not own.exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--gpu", "h20", "--gpu", "h200"], "one device is calibrated at a time"),
        (["--gpu", "h20", "--dtype", "fp8"], "a device run measures bf16, not fp8"),
        (["--gpu", "cpu", "--output", "c.yaml"], "a CPU's calibration is one file of the cache"),
    ],
)
def test_what_a_device_run_can_not_do_is_said(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    """Two GPUs at once, and weights that no forward is built for."""
    device: Device = Machine(monkeypatch).device
    monkeypatch.setattr("pytest_nfp.devices.find_device", lambda gpu: (device, ""))
    assert cli.main(["calibrate", "--from", "device", *arguments]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_the_device_the_reason_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """No H200 on this machine."""
    assert cli.main(["calibrate", "--from", "device", "--gpu", "h200"]) == 2
    assert "no h200 here" in capsys.readouterr().err


def test_installed_frameworks_are_named_with_their_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the package metadata has it; a framework that is not there is none."""

    def version(name: str) -> str:
        if name == "sglang":
            raise metadata.PackageNotFoundError
        return "0.33.0"

    monkeypatch.setattr(metadata, "version", version)
    assert device_curves.installed() == {"vllm": "0.33.0"}
