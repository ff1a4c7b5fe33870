"""What this machine's CPU reaches, kernel by kernel: the same fit, residuals and cross-validation as of a GPU's recorded curves.

A kernel is calibrated when it is first asked for, on at least ten shapes that no suite tests, and kept in the cache by the machine's
identity: processor, instruction set, threads and library versions.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_nfp.calibration import device_curves, fit, kernel_work
from pytest_nfp.calibration.fit import NoFit
from pytest_nfp.calibration.kernel_work import Joined
from pytest_nfp.cases import Case
from pytest_nfp.devices import Device
from pytest_nfp.devices.lock import device_lock
from pytest_nfp.files import read_yaml, write_atomically
from pytest_nfp.granularity import RuleUnknown, granularity_of
from pytest_nfp.predict import Figures, calibration_files, residuals
from pytest_nfp.predict.calibration_files import CalibrationsFile, Fitted

DTYPE = "fp32"
"""What is calibrated: a CPU's cases are FP32 unless another dtype is asked for."""
PEAKS = "onednn-packed"
"""The kernel whose rates stand for the machine's own: packed GEMMs come nearest to them."""
KERNELS = (PEAKS, "matmul", "grouped_mm", "sdpa")
BATCHES = (1, 2, 4)
"""A GEMM's boundary is judged from the rows of one position of so many requests."""
FIRST = 3
"""Curves after which a machine that lets none of them be trusted is given up."""
CONTROLS = 2
"""Shapes of the calibration that are measured once more beside a case that fails."""
MIN_WITHIN_ONE_STEP = 0.8
"""Share of the held-out curves whose N_max must be predicted within one grid step; else the kernel is unpredictable."""


def identity_slug(identity: dict[str, Any]) -> str:
    """A short name for a machine identity, for file names."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def calibrations_path(device: Device, folder: Path) -> Path:
    """Where the calibrations of this machine are kept; their residuals lie beside the file."""
    return folder / f"{device.gpu}-{identity_slug(device.identity)}" / "calibrations.yaml"


def load_or_calibrate(device: Device, kernel: str, folder: Path, seed: int, say: Callable[[str], None]) -> Fitted:
    """The calibration of a kernel of this machine from the cache, or made now.

    Raises NoFit where too few of its curves can be trusted (nothing is kept then: the next run tries again) or where it can't be
    kept, FileError for a cached file that is broken.
    """
    path = calibrations_path(device, folder)
    if found := _kept(path).get(kernel):
        return found
    with device_lock(device):
        kept = _kept(path)  # Another process may have made it while this one waited.
        if kernel in kept:
            return kept[kernel]
        cases = device_curves.cpu_cases(device, kernel)
        if not cases:
            raise NoFit(
                f"nothing is calibrated for the kernel {kernel}" if kernel else "nothing is calibrated for this kernel"
            )
        joined = _joined(cases, device, seed, say)
        sha256 = device_curves.digest([j.curve for j in joined])
        found, leftover = fit.calibrate(joined, sha256, "measured", fit.observed_peaks(joined), views)
        try:
            write_atomically(found.residuals_path(path), leftover)
            write_atomically(path, calibration_files.text_of([*kept.values(), found]))
        except OSError as error:
            raise NoFit(f"its calibration can't be kept: {error}") from error
        residuals.read.cache_clear()
        return found


def controls(device: Device, case: Case) -> list[Case]:
    """Shapes of the calibration that are nearest to a case's, with its batch and routing: their curves are known."""
    alike = [c for c in device_curves.cpu_cases(device, case.kernel or "") if c.routing == case.routing]
    size = math.log(_elements(case))
    nearest = sorted(alike, key=lambda c: abs(math.log(_elements(c)) - size))[:CONTROLS]
    return [replace(c, batch=case.batch) for c in nearest]


def _elements(case: Case) -> int:
    """Of the largest GEMM, of an expert's layer, or of the cached keys and values."""
    moe, attention = case.subject.moe, case.subject.attention
    if case.module == "moe" and moe is not None:
        return moe.experts * moe.width * case.subject.hidden
    if case.module == "attention" and attention is not None:
        return attention.heads * attention.head_dim * (case.context or 1)
    return max(n * k for n, k in case.gemms)


def _kept(path: Path) -> dict[str, Fitted]:
    return {c.kernel: c for c in read_yaml(path, CalibrationsFile).calibrations} if path.exists() else {}


def _joined(cases: list[Case], device: Device, seed: int, say: Callable[[str], None]) -> list[Joined]:
    """The cases' curves with their kernel's work. Raises NoFit where none is left."""
    left_out: list[str] = []

    def tell(text: str) -> None:
        if text.startswith("left out"):
            left_out.append(text)
        say(f"calibrating {cases[0].kernel}: {text}")

    curves = device_curves.measured(cases[:FIRST], device, seed, tell)
    if (
        curves
    ):  # Where none of the first can be trusted the machine is busy: the others would take minutes to say the same.
        curves += device_curves.measured(cases[FIRST:], device, seed, tell)
    if len({c.shape for c in curves}) < fit.MIN_SHAPES:
        reason = f": {left_out[0]}" if left_out else ""
        raise NoFit(
            f"{len(curves)} of {len(cases)} curves of {cases[0].kernel} can be trusted, which is too few{reason}"
        )
    granularity = granularity_of(cases[0])
    return [kernel_work.join_one(c, granularity if c.module == "attention" else None) for c in curves]


def views(j: Joined) -> list[Joined]:
    """A GEMM's curve as each batch sees it, at the rows of whole positions; any other as it is."""
    if j.curve.module != "dense":
        return [j]
    rows = {p.positions for p in j.curve.points}
    return [_at_batch(j, batch) for batch in BATCHES if batch in rows]


def _at_batch(j: Joined, batch: int) -> Joined:
    kept = [i for i, p in enumerate(j.curve.points) if p.positions % batch == 0]
    curve = replace(j.curve, base=batch, points=tuple(j.curve.points[i] for i in kept))
    return replace(j, curve=curve, work=tuple(j.work[i] for i in kept), places=tuple(j.places[i] for i in kept))


def figures(device: Device, kernel: str, dtype: str, folder: Path, seed: int, say: Callable[[str], None]) -> Figures:
    """What the predictors run on for a kernel of this CPU. Raises RuleUnknown where not even its peaks can be calibrated.

    Phi and beta of the machine are those of its packed GEMM; the tile roofline runs on the kernel's own fit.
    """
    path = calibrations_path(device, folder)
    try:
        peaks = load_or_calibrate(device, PEAKS, folder, seed, say)
    except NoFit as reason:
        raise RuleUnknown(f"this CPU can't be calibrated: {reason}") from None
    bare = Figures(peaks.flops, peaks.bandwidth, peaks.calibration(), "the machine's packed GEMM", describes=False)
    if dtype != DTYPE:
        return replace(bare, cause=f"nothing is calibrated for this kernel in {dtype}")
    try:
        mine = load_or_calibrate(device, kernel, folder, seed, say)
    except NoFit as reason:
        return replace(bare, cause=str(reason))
    return figures_of(mine, peaks, path)


def figures_of(mine: Fitted, peaks: Fitted, path: Path) -> Figures:
    """A kernel's calibration as the predictors take it. path: of the file that holds it."""
    cause = ""
    if mine.within_one_step < MIN_WITHIN_ONE_STEP:
        cause = (
            f"N_max of {mine.within_one_step:.0%} of the held-out curves is predicted within one step, at least"
            f" {MIN_WITHIN_ONE_STEP:.0%} are asked for; T is off by {mine.error:.0%} in the median"
        )
    basis = (
        f"calibrated on {mine.curves} measured curves of {mine.shapes} other shapes, {mine.error:.1%} median error on"
        f" held-out shapes, N_max within one step of {mine.within_one_step:.0%} of them"
    )
    return Figures(
        peaks.flops,
        peaks.bandwidth,
        mine.calibration(),
        basis,
        describes=not cause,
        cause=cause,
        kernel=mine.kernel,
        residuals=residuals.read(mine.residuals_path(path)),
        spread=mine.spread,
        latency_spread=mine.latency_spread,
        has_skewed=True,
    )
