"""The fit finds planted numbers, and a kernel that it can't describe is found out on shapes left aside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_nfp.cases import Backend, Case
from pytest_nfp.catalog import Dense, Model
from pytest_nfp.files import FileError, read_yaml
from pytest_nfp.measure import sweep
from pytest_nfp.measure.calibrate import (
    POSITIONS,
    CalibrationFile,
    KernelCalibration,
    calibration_cases,
    fit_kernel,
    identity_slug,
    load_or_calibrate,
)
from pytest_nfp.measure.curve import Curve
from pytest_nfp.measure.protocol import CALIBRATION
from pytest_nfp.predict import module_work
from pytest_nfp.principle import Calibration
from pytest_nfp.testing import Noise, Simulated, staircase

CASES = [
    Case(
        "cpu",
        Backend("torch", "2"),
        "dense",
        Model(name=f"{d}x{f}", hidden=d, dense=Dense(width=f), source="t"),
        "fp32",
        kernel="matmul",
    )
    for d, f in ((1536, 5120), (2560, 4608), (3072, 3072))
]


def curves(c: Calibration, bend: Callable[[int], float], noise: float) -> list[Curve]:
    """Curves of the roofline c, bent at some N, under noise."""
    found = []
    for i, case in enumerate(CASES):
        work = module_work(case, None)
        machine = Simulated(lambda n, w=work: (w(n).latency_us(c) + c.fixed_us) * bend(n), Noise(noise), i)  # type: ignore[misc]
        found.append(sweep(machine.forward, POSITIONS, machine.device(), CALIBRATION))
    return found


@pytest.mark.parametrize("overlap", [1.0, 2.0, 6.0])
def test_planted_numbers_come_back(overlap: float) -> None:
    """FLOP/s and bytes/s within 10%, at 2% noise, and the held-out boundary is met."""
    fitted = fit_kernel(CASES, curves(Calibration(140e9, 25e9, overlap, 1, 20), lambda n: 1.0, 0.02))
    assert fitted.describes, fitted.cause
    assert fitted.flops == pytest.approx(140e9, rel=0.10)
    assert fitted.bandwidth == pytest.approx(25e9, rel=0.10)
    assert fitted.error < 0.05
    assert fitted.reread == 1.0


def test_a_kernel_switch_between_one_and_two_positions_is_found_with_its_cause() -> None:
    """T doubles at N = 2: no roofline does that, and the cause names the place."""
    fitted = fit_kernel(CASES, curves(Calibration(140e9, 25e9, 1.1), lambda n: 1.0 if n == 1 else 2.0, 0.02))
    assert not fitted.describes
    assert "from N=1 to 2" in fitted.cause
    assert "another kernel or path begins there" in fitted.cause


def test_suites_never_test_a_calibration_shape() -> None:
    """φ, β and p come from forwards of other shapes than the cases."""
    from pytest_nfp import catalog

    tested = {(m.hidden, m.dense, m.moe, m.attention) for m in catalog.models()}
    for cases in calibration_cases(Simulated(staircase()).device()).values():
        for c in cases:
            assert (c.subject.hidden, c.subject.dense, c.subject.moe, c.subject.attention) not in tested


KERNEL = KernelCalibration(
    flops=1e11, bandwidth=2e10, overlap=1.2, reread=1, fixed_us=0, curves=3, shapes=("a",), error=0.05, describes=True
)


def test_a_cached_calibration_is_used_and_a_broken_one_named(tmp_path: Path) -> None:
    """Keyed by the machine's identity; a wrong field is said with file and line."""
    device = Simulated(staircase()).device()
    path = tmp_path / f"cpu-{identity_slug(device.identity)}.yaml"
    import yaml

    stored = CalibrationFile(schema=1, tool="t", identity=device.identity, kernels={"onednn-packed": KERNEL})
    path.write_text(yaml.safe_dump(stored.model_dump(mode="json", by_alias=True)), encoding="utf-8")
    assert load_or_calibrate(device, tmp_path, 0, print) == stored
    assert stored.figures("onednn-packed").balance == pytest.approx(5)
    path.write_text(path.read_text(encoding="utf-8").replace("overlap: 1.2", "overlap: 0.2"), encoding="utf-8")
    with pytest.raises(FileError, match=r"yaml:\d+: kernels.onednn-packed.overlap"):
        read_yaml(path, CalibrationFile)


def test_another_identity_is_another_calibration() -> None:
    """Thread count and library version are part of the machine."""
    assert identity_slug({"threads": 2}) != identity_slug({"threads": 4})


def test_numbers_of_one_dtype_say_nothing_of_another() -> None:
    """BF16 on a CPU is not described by what FP32 was fitted to, and the cause says so."""
    one = fit_kernel(CASES, curves(Calibration(140e9, 25e9, 2.0), lambda n: 1.0, 0.02))
    file = CalibrationFile(schema=1, tool="t", identity={}, kernels={"onednn-packed": one, "matmul": one})
    assert file.figures("matmul").describes
    found = file.figures("matmul", "bf16")
    assert not found.describes
    assert found.cause == "nothing is calibrated for this kernel in bf16"
