"""N_max from a latency curve.

N_max(tolerance) is the largest N with T(N) <= (1 + tolerance) * T(N0) (arXiv 2605.30851, section 2.2).

T need not be monotone, so a curve has two readings: `n_max` is the largest N within the tolerance, `n_first_exit` the
last N before the first point outside. A measured point can be undecided, and a grid has gaps. So points carry an
interval of T(N)/T(N0), and the boundary is known as an interval, `n_max_interval`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_nfp.principle.checks import require_tolerance

TOLERANCE = 0.20
"""The paper's epsilon: T stays within 20% of T(N0)."""


@dataclass(frozen=True, slots=True)
class Point:
    """One N of a curve."""

    positions: int
    """N."""
    latency_us: float
    """T(N) in microseconds."""
    ratio_low: float | None = None
    """Lower end of the interval of T(N)/T(N0). None: the ratio is exact."""
    ratio_high: float | None = None
    """Upper end of the interval of T(N)/T(N0). None: the ratio is exact."""
    ratio: float | None = None
    """T(N)/T(N0). None: it is the quotient of the latencies."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """N_max as it is read from a curve."""

    n_max: int
    """Largest N within the tolerance, by the point estimates."""
    n_max_interval: tuple[int, int | None]
    """(low, high). low is the largest N that is within beyond doubt. high is the last N before the first point from
    which every later point is outside beyond doubt. high is None if the curve ends within: N_max is at least low."""
    n_first_exit: int
    """Last N before the first point outside. It equals n_max on a curve without a hole."""
    undecided: tuple[int, ...]
    """The N whose interval straddles the limit."""
    baseline_positions: int
    """The N0 that was used."""
    refused: tuple[int, ...] = ()
    """The N that the kernel does not run. They count as outside."""

    @property
    def has_hole(self) -> bool:
        """Whether the curve leaves the tolerance and comes back within it."""
        return self.n_first_exit < self.n_max


def bracketed(interval: tuple[int, int | None]) -> str:
    """The interval as `[256, 319]`, or as `[64, ..]` if the curve ends within the tolerance."""
    low, high = interval
    return f"[{low}, {'..' if high is None else high}]"


def find_boundary(
    points: Sequence[Point], tolerance: float = TOLERANCE, baseline_positions: int = 1, refused: Iterable[int] = ()
) -> Boundary:
    """Read N_max from a curve. Points may be in any order; those below N0 are ignored.

    refused: N that the kernel does not run. Each caps N_max as a latency outside would.

    Raises ValueError if there is no point at N0, two points at one N, or a latency that is not finite and positive.
    """
    require_tolerance(tolerance)
    curve = sorted((p for p in points if p.positions >= baseline_positions), key=lambda p: p.positions)
    if not curve or curve[0].positions != baseline_positions:
        raise ValueError(f"the curve has no point at N0 = {baseline_positions}, so no ratio can be taken")
    for point, following in zip(curve, [*curve[1:], None], strict=True):
        if not (math.isfinite(point.latency_us) and point.latency_us > 0):
            raise ValueError(f"T({point.positions}) must be finite and above 0 us, got {point.latency_us!r}")
        if following is not None and following.positions == point.positions:
            raise ValueError(f"two points at N = {point.positions}")
    base = curve[0].latency_us
    # Relative slack of a few ulps: a recorded 1.2 * T must count as within.
    limit = (1 + tolerance) * (1 + 1e-12)

    def ratios(p: Point) -> tuple[float, float, float]:
        ratio = p.latency_us / base if p.ratio is None else p.ratio
        low = ratio if p.ratio_low is None else p.ratio_low
        high = ratio if p.ratio_high is None else p.ratio_high
        return low, ratio, high

    n_max = n_first_exit = curve[0].positions
    surely_within, first_beyond = curve[0].positions, None
    has_left = False
    undecided = []
    refused_positions = sorted(n for n in set(refused) if n > baseline_positions)
    merged = sorted([*curve[1:], *(Point(n, math.inf) for n in refused_positions)], key=lambda p: p.positions)
    for p in merged:
        low, ratio, high = ratios(p)
        if ratio <= limit:
            n_max = p.positions
            if not has_left:
                n_first_exit = p.positions
        else:
            has_left = True
        if high <= limit:
            surely_within, first_beyond = p.positions, None
        elif low > limit:
            if first_beyond is None:
                first_beyond = p.positions
        else:
            undecided.append(p.positions)
            first_beyond = None
    upper = None if first_beyond is None else first_beyond - 1
    return Boundary(
        n_max, (surely_within, upper), n_first_exit, tuple(undecided), baseline_positions, tuple(refused_positions)
    )


def sensitivity(
    points: Sequence[Point],
    baseline_positions: int = 1,
    tolerances: Iterable[float] = (0.05, 0.10, 0.15, 0.20, 0.25, 0.30),
) -> dict[float, Boundary]:
    """The boundary at each tolerance of the paper's sensitivity sweep (appendix I: 0.05 to 0.30)."""
    return {t: find_boundary(points, t, baseline_positions) for t in tolerances}
