"""What a GPU's kernel reaches.

The figures are those of the first of these that exists: the kernel's own calibration, that of a stand-in GPU, one
carried over by datasheet ratios, the datasheet's peaks. Calibrations that `nfp calibrate --from device` measured on
this machine come before the catalog's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from pytest_nfp import catalog, frameworks
from pytest_nfp.cases import Case
from pytest_nfp.catalog import CALIBRATIONS, Gpu, UnknownName
from pytest_nfp.files import read_yaml
from pytest_nfp.granularity import UNKNOWN, Granularity
from pytest_nfp.granularity.artifacts import cache_folder
from pytest_nfp.predict import residuals
from pytest_nfp.predict.calibration_files import CalibrationsFile, Fitted
from pytest_nfp.predict.modules import Figures, datasheet
from pytest_nfp.principle.routing import POWER_LAW, Routing
from pytest_nfp.recordings.library import KERNELS

STAND_INS = {"h800": "h100", "a800": "a100"}
"""GPUs with the datasheet peak and bandwidth of another one, whose calibration is used instead. The basis names it."""
CARRIED_OVER = {"h20": "h200"}
"""GPUs of the architecture of another one, whose calibration is scaled by the datasheet ratios of peak, bandwidth and
processors."""


def own_calibrations() -> Path:
    """Path of the calibrations that were measured on this machine's GPUs."""
    return cache_folder("calibrations") / "gpus.yaml"


@lru_cache(maxsize=1)
def calibrations() -> dict[tuple[str, str, str, str], tuple[Fitted, Path]]:
    """By key: the calibration, and the file that holds it.

    Raises FileError for a file that can't be used.
    """
    return {
        c.key: (c, path)
        for path in (CALIBRATIONS, own_calibrations())
        if path.exists()
        for c in read_yaml(path, CalibrationsFile).calibrations
    }


def kernel_of(case: Case, granularity: Granularity | None) -> str:
    """The kernel whose calibration describes the case.

    For experts it is Triton if the kernel is unknown: the tiles are those of Triton.
    """
    if case.module == "dense":
        return "gemm"
    kernel = granularity.kernel if granularity is not None else UNKNOWN
    return "triton" if kernel == UNKNOWN and case.module == "moe" else kernel


def kernel_named(text: str) -> str:
    """The calibrated kernel with this name, or with this name in the recordings. Raises UnknownName."""
    known = sorted({kernel for _, _, kernel, _ in calibrations()})
    if text in known:
        return text
    for kernel, sources in KERNELS.items():
        if text in sources:
            return kernel
    raise UnknownName(f"unknown kernel {text!r}: calibrated are {', '.join(known)}")


@lru_cache(maxsize=256)
def figures(gpu: str, framework: str, kernel: str, dtype: str) -> Figures:
    """The figures that the predictors run on.

    Raises UnknownName for an unknown GPU, FileError for a broken catalog file.
    """
    device = catalog.gpu(gpu)
    peak, bandwidth = device.peak_flops_of(dtype), device.bandwidth
    # A framework that calls the vendor's GEMMs but has no calibration of them uses another one's. The basis names it.
    callers = [f.name for f in frameworks.known().values() if f.calls_vendor_gemm]
    others = [f for f in callers if f != framework] if kernel == "gemm" and framework in callers else []
    for source in (gpu, STAND_INS.get(gpu, ""), CARRIED_OVER.get(gpu, "")):
        candidates = [calibrations().get((source, name, kernel, dtype)) for name in (framework, *others)]
        # What was measured on this machine comes before the catalog, even if another framework called the library.
        for c, path in sorted((f for f in candidates if f is not None), key=lambda f: f[0].kind != "measured"):
            if source == CARRIED_OVER.get(gpu):
                return _carried_over(c, device, dtype)
            where = f"{c.gpu}" if c.kind == "recorded" else f"this machine's {c.source}"
            basis = (
                f"calibrated on {c.curves} {c.kind} curves of {c.framework} on {where},"
                f" {c.error:.1%} median error on held-out shapes"
            )
            if source != gpu:
                basis += f"; {c.gpu} stands in for {gpu}, which has its datasheet peak and bandwidth"
            return Figures(
                peak,
                bandwidth,
                c.calibration(),
                basis,
                kernel=kernel,
                residuals=residuals.read(c.residuals_path(path)),
                spread=c.spread,
                latency_spread=c.latency_spread,
            )
    return datasheet(peak, bandwidth)


def _carried_over(c: Fitted, device: Gpu, dtype: str) -> Figures:
    """Another GPU's calibration, scaled by datasheet ratios.

    It has no residuals and no spread: those belong to the other GPU.
    """
    base, own = catalog.gpu(c.gpu), c.calibration()
    peak, bandwidth = device.peak_flops_of(dtype), device.bandwidth
    scaled = replace(
        own,
        flops=own.flops * peak / base.peak_flops_of(dtype),
        bandwidth=own.bandwidth * bandwidth / base.bandwidth,
        processors=device.multiprocessors or own.processors,
    )
    basis = (
        f"the calibration of {c.framework} on {c.gpu} carried over to {device.name} by the ratios of the datasheets,"
        f" which no curve of {device.name} has proven"
    )
    return Figures(peak, bandwidth, scaled, basis, kernel=c.kernel)


def for_routing(on: Figures, routing: Routing | None) -> Figures:
    """The figures, without what was not proven for this routing.

    Residuals and interval come from balanced curves, and hold for power laws too. Skewed curves were measured on a CPU
    alone. Nothing was recorded under uniform and replayed routing. Where nothing was proven, the arithmetic stands
    alone, without an interval.
    """
    is_proven = routing in (None, "balanced") or (isinstance(routing, str) and routing.startswith(POWER_LAW))
    if is_proven or on.residuals is None or (routing == "skewed" and on.has_skewed):
        return on
    basis = f"{on.basis}, for balanced routing: under {routing} routing the arithmetic alone, without an interval"
    return replace(on, basis=basis, residuals=None, spread=None, latency_spread=None)


def figures_of(case: Case, granularity: Granularity | None) -> Figures:
    """The figures of a GPU case."""
    balanced_figures = figures(case.gpu, case.backend.framework, kernel_of(case, granularity), case.dtype)
    return for_routing(balanced_figures, case.routing)
