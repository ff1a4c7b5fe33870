"""What a GPU's kernel reaches: its calibration in the catalog, a stand-in's, one carried over by datasheet ratios, or peaks."""

from __future__ import annotations

from functools import lru_cache

from pytest_nfp import catalog
from pytest_nfp.cases import Case
from pytest_nfp.catalog import CALIBRATIONS, UnknownName
from pytest_nfp.files import read_yaml
from pytest_nfp.granularity import Granularity
from pytest_nfp.predict import Figures, datasheet
from pytest_nfp.principle import Calibration
from pytest_nfp.recordings import residuals
from pytest_nfp.recordings.fit import CalibrationsFile, Fitted
from pytest_nfp.recordings.library import KERNELS

STAND_INS = {"h800": "h100", "a800": "a100"}
"""GPUs of equal datasheet peak and bandwidth, whose calibration is used in their place, always by name."""
CARRIED_OVER = {"h20": "h200"}
"""GPUs of the same architecture, whose calibration is scaled by the datasheet ratios of peak, bandwidth and processors."""


@lru_cache(maxsize=1)
def calibrations() -> tuple[Fitted, ...]:
    """The catalog's calibrations. Raises FileError for a file that can't be used."""
    return read_yaml(CALIBRATIONS, CalibrationsFile).calibrations if CALIBRATIONS.exists() else ()


def _find(gpu: str | None, framework: str, kernel: str, dtype: str) -> Fitted | None:
    return next((c for c in calibrations() if c.key == (gpu, framework, kernel, dtype)), None)


def kernel_of(case: Case, granularity: Granularity | None) -> str:
    """The kernel whose calibration describes the case; Triton where it is not known which one runs: the tiles are its own."""
    if case.module == "dense":
        return "gemm"
    kernel = granularity.kernel if granularity is not None else "unknown"
    return "triton" if kernel == "unknown" and case.module == "moe" else kernel


def kernel_named(text: str) -> str:
    """A calibrated kernel by its name, or by one that recordings give it. Raises UnknownName."""
    if text in {c.kernel for c in calibrations()}:
        return text
    for kernel, sources in KERNELS.items():
        if text in sources:
            return kernel
    known = sorted({c.kernel for c in calibrations()})
    raise UnknownName(f"unknown kernel {text!r}: calibrated are {', '.join(known)}")


@lru_cache(maxsize=256)
def figures(gpu: str, framework: str, kernel: str, dtype: str) -> Figures:
    """What the predictors run on. Raises UnknownName for an unknown GPU, FileError for a broken catalog file.

    The frameworks call the same GEMM libraries: where one has no GEMM calibration, the other's stands in, by name.
    """
    device = catalog.gpu(gpu)
    peak, bandwidth = device.peak_flops_of(dtype), device.bandwidth
    others = [f for f in ("vllm", "sglang") if f != framework] if kernel == "gemm" else []
    for source in (gpu, STAND_INS.get(gpu), CARRIED_OVER.get(gpu)):
        for name in (framework, *others):
            c = _find(source, name, kernel, dtype)
            if c is None:
                continue
            said = f"calibrated on {c.curves} recorded curves of {c.framework} on {c.gpu}, {c.error:.1%} median error on held-out shapes"
            if source == CARRIED_OVER.get(gpu):
                base = catalog.gpu(c.gpu)
                said = (
                    f"{said}; carried over to {gpu} by the ratios of the datasheets, which no curve of {gpu} has proven"
                )
                moved = _carried_over(
                    c.calibration(),
                    peak / base.peak_flops_of(dtype),
                    bandwidth / base.bandwidth,
                    device.multiprocessors or c.processors,
                )
                return Figures(
                    peak, bandwidth, moved, said, kernel=kernel, spread=c.spread, latency_spread=c.latency_spread
                )
            if source != gpu:
                said += f"; {c.gpu} stands in for {gpu}, which has its datasheet peak and bandwidth"
            left = residuals.read(c.residuals_path(CALIBRATIONS))
            return Figures(
                peak,
                bandwidth,
                c.calibration(),
                said,
                kernel=kernel,
                residuals=left,
                spread=c.spread,
                latency_spread=c.latency_spread,
            )
    return datasheet(peak, bandwidth)


def figures_of(case: Case, granularity: Granularity | None) -> Figures:
    """The figures of a GPU case."""
    return figures(case.gpu, case.backend.framework, kernel_of(case, granularity), case.dtype)


def _carried_over(c: Calibration, flops: float, bandwidth: float, processors: int) -> Calibration:
    from dataclasses import replace

    return replace(c, flops=c.flops * flops, bandwidth=c.bandwidth * bandwidth, processors=processors)
