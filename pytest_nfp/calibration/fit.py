"""Fit the tile roofline to recorded or measured curves, and judge it on shapes that the fit has not seen.

There is one calibration for each device, framework, kernel and dtype. It has the effective bandwidth and compute, the
share of the compute by tile height, the overlap, the re-read share, a thread block's own time, the activations' factor
and a fixed cost. The fit is least squares on the logarithms of T and of T(N)/T(N0) with a robust loss, from two starts.
Every curve has the same weight.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from pytest_nfp import catalog
from pytest_nfp.calibration.cross_validation import NOTHING, HeldOut, judge, percentiles
from pytest_nfp.calibration.kernel_work import LAST_ROWS, Joined
from pytest_nfp.predict.calibration_files import Fitted
from pytest_nfp.predict.residuals import GEMM_ROWS, Place, Residuals, krige
from pytest_nfp.predict.residuals import text_of as residuals_text
from pytest_nfp.principle import Calibration, Point
from pytest_nfp.principle.tile_roofline import Work

TILES = (16, 32, 64, 128)
"""Tile heights, in rows, whose share of the compute is fitted."""


FIT_POINTS = 24
"""Most points of a curve that enter a fit."""


FOLDS = 4
"""Folds of the cross-validation, where a fit does not need more."""


MIN_SHAPES = 8
"""Fewest shapes that a fit needs."""


class NoFit(Exception):
    """No calibration can be given. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a fit starts from."""

    flops: float
    """Peak of the device in FLOP/s."""
    bandwidth: float
    """Peak of the device in bytes/s."""
    processors: int
    """Multiprocessors of the device."""
    observed: bool = False
    """Whether the peaks are the highest rates of any curve, without figures of a vendor. The fit may exceed them:
    memory and compute may take turns, and no known figure gives a bound."""


def peaks_of(gpu: str, dtype: str, processors: int | None = None) -> Peaks:
    """The catalog's figures of a GPU.

    processors: those of the GPU at hand; None takes the catalog's. Raises NoFit if neither is known.
    """
    known = catalog.gpu(gpu)
    if (count := processors or known.multiprocessors) is None:
        raise NoFit(f"the catalog does not know how many multiprocessors {known.name} has")
    return Peaks(known.peak_flops_of(dtype), known.bandwidth, count)


def observed_peaks(joined: Sequence[Joined]) -> Peaks:
    """The highest rates that these curves show, for a device without figures of a vendor."""
    points = [(w, p.latency_us / 1e6) for j in joined for w, p in zip(j.work, j.curve.points, strict=True)]
    return Peaks(max(w.flops / t for w, t in points), max(w.bytes_once / t for w, t in points), 1, observed=True)


class _Parameter(NamedTuple):
    """One of the fitted numbers."""

    name: str
    """Name for messages."""
    least: float
    """Lower bound."""
    most: float
    """Upper bound."""
    may_reach_least: bool
    """Whether the lower bound means that the effect is absent or whole."""
    may_reach_most: bool
    """Whether the upper bound means that the effect is absent or whole."""

    def is_stuck(self, value: float) -> bool:
        """Whether a value sits on a bound that it may not reach: the fit would have gone farther."""
        edge = 1e-3 * (self.most - self.least)
        is_low, is_high = value < self.least + edge, value > self.most - edge
        return (is_low and not self.may_reach_least) or (is_high and not self.may_reach_most)


def _parameters(tiles: Sequence[int], above: float) -> list[_Parameter]:
    """The fitted numbers: logarithms, except the share of re-reads.

    above: how far the logarithm of an observed rate may be exceeded.
    """
    return [
        # At most the peak, plus the little that stays in the cache between forwards.
        _Parameter("bandwidth", -2.0, 0.05 + above, False, True),
        _Parameter("overlap", 0.0, 3.0, True, True),  # 1 is none, 20 is full
        _Parameter("fixed cost", -3.0, 6.0, True, False),  # 0.05 to 400 us
        _Parameter("re-read share", 0.0, 1.0, True, True),  # share of a second tile's read that misses the cache
        _Parameter("activations", -3.0, 3.0, True, False),
        _Parameter("block", -7.0, 3.0, True, False),  # a block's own time: a nanosecond counts as none
        # Share of the peak. It is the whole peak where compute never limits.
        *(_Parameter(f"tile {t}", -4.0, above, False, True) for t in tiles or (0,)),
    ]


def _calibration_of(x: Sequence[float], tiles: Sequence[int], peaks: Peaks, absent: Collection[str]) -> Calibration:
    bandwidth, overlap, fixed, reread, activation, block, *shares = x
    return Calibration(
        peaks.flops * (1.0 if tiles else math.exp(shares[0])),
        peaks.bandwidth * math.exp(bandwidth),
        math.exp(overlap),
        1.0 if "re-read share" in absent else reread,
        math.exp(fixed),
        tuple((t, math.exp(s)) for t, s in zip(tiles, shares, strict=True)) if tiles else (),
        0.0 if "block" in absent else math.exp(block),
        peaks.processors,
        None if "activations" in absent else math.exp(activation),
    )


def _absent(joined: Sequence[Joined]) -> set[str]:
    """Names of the parameters that no curve shows, so that they can't be fitted: their defaults stand.

    A GEMM's table, for one, has neither blocks nor second tiles.
    """
    work = [w for j in joined for w in j.work]
    present = {
        "re-read share": any(w.bytes_again for w in work),
        "activations": any(w.activations for w in work),
        "block": any(w.blocks for w in work),
    }
    return {name for name, is_there in present.items() if not is_there}


def fit(joined: Sequence[Joined], peaks: Peaks | None = None) -> Calibration:
    """The calibration of these curves' kernel. peaks: of the device; None takes the catalog's.

    Raises NoFit if scipy is missing, if there are too few shapes, if the fit does not converge, or if it sits on a
    bound.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise NoFit("a fit needs scipy: pip install 'pytest-nfp[stats]'") from None

    if len({j.curve.shape for j in joined}) < MIN_SHAPES:
        raise NoFit(f"{len({j.curve.shape for j in joined})} shapes are too few: a fit needs {MIN_SHAPES}")
    known = peaks or peaks_of(joined[0].curve.gpu, joined[0].curve.dtype)
    tiles = [t for t in TILES if any(w.tile == t for j in joined for w in j.work)]
    absent = _absent(joined)
    curves = [
        _thinned([(w, math.log(p.latency_us)) for w, p in zip(j.work, j.curve.points, strict=True) if _is_used(j, p)])
        for j in joined
    ]

    def residuals(x: Sequence[float]) -> list[float]:
        c = _calibration_of(x, tiles, known, absent)
        results: list[float] = []
        for curve in curves:
            errors = [math.log(w.latency_us(c) + c.fixed_us) - t for w, t in curve]
            # T itself, and its ratio to T(N0), which is what a boundary is read from; every curve weighs the same.
            weight = 1 / math.sqrt(len(errors))
            results += [e * weight for e in errors] + [(e - errors[0]) * weight for e in errors]
        return results

    parameters = _parameters(tiles, 1.5 if known.observed else 0.0)
    bounds = [p.least for p in parameters], [p.most for p in parameters]
    starts = [[-0.2, overlap, 2.5, 0.3, 0.0, -1.0, *[-0.5] * (len(tiles) or 1)] for overlap in (0.7, 1.8)]
    results = [least_squares(residuals, x, bounds=bounds, loss="soft_l1", f_scale=0.05) for x in starts]
    best = min(results, key=lambda f: f.cost)
    if best.status <= 0:
        raise NoFit(f"the fit does not converge: {best.message}")
    for parameter, x in zip(parameters, best.x, strict=True):
        if parameter.name not in absent and not known.observed and parameter.is_stuck(x):
            between = f"between {parameter.least} and {parameter.most}"
            raise NoFit(f"the fit sits on a bound: {parameter.name} at {x:.2f}, {between}")
    return _calibration_of([float(v) for v in best.x], tiles, known, absent)


def _thinned(points: list[tuple[Work, float]]) -> list[tuple[Work, float]]:
    """At most FIT_POINTS of the points, evenly, the first one always.

    A GEMM's table has three times as many points, which add nothing.
    """
    return points[:: -(-len(points) // FIT_POINTS)]


def _is_used(j: Joined, p: Point) -> bool:
    return j.curve.base <= p.positions <= LAST_ROWS


def by_calibration(c: Calibration, residuals: Residuals | None = None) -> Callable[[Joined], list[float]]:
    """A predictor of latencies by the tile roofline, with its residuals where they are given."""

    def predict(j: Joined) -> list[float]:
        latencies = [w.latency_us(c) + c.fixed_us for w in j.work]
        if residuals is None:
            return latencies
        return [t * math.exp(r) for t, r in zip(latencies, residuals.log_ratio(j.places), strict=True)]

    return predict


def leftover(joined: Sequence[Joined], c: Calibration) -> tuple[list[Place], Residuals]:
    """What the calibrated tile roofline leaves over on these curves, and the places where."""
    places, log_ratios = [], []
    for j in joined:
        for p, w, place in zip(j.curve.points, j.work, j.places, strict=True):
            if _is_used(j, p) and (j.curve.module != "dense" or place.on_cpu or p.positions in GEMM_ROWS):
                places.append(place)
                log_ratios.append(math.log(p.latency_us / (w.latency_us(c) + c.fixed_us)))
    return places, krige(places, log_ratios, c.processors)


def fitted_predictor(joined: Sequence[Joined], peaks: Peaks | None = None) -> Callable[[Joined], list[float]]:
    """The predictor that is fitted to these curves: calibration and residuals. Raises NoFit."""
    c = fit(joined, peaks)
    return by_calibration(c, leftover(joined, c)[1])


def folds(joined: Sequence[Joined], count: int = FOLDS) -> list[tuple[list[Joined], list[Joined]]]:
    """(fitted on, held out) for each fold. All curves of a shape are on one side.

    The folds are the same for the same shapes. There are more than `count` folds if a fit needs so many shapes.
    """
    shapes = sorted({j.curve.shape for j in joined})
    random.Random(0).shuffle(shapes)  # noqa: S311  # an order, not a secret
    spare = len(shapes) - MIN_SHAPES
    count = max(count, -(-len(shapes) // spare)) if spare > 0 else count
    fold = {shape: i % count for i, shape in enumerate(shapes)}
    return [
        ([j for j in joined if fold[j.curve.shape] != i], [j for j in joined if fold[j.curve.shape] == i])
        for i in range(count)
    ]


def as_it_is(j: Joined) -> list[Joined]:
    """The curve alone, judged from its own N0."""
    return [j]


def cross_validate(
    joined: Sequence[Joined],
    make: Callable[[Sequence[Joined]], Callable[[Joined], Sequence[float]]] = fitted_predictor,
    views: Callable[[Joined], list[Joined]] = as_it_is,
) -> HeldOut:
    """Judge every shape by a predictor that `make` fits to curves of other shapes.

    views: gives a curve from every N0 that it is judged from. Raises NoFit.
    """
    total = NOTHING
    for fitted_on, held_out in folds(joined):
        total += judge([view for j in held_out for view in views(j)], make(fitted_on))
    return total


def calibrate(
    joined: Sequence[Joined],
    sha256: str,
    kind: Literal["recorded", "measured"] = "recorded",
    peaks: Peaks | None = None,
    views: Callable[[Joined], list[Joined]] = as_it_is,
) -> tuple[Fitted, str]:
    """The calibration of one device, framework, kernel and dtype, and the text of its residuals' file.

    The calibration has cross-validated figures. sha256: of what the curves were read from. peaks: of the device; None
    takes the catalog's. views: as for cross_validate. Raises NoFit.
    """
    c = _rounded(fit(joined, peaks))
    places, residuals = leftover(joined, c)
    held_out = cross_validate(joined, partial(fitted_predictor, peaks=peaks), views)
    first = joined[0].curve
    spread = held_out.covering_spread if kind == "measured" else held_out.spread
    fitted = Fitted(
        gpu=first.gpu,
        framework=first.framework,
        kernel=first.family,
        module=first.module,
        dtype=first.dtype,
        flops=c.flops,
        bandwidth=c.bandwidth,
        overlap=c.overlap,
        reread=c.reread,
        fixed_us=c.fixed_us,
        tile_shares=c.tile_shares,
        block_us=c.block_us,
        processors=c.processors,
        activation=c.activation,
        curves=len(joined),
        shapes=len({j.curve.shape for j in joined}),
        error=round(held_out.error, 4),
        within_one_step=round(held_out.within_one_step, 3),
        spread=spread,
        covered=round(held_out.covered(spread), 3),
        latency_spread=percentiles([1 + e for e in held_out.signed]),
        releases=tuple(sorted({j.curve.release for j in joined})),
        source=first.source.partition(":")[0],
        sha256=sha256,
        kind=kind,
    )
    return fitted, residuals_text(places, residuals)


def _rounded(c: Calibration) -> Calibration:
    """The calibration as its file holds it.

    The residuals are taken from these rounded numbers, because predictors read them back from the file.
    """
    return replace(
        c,
        flops=_round(c.flops),
        bandwidth=_round(c.bandwidth),
        overlap=round(c.overlap, 3),
        reread=round(c.reread, 3),
        fixed_us=round(c.fixed_us, 2),
        tile_shares=tuple((t, round(s, 3)) for t, s in c.tile_shares),
        block_us=round(c.block_us, 4),
        activation=None if c.activation is None else round(c.activation, 3),
    )


def _round(value: float) -> float:
    return float(f"{value:.4g}")
