"""Fit the tile roofline to recorded or measured curves, and say how well it does on shapes that it has not seen.

One calibration a device, framework, kernel and dtype: effective bandwidth and compute, share of the compute by tile height, overlap,
re-read share, a thread block's own time, the activations' factor, a fixed cost. Least squares on the logarithms of T and of
T(N)/T(N0) with a robust loss, every curve with the same weight, from two starts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pytest_nfp import catalog
from pytest_nfp.granularity import ExpertShape, Granularity, Query, RuleUnknown, device_facts, read_many
from pytest_nfp.principle import Calibration, Point, attention_work, dense_work, find_boundary, moe_work
from pytest_nfp.principle.tile_roofline import Work
from pytest_nfp.recordings.library import WEIGHT_BYTES, RecordedCurve
from pytest_nfp.recordings.residuals import GEMM_ROWS, Place, Residuals, krige, setting_at
from pytest_nfp.recordings.residuals import text_of as residuals_text

TILES = (16, 32, 64, 128)
LAST_ROWS = 4096
TOLERANCE = 0.20
FIT_POINTS = 24
FOLDS = 4
MIN_SHAPES = 8
NEAR = 2.0
"""The spread of T(N)/T(N0) is that of points up to this ratio: farther out no boundary is read."""
OUTSIDE = 0.025
"""Share of the held-out points that a spread leaves out at each end: it holds 95%."""
FEWEST_COVERED = 0.95
"""Share of the held-out curves whose N_max the interval of a machine's own calibration holds."""
WIDENED = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
"""Powers by which a spread is raised until it holds them."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A recorded curve with the map of its release's own rule, and the work of the kernel at every row count.

    granularity None: a kernel whose library publishes no rule.
    """

    curve: RecordedCurve
    granularity: Granularity | None
    work: tuple[Work, ...]
    places: tuple[Place, ...]


class Fitted(BaseModel):
    """A calibration as catalog/calibrations.yaml and a machine's own file hold it.

    kind: of what it was fitted to. error: median |T predicted / T - 1| on held-out shapes; within_one_step: share of
    held-out curves whose N_max lies within one grid step; spread and latency_spread: the middle 95% of the
    predicted over the recorded T(N)/T(N0) where that is at most 2, and over the recorded T; covered: share whose recorded
    N_max lies in the interval from the spread. The few curves of a machine's own calibration are not alike in their points: its
    spread is widened until 95% of them are covered.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    gpu: str
    framework: str
    kernel: str
    module: Literal["dense", "moe", "attention"]
    dtype: str
    flops: Annotated[float, Field(gt=0)]
    bandwidth: Annotated[float, Field(gt=0)]
    overlap: Annotated[float, Field(ge=1)]
    reread: Annotated[float, Field(ge=0, le=1)]
    fixed_us: Annotated[float, Field(ge=0)]
    tile_shares: tuple[tuple[int, float], ...]
    block_us: Annotated[float, Field(ge=0)]
    processors: Annotated[int, Field(gt=0)]
    activation: Annotated[float, Field(ge=0)] | None
    curves: int
    shapes: int
    error: float
    within_one_step: float
    covered: float
    spread: tuple[float, float]
    latency_spread: tuple[float, float]
    releases: tuple[str, ...]
    source: str
    sha256: str
    kind: Literal["recorded", "measured"] = "recorded"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """GPU, framework, kernel, dtype: one calibration each."""
        return self.gpu, self.framework, self.kernel, self.dtype

    def residuals_path(self, calibrations: Path) -> Path:
        """Where the residuals lie, beside the file of the calibrations."""
        return calibrations.parent / "residuals" / f"{'-'.join(self.key)}.json"

    def calibration(self) -> Calibration:
        """What the tile roofline runs on."""
        return Calibration(
            self.flops,
            self.bandwidth,
            self.overlap,
            self.reread,
            self.fixed_us,
            self.tile_shares,
            self.block_us,
            self.processors,
            self.activation,
        )


class NoFit(Exception):
    """No calibration can be given; the message says why."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a fit starts from: peak FLOP/s and bytes/s of the device, and its multiprocessors.

    observed: no vendor's figures, but the highest rates that any of the curves shows: the fit may exceed them, since
    memory and compute may take turns, and nothing is known that a bound could stand for.
    """

    flops: float
    bandwidth: float
    processors: int
    observed: bool = False


def peaks_of(gpu: str, dtype: str, processors: int | None = None) -> Peaks:
    """The catalog's figures of a GPU. processors: of the GPU that is here; None takes the catalog's. Raises NoFit."""
    known = catalog.gpu(gpu)
    if (count := processors or known.multiprocessors) is None:
        raise NoFit(f"the catalog does not know how many multiprocessors {known.name} has")
    return Peaks(known.peak_flops_of(dtype), known.bandwidth, count)


def observed_peaks(joined: Sequence[Joined]) -> Peaks:
    """The highest rates that these curves show, of a device without a vendor's figures."""
    points = [(w, p.latency_us / 1e6) for j in joined for w, p in zip(j.work, j.curve.points, strict=True)]
    return Peaks(max(w.flops / t for w, t in points), max(w.bytes_once / t for w, t in points), 1, observed=True)


def join(curves: Sequence[RecordedCurve]) -> tuple[list[Joined], dict[str, int]]:
    """Curves with their maps where the tile rule describes their kernel; and how many were left out for which reason."""
    left_out: dict[str, int] = {}
    triton = [c for c in curves if c.family == "triton"]
    queries = [
        Query(
            c.framework,
            c.release,
            device_facts(catalog.gpu(c.gpu)),
            ExpertShape(c.experts, c.width, c.hidden, c.top_k),
            c.dtype,
        )
        for c in triton
    ]
    maps = dict(zip(triton, read_many(queries), strict=True))
    joined = []
    for curve in curves:
        found = maps.get(curve)
        if isinstance(found, RuleUnknown):
            reason = f"the rule is unknown: {found}"
            left_out[reason] = left_out.get(reason, 0) + 1
        else:
            joined.append(join_one(curve, found))
    return joined, left_out


def join_one(curve: RecordedCurve, granularity: Granularity | None) -> Joined:
    """The curve with its kernel's work and place at each of its points."""
    rows, on_cpu = [p.positions for p in curve.points], curve.gpu == "cpu"
    if curve.module == "dense":
        shape: tuple[int, ...] = (curve.width, curve.hidden)
        places = [Place(shape, m, on_cpu=on_cpu) for m in rows]
    elif curve.module == "attention":
        places = [Place((curve.experts, curve.width, curve.context), m, on_cpu=on_cpu) for m in rows]
    elif on_cpu:
        # Skewed tokens all take the same k experts: that is balanced routing over k of them.
        active = curve.top_k if curve.routing == "skewed" else curve.experts
        places = [Place((active, curve.top_k, curve.hidden, curve.width), m, on_cpu=True) for m in rows]
    else:
        shape = (curve.experts, curve.top_k, curve.hidden, curve.width)
        places = [Place(shape, m, setting_at(granularity, m)) for m in rows]
    return Joined(curve, granularity, work_of(curve, granularity), tuple(places))


def work_of(curve: RecordedCurve, granularity: Granularity | None) -> tuple[Work, ...]:
    """What the kernel does at each of the curve's points: for tokens under its routing, or rows of a GEMM."""
    s, points = WEIGHT_BYTES[curve.dtype], [p.positions for p in curve.points]
    if curve.module == "dense":
        return tuple(dense_work(rows, 1, [(curve.width, curve.hidden)], s, None) for rows in points)
    tile = granularity.tile if granularity is not None else None
    if curve.module == "attention":
        # torch's CPU kernel ends its last query block with the rows that there are.
        heads, cached, padded = curve.experts, curve.context, curve.gpu != "cpu"
        return tuple(attention_work(n, 1, cached, heads, heads, curve.width, s, tile, False, padded) for n in points)
    columns = granularity.parameter_rule("BLOCK_SIZE_N") if granularity is not None else None
    dimensions = (curve.experts, curve.top_k, curve.hidden, curve.width)
    return tuple(moe_work(rows, 1, curve.routing, *dimensions, s, tile, 3, columns) for rows in points)


def fit(joined: Sequence[Joined], peaks: Peaks | None = None) -> Calibration:
    """The calibration of these curves' kernel. peaks: of the device; None takes the catalog's.

    Raises NoFit where too few shapes are there or the fit does not converge.
    """
    from scipy.optimize import least_squares

    if len({j.curve.shape for j in joined}) < MIN_SHAPES:
        raise NoFit(f"{len({j.curve.shape for j in joined})} shapes are too few: a fit needs {MIN_SHAPES}")
    peaks = peaks or peaks_of(joined[0].curve.gpu, joined[0].curve.dtype)
    tiles = [t for t in TILES if any(w.tile == t for j in joined for w in j.work)]
    curves = [
        _thinned([(w, math.log(p.latency_us)) for w, p in zip(j.work, j.curve.points, strict=True) if _is_used(j, p)])
        for j in joined
    ]

    # What no curve has (a GEMM's table has neither blocks nor second tiles) can't be fitted: its default stands.
    every = [w for j in joined for w in j.work]
    present = {
        "re-read share": any(w.bytes_again for w in every),
        "activations": any(w.activations for w in every),
        "block": any(w.blocks for w in every),
    }

    def calibration(x: Sequence[float]) -> Calibration:
        bandwidth, overlap, fixed, reread, activation, block, *shares = x
        return Calibration(
            peaks.flops * (1.0 if tiles else math.exp(shares[0])),
            peaks.bandwidth * math.exp(bandwidth),
            math.exp(overlap),
            reread if present["re-read share"] else 1.0,
            math.exp(fixed),
            tuple((t, math.exp(s)) for t, s in zip(tiles, shares, strict=True)) if tiles else (),
            math.exp(block) if present["block"] else 0.0,
            peaks.processors,
            math.exp(activation) if present["activations"] else None,
        )

    def residuals(x: Sequence[float]) -> list[float]:
        c = calibration(x)
        found: list[float] = []
        for curve in curves:
            errors = [math.log(w.latency_us(c) + c.fixed_us) - t for w, t in curve]
            # T itself, and its ratio to T(N0), which is what a boundary is read from; every curve weighs the same.
            weight = 1 / math.sqrt(len(errors))
            found += [e * weight for e in errors] + [(e - errors[0]) * weight for e in errors]
        return found

    # Bounds, and whether reaching one means that the effect is absent (or whole) and not that the fit escapes.
    heights = len(tiles) or 1
    above = 1.5 if peaks.observed else 0.0
    bounds = [
        # bandwidth: at most the peak, and the little that stays in the cache between forwards
        (-2.0, 0.05 + above, False, True),
        (0.0, 3.0, True, True),  # overlap: 1 is none, 20 is full
        (-3.0, 6.0, True, False),  # fixed cost: 0.05 to 400 us
        (0.0, 1.0, True, True),  # share of a second tile's read that misses the cache
        (-3.0, 3.0, True, False),  # activations
        (-7.0, 3.0, True, False),  # a block's own time: a nanosecond is none
        *[(-4.0, above, False, True)] * heights,  # share of the peak: all of it where compute never limits
    ]
    low, high = [b[0] for b in bounds], [b[1] for b in bounds]
    starts = [[-0.2, overlap, 2.5, 0.3, 0.0, -1.0, *[-0.5] * heights] for overlap in (0.7, 1.8)]
    found = [least_squares(residuals, x, bounds=(low, high), loss="soft_l1", f_scale=0.05) for x in starts]
    best = min(found, key=lambda f: f.cost)
    if best.status <= 0:
        raise NoFit(f"the fit does not converge: {best.message}")
    names = (
        "bandwidth",
        "overlap",
        "fixed cost",
        "re-read share",
        "activations",
        "block",
        *(f"tile {t}" for t in tiles or (0,)),
    )
    for name, x, (least, most, at_least, at_most) in zip(names, best.x, bounds, strict=True):
        edge = 1e-3 * (most - least)
        if not present.get(name, True) or peaks.observed:
            continue
        if (x < least + edge and not at_least) or (x > most - edge and not at_most):
            raise NoFit(f"the fit sits on a bound: {name} at {x:.2f}, between {least} and {most}")
    return calibration([float(v) for v in best.x])


def _thinned(points: list[tuple[Work, float]]) -> list[tuple[Work, float]]:
    """At most FIT_POINTS of them, evenly, the first always: a GEMM's table has three times as many, and no more to say."""
    return points[:: -(-len(points) // FIT_POINTS)]


def _is_used(j: Joined, p: Point) -> bool:
    return j.curve.base <= p.positions <= LAST_ROWS


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How predictions do on curves that their calibration has not seen.

    signed: T predicted / T - 1 at every used point. steps: distance of N_max and of n_first_exit in grid steps, a curve.
    ratios: predicted over recorded T(N)/T(N0), as far as the predicted one is at most NEAR. curves: recorded and predicted.
    """

    signed: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    exit_steps: tuple[int, ...] = ()
    ratios: tuple[float, ...] = ()
    curves: tuple[tuple[tuple[Point, ...], tuple[Point, ...]], ...] = ()

    def __add__(self, other: HeldOut) -> HeldOut:
        return HeldOut(
            self.signed + other.signed,
            self.steps + other.steps,
            self.exit_steps + other.exit_steps,
            self.ratios + other.ratios,
            self.curves + other.curves,
        )

    @property
    def error(self) -> float:
        """Median of the relative error, whatever its sign."""
        return median(abs(e) for e in self.signed)

    @property
    def within_one_step(self) -> float:
        """Share of curves."""
        return sum(s <= 1 for s in self.steps) / len(self.steps)

    @property
    def spread(self) -> tuple[float, float]:
        """The middle 95% of the ratios."""
        return percentiles(self.ratios)

    @property
    def covering_spread(self) -> tuple[float, float]:
        """The spread, widened until the interval that it gives holds the measured N_max of 95% of the curves."""
        few, many = self.spread
        # An end on the wrong side of 1 would narrow as it is raised.
        few, many = min(few, 1.0), max(many, 1.0)
        widened = [(few**power, many**power) for power in WIDENED]
        found = next((s for s in widened if self.covered(s) >= FEWEST_COVERED), widened[-1])
        return round(found[0], 3), round(found[1], 3)

    def covered(self, spread: tuple[float, float]) -> float:
        """Share of curves whose recorded N_max lies in the interval that this spread gives the predicted one."""
        return mean(_is_covered(real, model, spread) for real, model in self.curves)


NOTHING = HeldOut()


def with_spread(points: Sequence[Point], base: int, spread: tuple[float, float]) -> list[Point]:
    """Predicted points with the interval of their ratio to T(N0): the prediction was so much too small or too large."""
    few, many = spread
    first = next(p.latency_us for p in points if p.positions == base)
    return [
        p
        if p.positions == base
        else replace(p, ratio_low=p.latency_us / first / many, ratio_high=p.latency_us / first / few)
        for p in points
    ]


def _is_covered(real: Sequence[Point], model: Sequence[Point], spread: tuple[float, float]) -> bool:
    base = real[0].positions
    low, high = find_boundary(with_spread(model, base, spread), TOLERANCE, base).n_max_interval
    n = find_boundary(real, TOLERANCE, base).n_max
    return low <= n and (high is None or n <= high)


def judge(joined: Iterable[Joined], predict: Callable[[Joined], Sequence[float]]) -> HeldOut:
    """Hold predicted latencies (one for each point of a curve) to the recorded ones."""
    total = NOTHING
    for j in joined:
        c = j.curve
        pairs = [
            (p, Point(p.positions, t))
            for p, t in zip(c.points, predict(j), strict=True)
            if c.base <= p.positions <= LAST_ROWS
        ]
        real, model = (tuple(pair[i] for pair in pairs) for i in (0, 1))
        grid = [p.positions for p in real]
        a, b = (find_boundary(points, TOLERANCE, c.base) for points in (real, model))
        total += HeldOut(
            tuple(m.latency_us / r.latency_us - 1 for r, m in pairs),
            (abs(grid.index(a.n_max) - grid.index(b.n_max)),),
            (abs(grid.index(a.n_first_exit) - grid.index(b.n_first_exit)),),
            tuple(
                (m.latency_us / model[0].latency_us) / (r.latency_us / real[0].latency_us)
                for r, m in pairs[1:]
                if m.latency_us <= NEAR * model[0].latency_us
            ),
            ((real, model),),
        )
    return total


def by_calibration(c: Calibration, residuals: Residuals | None = None) -> Callable[[Joined], list[float]]:
    """The tile roofline's latencies, with what it leaves over where that is given."""

    def predict(j: Joined) -> list[float]:
        found = [w.latency_us(c) + c.fixed_us for w in j.work]
        if residuals is None:
            return found
        return [t * math.exp(r) for t, r in zip(found, residuals.log_ratio(j.places), strict=True)]

    return predict


def leftover(joined: Sequence[Joined], c: Calibration) -> tuple[list[Place], Residuals]:
    """What the calibrated tile roofline leaves over on these curves, and at which places."""
    places, log_ratios = [], []
    for j in joined:
        for p, w, place in zip(j.curve.points, j.work, j.places, strict=True):
            if _is_used(j, p) and (j.curve.module != "dense" or place.on_cpu or p.positions in GEMM_ROWS):
                places.append(place)
                log_ratios.append(math.log(p.latency_us / (w.latency_us(c) + c.fixed_us)))
    return places, krige(places, log_ratios, c.processors)


def fitted_predictor(joined: Sequence[Joined], peaks: Peaks | None = None) -> Callable[[Joined], list[float]]:
    """What these curves say of others: calibration and residuals. Raises NoFit."""
    c = fit(joined, peaks)
    return by_calibration(c, leftover(joined, c)[1])


def folds(joined: Sequence[Joined], count: int = FOLDS) -> list[tuple[list[Joined], list[Joined]]]:
    """(fitted on, held out): all curves of a shape on one side; the same for the same shapes. More than `count` where a fit needs them."""
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
    """A curve that is judged from its own N0 alone."""
    return [j]


def cross_validate(
    joined: Sequence[Joined],
    make: Callable[[Sequence[Joined]], Callable[[Joined], Sequence[float]]] = fitted_predictor,
    views: Callable[[Joined], list[Joined]] = as_it_is,
) -> HeldOut:
    """Every shape judged by what `make` says from curves of other shapes. views: a curve from every N0 that it is judged from.

    Raises NoFit.
    """
    total = NOTHING
    for seen, unseen in folds(joined):
        total += judge([view for j in unseen for view in views(j)], make(seen))
    return total


def calibrate(
    joined: Sequence[Joined],
    sha256: str,
    kind: Literal["recorded", "measured"] = "recorded",
    peaks: Peaks | None = None,
    views: Callable[[Joined], list[Joined]] = as_it_is,
) -> tuple[Fitted, str]:
    """The calibration of one device, framework, kernel and dtype, with its cross-validated figures; and its residuals' file.

    sha256: of what the curves were read from. peaks: of the device; None takes the catalog's. views: as cross_validate has
    them. Raises NoFit.
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
    """As the file holds it: the residuals are those of the numbers that are read back."""
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


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The 2.5th and the 97.5th, to three digits; (1, 1) of nothing."""
    ordered = sorted(values) or [1.0]
    left_out = int(len(ordered) * OUTSIDE)
    return round(ordered[left_out], 3), round(ordered[-left_out - 1], 3)


def _round(value: float) -> float:
    return float(f"{value:.4g}")


class CalibrationsFile(BaseModel):
    """catalog/calibrations.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_: Literal[1] = Field(alias="schema")
    calibrations: tuple[Fitted, ...]


def text_of(fitted: Sequence[Fitted]) -> str:
    """The file's text: a stable order, the same bytes for the same recordings."""
    import yaml

    # What is recorded is not said: no field but `kind` has a default.
    rows = [f.model_dump(mode="json", exclude_defaults=True) for f in sorted(fitted, key=lambda f: f.key)]
    body: str = yaml.safe_dump({"schema": 1, "calibrations": rows}, sort_keys=False, default_flow_style=None, width=140)
    return "# Written by `nfp calibrate`: the tile roofline fitted to recorded or measured curves.\n" + body
