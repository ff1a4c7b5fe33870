"""What this machine's CPU reaches, kernel by kernel.

The fit, the residuals and the cross-validation are those of a GPU's recorded curves. A kernel is calibrated when it is
first asked for, on at least ten shapes that no suite tests. The calibration is kept in the cache by the machine's
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
"""The dtype that is calibrated. A CPU's cases are FP32 unless another dtype is asked for."""
PEAKS = "onednn-packed"
"""The kernel whose rates stand for the machine's own. Packed GEMMs come nearest to them."""
KERNELS = (PEAKS, "matmul", "grouped_mm", "sdpa")
BATCHES = (1, 2, 4)
"""Batches at which a GEMM's curve is judged: from the rows of one position of so many requests on."""
FIRST = 3
"""Number of curves that are measured first. The calibration is given up if none of them can be trusted."""
CONTROLS = 2
"""Number of calibration shapes that are measured once more beside a case that fails."""
MIN_WITHIN_ONE_STEP = 0.8
"""Least share of the held-out curves whose N_max is predicted within one grid step. Below it the kernel counts as
unpredictable."""


def identity_slug(identity: dict[str, Any]) -> str:
    """A short text that stands for a machine's identity in file names."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def calibrations_path(device: Device, folder: Path) -> Path:
    """Path of this machine's calibrations. Their residuals lie beside the file."""
    return folder / f"{device.gpu}-{identity_slug(device.identity)}" / "calibrations.yaml"


def load_or_calibrate(device: Device, kernel: str, folder: Path, seed: int, say: Callable[[str], None]) -> Fitted:
    """The calibration of a kernel of this machine, from the cache or made now.

    Raises NoFit if too few of its curves can be trusted, or if it can't be kept. Nothing is kept then: the next run
    tries again. Raises FileError for a cached file that is broken.
    """
    path = calibrations_path(device, folder)
    if fitted := _kept(path).get(kernel):
        return fitted
    with device_lock(device):
        kept = _kept(path)  # Another process may have calibrated the kernel in the meantime.
        if kernel in kept:
            return kept[kernel]
        cases = device_curves.cpu_cases(device, kernel)
        if not cases:
            raise NoFit(
                f"nothing is calibrated for the kernel {kernel}" if kernel else "nothing is calibrated for this kernel"
            )
        joined = _joined(cases, device, seed, say)
        sha256 = device_curves.digest([j.curve for j in joined])
        fitted, leftover = fit.calibrate(joined, sha256, "measured", fit.observed_peaks(joined), views)
        try:
            write_atomically(fitted.residuals_path(path), leftover)
            write_atomically(path, calibration_files.text_of([*kept.values(), fitted]))
        except OSError as error:
            raise NoFit(f"its calibration can't be kept: {error}") from error
        residuals.read.cache_clear()
        return fitted


def controls(device: Device, case: Case) -> list[Case]:
    """The shapes of the calibration that are nearest to a case's, with its batch and routing.

    Their curves are known.
    """
    alike = [c for c in device_curves.cpu_cases(device, case.kernel or "") if c.routing == case.routing]
    size = math.log(_elements(case))
    nearest = sorted(alike, key=lambda c: abs(math.log(_elements(c)) - size))[:CONTROLS]
    return [replace(c, batch=case.batch) for c in nearest]


def _elements(case: Case) -> int:
    """Elements of the largest GEMM, of all experts of a layer, or of the cached keys and values."""
    moe, attention = case.subject.moe, case.subject.attention
    if case.module == "moe" and moe is not None:
        return moe.experts * moe.width * case.subject.hidden
    if case.module == "attention" and attention is not None:
        return attention.heads * attention.head_dim * (case.context or 1)
    return max(n * k for n, k in case.gemms)


def _kept(path: Path) -> dict[str, Fitted]:
    return {c.kernel: c for c in read_yaml(path, CalibrationsFile).calibrations} if path.exists() else {}


def _joined(cases: list[Case], device: Device, seed: int, say: Callable[[str], None]) -> list[Joined]:
    """The cases' curves with their kernel's work. Raises NoFit if too few shapes can be trusted."""
    left_out: list[str] = []

    def tell(text: str) -> None:
        if text.startswith("left out"):
            left_out.append(text)
        say(f"calibrating {cases[0].kernel}: {text}")

    curves = device_curves.measured(cases[:FIRST], device, seed, tell)
    # If none of the first curves can be trusted, the machine is busy: the others would take minutes in vain.
    if curves:
        curves += device_curves.measured(cases[FIRST:], device, seed, tell)
    if len({c.shape for c in curves}) < fit.MIN_SHAPES:
        reason = f": {left_out[0]}" if left_out else ""
        raise NoFit(
            f"{len(curves)} of {len(cases)} curves of {cases[0].kernel} can be trusted, which is too few{reason}"
        )
    granularity = granularity_of(cases[0])
    return [kernel_work.join_one(c, granularity if c.module == "attention" else None) for c in curves]


def views(j: Joined) -> list[Joined]:
    """A GEMM's curve as each batch sees it, at the rows of whole positions. Any other curve as it is."""
    if j.curve.module != "dense":
        return [j]
    rows = {p.positions for p in j.curve.points}
    return [_at_batch(j, batch) for batch in BATCHES if batch in rows]


def _at_batch(j: Joined, batch: int) -> Joined:
    kept = [i for i, p in enumerate(j.curve.points) if p.positions % batch == 0]
    curve = replace(j.curve, base=batch, points=tuple(j.curve.points[i] for i in kept))
    return replace(j, curve=curve, work=tuple(j.work[i] for i in kept), places=tuple(j.places[i] for i in kept))


def figures(device: Device, kernel: str, dtype: str, folder: Path, seed: int, say: Callable[[str], None]) -> Figures:
    """The figures that the predictors run on for a kernel of this CPU.

    phi and beta of the machine are those of its packed GEMM. The tile roofline runs on the kernel's own fit. Raises
    RuleUnknown if not even the packed GEMM can be calibrated.
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
        fitted = load_or_calibrate(device, kernel, folder, seed, say)
    except NoFit as reason:
        return replace(bare, cause=str(reason))
    return figures_of(fitted, peaks, path)


def figures_of(mine: Fitted, peaks: Fitted, path: Path) -> Figures:
    """The figures of a calibrated kernel. path: the file that holds its calibration."""
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
