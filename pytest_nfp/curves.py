"""A predicted curve T(N) of one fused-MoE layer or GEMM, with its interval: for nfp predict --curve.

Where the catalog holds a calibration of the GPU, framework, kernel and dtype, the tile roofline runs on it, and the interval
comes from its residuals on held-out shapes. Elsewhere it runs on datasheet peaks, and has no interval: latencies are then floors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pytest_nfp.catalog import CALIBRATIONS, Gpu
from pytest_nfp.files import read_yaml
from pytest_nfp.principle import Boundary, Calibration, Point, find_boundary
from pytest_nfp.principle.tile_roofline import Work
from pytest_nfp.recordings.fit import CalibrationsFile, Fitted

STAND_INS = {"h800": "h100", "a800": "a100"}
"""GPUs of equal datasheet peak and bandwidth, whose calibration is used in their place, always by name."""


@dataclass(frozen=True, slots=True)
class PredictedCurve:
    """points: N, latency and the interval of its ratio to T(N0). latencies: (N, us, low, high); low and high are None
    without a calibration. basis: what the figures rest on.
    """

    points: tuple[Point, ...]
    latencies: tuple[tuple[int, float, float | None, float | None], ...]
    boundary: Boundary
    basis: str


@lru_cache(maxsize=1)
def calibrations() -> tuple[Fitted, ...]:
    """The catalog's calibrations. Raises FileError for a file that can't be used."""
    return read_yaml(CALIBRATIONS, CalibrationsFile).calibrations if CALIBRATIONS.exists() else ()


def find_calibration(gpu: str, framework: str, kernel: str, dtype: str) -> tuple[Fitted | None, str]:
    """(calibration, what it is): the GPU's own, a stand-in's, or none."""
    for name in (gpu, STAND_INS.get(gpu)):
        for c in calibrations():
            if (c.gpu, c.framework, c.kernel, c.dtype) == (name, framework, kernel, dtype):
                said = f"calibrated on {c.curves} recorded curves of {c.gpu}, {c.error:.1%} median error on held-out shapes"
                if name != gpu:
                    said += f"; {c.gpu} stands in for {gpu}, which has its datasheet peak and bandwidth"
                return c, said
    return None, f"datasheet peaks: no calibration of {framework}'s {kernel} kernel for {dtype} on {gpu}"


def predict_curve(
    gpu: Gpu,
    framework: str,
    kernel: str,
    dtype: str,
    work: Callable[[int], Work],
    positions: Sequence[int],
    baseline_positions: int,
    tolerance: float,
) -> PredictedCurve:
    """The curve at these N (N0 is added), and where it leaves the tolerance."""
    fitted, basis = find_calibration(gpu.name, framework, kernel, dtype)
    c = fitted.calibration() if fitted else Calibration(gpu.peak_flops, gpu.bandwidth)
    grid = sorted({baseline_positions, *positions})
    latency = {n: work(n).latency_us(c) + c.fixed_us for n in grid}
    base = latency[baseline_positions]
    points: list[Point] = []
    rows: list[tuple[int, float, float | None, float | None]] = []
    for n in grid:
        ratio = latency[n] / base
        if fitted is None:
            points.append(Point(n, latency[n]))
            rows.append((n, latency[n], None, None))
            continue
        # The prediction was so much too small or too large on held-out shapes: what was recorded lay between.
        few, many = fitted.spread
        points.append(Point(n, latency[n], *((1.0, 1.0) if n == baseline_positions else (ratio / many, ratio / few))))
        low, high = fitted.latency_spread
        rows.append((n, latency[n], latency[n] / high, latency[n] / low))
    boundary = find_boundary(points, tolerance, baseline_positions)
    return PredictedCurve(tuple(points), tuple(rows), boundary, basis)
