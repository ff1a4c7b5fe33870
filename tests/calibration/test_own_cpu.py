"""A CPU's kernels go through the same fit as a GPU's: planted numbers come back, switches are learned, what can't be trusted is no calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_nfp import catalog
from pytest_nfp.backends import Prepared
from pytest_nfp.calibration import device_curves, kernel_work, own_cpu
from pytest_nfp.calibration.fit import NoFit
from pytest_nfp.calibration.own_cpu import KERNELS, PEAKS, identity_slug, load_or_calibrate
from pytest_nfp.cases import Backend, Case, expand
from pytest_nfp.devices import Device
from pytest_nfp.files import FileError
from pytest_nfp.granularity import RuleUnknown, granularity_of
from pytest_nfp.predict import Figures, module_work, predict_case
from pytest_nfp.principle import Calibration
from pytest_nfp.testing import Noise, Simulated

PLANTED = Calibration(140e9, 25e9, 1.5, 1.0, 20.0)
Bend = Callable[[Case, int], float]


def straight(case: Case, positions: int) -> float:
    return 1.0


def gemv(case: Case, positions: int) -> float:
    """One row is a matrix-vector product, more rows are another kernel that is twice as slow."""
    return 1.0 if case.batch * positions == 1 else 2.0


class Cpu:
    """A CPU that runs every case as the planted roofline says, bent, on one virtual clock."""

    def __init__(self, bend: Bend = straight, jitter: float = 0.01) -> None:
        self.prepared: list[Case] = []

        def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
            self.prepared.append(case)
            work = module_work(case, granularity_of(case))

            def forward(n: int) -> Callable[[], object]:
                return lambda: (work(n).latency_us(PLANTED) + PLANTED.fixed_us) * bend(case, n)

            return Prepared(forward, 100, 200, "simulated", 2)

        self.machine = Simulated(lambda n: 1.0, Noise(jitter), 1, prepare=prepare)
        self.device: Device = self.machine.device()

    def figures(self, kernel: str, folder: Path, dtype: str = "fp32") -> Figures:
        return own_cpu.figures(self.device, kernel, dtype, folder, 0, lambda text: None)


def suite_case(module: str, subject: str, **wanted: object) -> Case:
    """The case of the suites with these properties."""
    cases = expand("cpu", Backend("torch", "2.13.0"), module, catalog.model(subject))  # type: ignore[arg-type]
    return next(c for c in cases if all(getattr(c, name) == value for name, value in wanted.items()))


@pytest.mark.parametrize("kernel", KERNELS)
def test_planted_numbers_come_back(tmp_path: Path, kernel: str) -> None:
    """Every kernel at 1% noise: T within 3% on held-out shapes, nine of ten N_max within a step, the interval covers."""
    found = load_or_calibrate(Cpu().device, kernel, tmp_path, 0, lambda text: None)
    assert found.shapes >= 10
    assert found.error < 0.03
    assert found.within_one_step >= 0.9
    assert found.covered >= 0.9
    assert (found.gpu, found.framework, found.kernel, found.dtype, found.kind) == (
        "cpu",
        "torch",
        kernel,
        "fp32",
        "measured",
    )


def test_rates_of_a_packed_gemm_are_the_machines(tmp_path: Path) -> None:
    """Phi and beta within 10%, whatever kernel is asked about."""
    on = Cpu().figures("matmul", tmp_path)
    assert on.peak_flops == pytest.approx(PLANTED.flops, rel=0.10)
    assert on.bandwidth == pytest.approx(PLANTED.bandwidth, rel=0.10)


def test_a_kernel_switch_between_one_and_two_rows_is_learned(tmp_path: Path) -> None:
    """T doubles at the second row on every shape: N_max is 1 at b=1 and is not at b=4, where no row is the first."""
    on = Cpu(gemv).figures("matmul", tmp_path)
    assert on.describes
    one, four = (suite_case("dense", "dense-ffn-2048x6144", kernel="matmul", batch=b) for b in (1, 4))
    first = predict_case(one, on, granularity_of(one)).tile_roofline
    assert first is not None and first.boundary.n_max_interval == (1, 1)
    other = predict_case(four, on, granularity_of(four))
    without = predict_case(four, replace(on, residuals=None, spread=None), None)
    assert other.tile_roofline is not None and without.tile_roofline is not None
    assert abs(other.tile_roofline.n_max - without.tile_roofline.n_max) <= 1
    assert other.is_interval


def test_a_kernel_that_is_another_one_on_every_shape_is_unpredictable(tmp_path: Path) -> None:
    """Half of the shapes never leave T(N0), the others leave at once: the held-out shapes say so, and the error is told."""

    def erratic(case: Case, positions: int) -> float:
        if case.kernel != "sdpa":
            return 1.0
        assert case.context is not None
        return 1.0 if positions == 1 else 3.0 if case.context in (4096, 3072, 8192, 6144) else 0.3

    machine = Cpu(erratic)
    on = machine.figures("sdpa", tmp_path)
    case = suite_case("attention", "attention-mha-16x128")
    found = predict_case(case, on, granularity_of(case)).tile_roofline
    assert found is not None
    assert not on.describes
    assert "of the held-out curves is predicted within one step, at least 80% are asked for" in on.cause


@pytest.mark.parametrize(("share", "describes"), [(0.79, False), (0.8, True)])
def test_a_kernel_is_held_to_its_prediction_where_four_of_five_held_out_curves_are_met(
    tmp_path: Path, share: float, describes: bool
) -> None:
    """Below that share its boundary is held to the baseline alone, and the cause has both numbers and the error of T."""
    peaks = load_or_calibrate(Cpu().device, PEAKS, tmp_path, 0, lambda text: None)
    path = own_cpu.calibrations_path(Cpu().device, tmp_path)
    mine = peaks.model_copy(update={"within_one_step": share})
    on = own_cpu.figures_of(mine, peaks, path)
    assert on.describes == describes
    assert ("N_max of 79%" in on.cause) == (not describes)


def test_skewed_experts_are_balanced_over_k_of_them(tmp_path: Path) -> None:
    """Both routings were measured: both have an interval, and N0 of each is its own."""
    on = Cpu().figures("grouped_mm", tmp_path)
    for routing in ("balanced", "skewed"):
        case = suite_case("moe", "moe-ffn-32x1024x768", routing=routing)
        found = predict_case(case, on, granularity_of(case))
        assert found.is_interval
        assert found.tile_roofline is not None
        assert found.tile_roofline.n_max >= case.baseline_positions


def test_suites_never_test_a_calibration_shape() -> None:
    """What is fitted comes from forwards of other shapes than the cases, at least ten of each kernel."""
    tested = {
        (case.gemm, case.subject.hidden, case.subject.moe, case.subject.attention, case.context)
        for subject in catalog.models()
        for module in ("dense", "moe", "attention")
        for case in expand("cpu", Backend("torch", "2.13.0"), module, subject)
    }
    gemms = {
        gemm for m in catalog.models() if m.dense for gemm in ((m.dense.width, m.hidden), (m.hidden, m.dense.width))
    }
    device = Simulated(lambda n: 1.0).device()
    for kernel in KERNELS:
        cases = device_curves.cpu_cases(device, kernel)
        assert len({(c.subject.name, c.context) for c in cases}) >= 10
        for c in cases:
            assert (c.gemm, c.subject.hidden, c.subject.moe, c.subject.attention, c.context) not in tested
            assert c.gemm not in gemms


def test_a_calibration_is_kept_and_read_again(tmp_path: Path) -> None:
    """By the machine's identity; the second time nothing is measured; a broken file is named with its line."""
    machine = Cpu()
    first = machine.figures("onednn-packed", tmp_path)
    count = len(machine.prepared)
    assert count == len(device_curves.CPU_GEMMS)
    again = machine.figures("onednn-packed", tmp_path)
    assert len(machine.prepared) == count
    assert (again.spread, again.calibration) == (first.spread, first.calibration)
    path = own_cpu.calibrations_path(machine.device, tmp_path)
    assert path.parent.name == f"cpu-{identity_slug(machine.device.identity)}"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("kernel: onednn-packed", "kernel: [1]"), encoding="utf-8")
    with pytest.raises(FileError, match=r"calibrations.yaml:\d+: .*kernel"):
        machine.figures("onednn-packed", tmp_path)


def test_another_identity_is_another_calibration() -> None:
    """Thread count, instruction set and library version are part of the machine."""
    assert len({identity_slug({"threads": t, "isa": isa}) for t in (2, 4) for isa in ("AVX2", "AVX512")}) == 4


def test_a_busy_machine_has_no_calibration_and_keeps_none(tmp_path: Path) -> None:
    """Other processes' load: given up after the first curves, with the cause; nothing is kept for the next run."""
    machine = Cpu()
    clock = iter(range(10**6))
    busy = machine.device.read

    def read() -> object:
        i = next(clock)
        return replace(busy(), wall_s=float(i), busy_s=2.0 * i, own_s=0.5 * i)

    device = replace(machine.device, read=read)  # type: ignore[arg-type]
    with pytest.raises(NoFit, match=r"0 of 12 curves of matmul can be trusted.*other processes used 75%"):
        load_or_calibrate(device, "matmul", tmp_path, 0, lambda text: None)
    assert len(machine.prepared) == own_cpu.FIRST
    assert not list(tmp_path.rglob("*.yaml"))
    with pytest.raises(RuleUnknown, match="this CPU can't be calibrated"):
        own_cpu.figures(device, "matmul", "fp32", tmp_path, 0, lambda text: None)


def test_numbers_of_one_dtype_say_nothing_of_another(tmp_path: Path) -> None:
    """BF16 on a CPU is not described by what FP32 was fitted to, and the cause says so."""
    found = Cpu().figures("matmul", tmp_path, "bf16")
    assert not found.describes
    assert found.cause == "nothing is calibrated for this kernel in bf16"


def test_a_kernel_without_shapes_is_said(tmp_path: Path) -> None:
    """vLLM's CPU kernels are held to their baselines alone."""
    found = Cpu().figures("vec", tmp_path)
    assert not found.describes
    assert found.cause == "nothing is calibrated for the kernel vec"


def test_a_view_of_a_gemm_begins_at_each_batch() -> None:
    """Rows 1, 2 and 4 are N0 of one, two and four requests, which see the rows of whole positions alone; experts and attention have their own N0 alone."""
    machine = Cpu()
    gemm, experts = (device_curves.cpu_cases(machine.device, kernel)[:1] for kernel in ("matmul", "grouped_mm"))
    (a,), (b,) = (device_curves.measured(cases, machine.device) for cases in (gemm, experts))
    seen = own_cpu.views(kernel_work.join_one(a, None))
    assert [v.curve.base for v in seen] == [1, 2, 4]
    for v in seen:
        rows = [p.positions for p in v.curve.points]
        assert not [m for m in rows if m % v.curve.base]
        assert [place.rows for place in v.places] == rows
        assert len(v.work) == len(rows)
    assert [v.curve.base for v in own_cpu.views(kernel_work.join_one(b, None))] == [b.base]
