"""How well predictions do on curves that their calibration has not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from pytest_nfp.calibration.kernel_work import LAST_ROWS, Joined
from pytest_nfp.principle import Point, find_boundary
from pytest_nfp.principle.boundary import TOLERANCE

NEAR = 2.0
"""The spread of T(N)/T(N0) is that of points up to this ratio: no boundary is read farther out."""
OUTSIDE = 0.025
"""Share of the held-out points that a spread leaves out at each end, so that it holds 95%."""
FEWEST_COVERED = 0.95
"""Share of the held-out curves whose N_max must lie in the interval of a machine's own calibration."""
WIDENED = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
"""Powers to which a spread is raised, in this order, until it covers so many curves."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How well predictions do on curves that their calibration has not seen."""

    signed: tuple[float, ...] = ()
    """T predicted / T - 1 at every used point."""
    steps: tuple[int, ...] = ()
    """For each curve, the distance between predicted and recorded N_max in grid steps."""
    exit_steps: tuple[int, ...] = ()
    """The same for n_first_exit."""
    ratios: tuple[float, ...] = ()
    """Predicted over recorded T(N)/T(N0), as far as the predicted one is at most NEAR."""
    curves: tuple[tuple[tuple[Point, ...], tuple[Point, ...]], ...] = ()
    """For each curve, its recorded and its predicted points."""

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
        """Median of the absolute relative error."""
        return median(abs(e) for e in self.signed)

    @property
    def within_one_step(self) -> float:
        """Share of the curves whose N_max is predicted within one grid step."""
        return sum(s <= 1 for s in self.steps) / len(self.steps)

    @property
    def spread(self) -> tuple[float, float]:
        """The middle 95% of the ratios."""
        return percentiles(self.ratios)

    @property
    def covering_spread(self) -> tuple[float, float]:
        """The spread, widened until the interval that it gives holds the measured N_max of 95% of the curves.

        The result is the widest spread of WIDENED if none reaches that.
        """
        low, high = self.spread
        # An end on the wrong side of 1 would make the interval narrower when raised.
        low, high = min(low, 1.0), max(high, 1.0)
        widened = [(low**power, high**power) for power in WIDENED]
        covering = next((s for s in widened if self.covered(s) >= FEWEST_COVERED), widened[-1])
        return round(covering[0], 3), round(covering[1], 3)

    def covered(self, spread: tuple[float, float]) -> float:
        """Share of the curves whose recorded N_max lies in the interval that this spread gives the predicted one."""
        return mean(_is_covered(real, model, spread) for real, model in self.curves)


NOTHING = HeldOut()


def with_spread(points: Sequence[Point], base: int, spread: tuple[float, float]) -> list[Point]:
    """Predicted points with the interval of their ratio to T(N0).

    spread: the factors by which a predicted ratio may be too small and too large.
    """
    low, high = spread
    base_us = next(p.latency_us for p in points if p.positions == base)
    return [
        p
        if p.positions == base
        else replace(p, ratio_low=p.latency_us / base_us / high, ratio_high=p.latency_us / base_us / low)
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
        recorded_boundary, predicted_boundary = (find_boundary(points, TOLERANCE, c.base) for points in (real, model))
        total += HeldOut(
            tuple(m.latency_us / r.latency_us - 1 for r, m in pairs),
            (abs(grid.index(recorded_boundary.n_max) - grid.index(predicted_boundary.n_max)),),
            (abs(grid.index(recorded_boundary.n_first_exit) - grid.index(predicted_boundary.n_first_exit)),),
            tuple(
                (m.latency_us / model[0].latency_us) / (r.latency_us / real[0].latency_us)
                for r, m in pairs[1:]
                if m.latency_us <= NEAR * model[0].latency_us
            ),
            ((real, model),),
        )
    return total


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The 2.5th and the 97.5th percentile, rounded to three decimals. (1, 1) for no values."""
    ordered = sorted(values) or [1.0]
    left_out = int(len(ordered) * OUTSIDE)
    return round(ordered[left_out], 3), round(ordered[-left_out - 1], 3)
