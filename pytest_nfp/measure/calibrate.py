"""Calibrate a device for the tile roofline: effective FLOP/s and bytes/s, overlap exponent, fixed cost, re-read share.

Each kernel is fitted to curves of other shapes than the cases under test, and judged on shapes left out of the fit:
`describes` says whether the fitted curve predicts their boundary within the match tolerance. A kernel that the model
cannot describe (a library that switches kernels between N = 1 and N = 2) is kept with that verdict and its cause.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pytest_nfp import __version__
from pytest_nfp.backends import prepare
from pytest_nfp.cases import Backend, Case, Module
from pytest_nfp.catalog import Attention, Dense, Model, Moe
from pytest_nfp.devices import Device
from pytest_nfp.files import read_yaml, write_atomically
from pytest_nfp.granularity import granularity_of
from pytest_nfp.measure.curve import Curve
from pytest_nfp.measure.sweep import sweep_module
from pytest_nfp.predict import Figures, module_work
from pytest_nfp.principle import Calibration, find_boundary, predict_boundary
from pytest_nfp.principle.agreement import compare, match_slack, sweep_step
from pytest_nfp.principle.tile_roofline import Work

POSITIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
DTYPE = "fp32"
"""What is calibrated: a CPU's cases are FP32 unless another dtype is asked for."""
TOLERANCE = 0.20
MATCH_TOLERANCE = 0.15


class KernelCalibration(BaseModel):
    """What was fitted for one kernel, from how much, and how well it does on shapes it has not seen."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    flops: Annotated[float, Field(gt=0)]
    bandwidth: Annotated[float, Field(gt=0)]
    overlap: Annotated[float, Field(ge=1)]
    reread: Annotated[float, Field(ge=0, le=1)]
    fixed_us: Annotated[float, Field(ge=0)]
    curves: int
    shapes: tuple[str, ...]
    error: Annotated[float, Field(ge=0)]
    describes: bool
    cause: str = ""

    def calibration(self) -> Calibration:
        """The numbers that the tile roofline runs on."""
        return Calibration(self.flops, self.bandwidth, self.overlap, self.reread, self.fixed_us)


class CalibrationFile(BaseModel):
    """One machine's calibration, with its identity."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_: Literal[1] = Field(alias="schema")
    tool: str
    identity: dict[str, Any]
    kernels: dict[str, KernelCalibration]

    def figures(self, kernel: str, dtype: str = DTYPE) -> Figures:
        """Phi and beta of the machine are those of its packed GEMM; the tile roofline runs on the kernel's own fit."""
        peak, mine = self.kernels["onednn-packed"], self.kernels.get(kernel)
        if mine is None or dtype != DTYPE:
            cause = "nothing is calibrated for this kernel" + ("" if dtype == DTYPE else f" in {dtype}")
            return Figures(peak.flops, peak.bandwidth, peak.calibration(), "the machine's packed GEMM", False, cause)
        basis = f"calibrated on {mine.curves} curves of other shapes, {mine.error:.0%} median error on shapes left out"
        return Figures(peak.flops, peak.bandwidth, mine.calibration(), basis, mine.describes, mine.cause)


def identity_slug(identity: dict[str, Any]) -> str:
    """A short name for a machine identity, for file names."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def load_or_calibrate(device: Device, folder: Path, seed: int, progress: Callable[[str], None]) -> CalibrationFile:
    """The machine's calibration from the cache, or made now. Raises FileError for a cached file that is broken."""
    path = folder / f"{device.gpu}-{identity_slug(device.identity)}.yaml"
    if path.exists():
        return read_yaml(path, CalibrationFile)
    kernels = {}
    for kernel, cases in calibration_cases(device).items():
        curves = []
        for case in cases:
            progress(f"calibrating {kernel}: {case.subject.name}, {case.routing or 'b=1'}")
            prepared = prepare(case, seed, device.cache_bytes)
            grid = [n for n in POSITIONS if n >= case.baseline_positions] or [case.baseline_positions]
            curves.append(sweep_module(prepared, grid, device, case.baseline_positions, seed))
        kernels[kernel] = fit_kernel(cases, curves)
    result = CalibrationFile(schema=1, tool=f"pytest-nfp {__version__}", identity=device.identity, kernels=kernels)
    import yaml

    write_atomically(
        path, yaml.safe_dump(result.model_dump(mode="json", by_alias=True), sort_keys=False, default_flow_style=None)
    )
    return result


def calibration_cases(device: Device) -> dict[str, list[Case]]:
    """Shapes that no suite tests, for each CPU kernel."""
    backend = Backend("torch", device.torch_release)

    def case(module: Module, kernel: str, model: Model, **workload: Any) -> Case:
        return Case("cpu", backend, module, model, DTYPE, kernel=kernel, **workload)

    def model(name: str, **parts: Any) -> Model:
        return Model(name=name, source="calibration shape", **parts)

    dense = [
        model(f"dense-{d}x{f}", hidden=d, dense=Dense(width=f)) for d, f in ((1536, 5120), (2560, 4608), (3072, 3072))
    ]
    experts = [
        model(f"moe-{e}x{d}x{f}", hidden=d, moe=Moe(experts=e, top_k=k, width=f))
        for e, k, d, f in ((24, 4, 896, 896), (20, 4, 1280, 640))
    ]
    attention = [
        (model(f"attention-{h}x128", hidden=h * 128, attention=Attention(heads=h, kv_heads=h, head_dim=128)), context)
        for h, context in ((12, 4096), (20, 3072), (8, 12288))
    ]
    return {
        "onednn-packed": [case("dense", "onednn-packed", m) for m in dense],
        "matmul": [case("dense", "matmul", m) for m in dense],
        "grouped_mm": [
            case("moe", "grouped_mm", m, top_k=m.moe.top_k, routing=routing)
            for m in experts
            if m.moe is not None
            for routing in ("balanced", "skewed")
        ],
        "sdpa": [case("attention", "sdpa", m, context=context) for m, context in attention],
    }


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured point with the work that it did."""

    group: str
    positions: int
    latency_us: float
    work: Work


def fit_kernel(cases: Sequence[Case], curves: Sequence[Curve]) -> KernelCalibration:
    """Fit one kernel, then leave each shape out in turn and predict its curve and boundary from the others."""
    observations = [
        Observation(case.subject.name, p.positions, p.latency_us, module_work(case, granularity_of(case))(p.positions))
        for case, curve in zip(cases, curves, strict=True)
        for p in curve.points
    ]
    shapes = list(dict.fromkeys(o.group for o in observations))
    errors: list[float] = []
    causes: list[str] = []
    steps: dict[tuple[int, int], list[Step]] = {}
    for left_out in shapes:
        held = fit([o for o in observations if o.group != left_out])
        for case, curve in zip(cases, curves, strict=True):
            if case.subject.name != left_out:
                continue
            work = module_work(case, granularity_of(case))
            predicted = [work(p.positions).latency_us(held) + held.fixed_us for p in curve.points]
            errors += [abs(math.log(t / p.latency_us)) for p, t in zip(curve.points, predicted, strict=True)]
            for step in _steps(case, curve, predicted):
                steps.setdefault((step.positions, step.following), []).append(step)
            if miss := _missed_boundary(case, curve, held):
                causes.append(miss)
    fitted = fit(observations)
    causes += _kernel_switches(cases, fitted, steps)
    return KernelCalibration(
        flops=float(f"{fitted.flops:.4g}"),
        bandwidth=float(f"{fitted.bandwidth:.4g}"),
        overlap=round(fitted.overlap, 3),
        reread=round(fitted.reread, 3),
        fixed_us=round(fitted.fixed_us, 1),
        curves=len(curves),
        shapes=tuple(shapes),
        error=round(math.expm1(median(errors)), 4),
        describes=not causes,
        cause="; ".join(causes[-1:]),
    )


@dataclass(frozen=True, slots=True)
class Step:
    """From one N of a curve to the next: how much T grows, as measured and as the fit says."""

    positions: int
    following: int
    measured: float
    predicted: float


def _steps(case: Case, curve: Curve, predicted: Sequence[float]) -> list[Step]:
    """The steps from N0 up to the one that leaves the tolerance: those that decide the boundary."""
    found: list[Step] = []
    base = curve.baseline_us
    pairs = list(zip(curve.points, predicted, strict=True))
    for (a, model_a), (b, model_b) in pairwise(pairs):
        if a.positions >= case.baseline_positions and a.latency_us <= (1 + TOLERANCE) * base:
            found.append(Step(a.positions, b.positions, b.latency_us / a.latency_us, model_b / model_a))
    return found


def _kernel_switches(cases: Sequence[Case], fitted: Calibration, steps: dict[tuple[int, int], list[Step]]) -> list[str]:
    """Steps that the fit misses at the same N on several shapes, by enough to move N_max past the match tolerance."""
    causes = []
    for (a, b), seen in sorted(steps.items(), reverse=True):
        if len(seen) < 2:
            continue
        measured, model = median(s.measured for s in seen), median(s.predicted for s in seen)
        for case in cases:
            work = {case.module: module_work(case, granularity_of(case))}
            predicted = predict_boundary(work, fitted, TOLERANCE, case.baseline_positions)
            n = predicted.n_max
            shifted = [
                replace(p, latency_us=p.latency_us * (measured / model if p.positions >= b else 1))
                for p in predicted.points
            ]
            moved = find_boundary(shifted, TOLERANCE, case.baseline_positions).n_max
            if abs(moved - n) > match_slack(n, sweep_step(POSITIONS, n), case.granule, MATCH_TOLERANCE):
                causes.append(
                    f"on {len(seen)} curves of other shapes T grows {measured:.2f}x from N={a} to {b}, the fitted roofline"
                    f" says {model:.2f}x: another kernel or path begins there"
                )
                break
    return causes


def _missed_boundary(case: Case, curve: Curve, held: Calibration) -> str:
    """What the fit says of a shape it has not seen, where it is not what was measured."""
    measured = find_boundary(curve.points, TOLERANCE, case.baseline_positions)
    work = {case.module: module_work(case, granularity_of(case))}
    n = predict_boundary(work, held, TOLERANCE, case.baseline_positions).n_max
    slack = match_slack(n, sweep_step((p.positions for p in curve.points), n), case.granule, MATCH_TOLERANCE)
    if compare(measured.n_max_interval, n, n, slack, decided=True) == "agrees":
        return ""
    name = f"{case.subject.name} {case.routing or ''}".rstrip()
    return f"the fit gives N_max {n} for {name}, which it has not seen; measured is {measured.n_max}"


def fit(observations: Sequence[Observation]) -> Calibration:
    """Least squares on log T over (FLOP/s, bytes/s, overlap, re-read share, fixed cost), from several starts."""
    import numpy as np
    from scipy.optimize import least_squares

    measured = np.log([o.latency_us for o in observations])
    compute = max(o.work.flops / o.latency_us for o in observations) * 1e6
    memory = max(o.work.bytes_once / o.latency_us for o in observations) * 1e6
    quickest = min(o.latency_us for o in observations)

    def calibration(x: Any) -> Calibration:
        return Calibration(compute * math.exp(x[0]), memory * math.exp(x[1]), math.exp(x[2]), x[3], x[4] * quickest)

    def residuals(x: Any) -> Any:
        c = calibration(x)
        return np.log([o.work.latency_us(c) + c.fixed_us for o in observations]) - measured

    low, high = [-3.0, -3.0, 0.0, 0.0, 0.0], [3.0, 3.0, math.log(16), 1.0, 0.9]
    fits = [
        least_squares(residuals, [0.1, 0.1, math.log(p), 0.5, 0.05], bounds=(low, high), loss="soft_l1", f_scale=0.1)
        for p in (1.1, 2.0, 6.0)
    ]
    best = calibration(min(fits, key=lambda f: f.cost).x)
    # Where no observation reads anything twice, the share is not known: the default stands.
    return best if any(o.work.bytes_again for o in observations) else replace(best, reread=1.0)
