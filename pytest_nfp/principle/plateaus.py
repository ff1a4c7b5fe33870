"""The form of a curve: plateaus, whose right ends are the sweet spots, and cliffs between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pytest_nfp.principle.boundary import Point

FLAT = 0.05
"""The latencies of a plateau lie within this share of its first latency."""
CLIFF = 0.20
"""Growth per further position above which a step is a cliff."""


@dataclass(frozen=True, slots=True)
class Plateau:
    """Measured N with about the same latency."""

    first: int
    """First N."""
    last: int
    """Last N. It is the sweet spot: the most positions at this latency."""
    latency_us: float
    """Median latency of the plateau in microseconds."""


def plateaus(points: Sequence[Point]) -> list[Plateau]:
    """The plateaus of at least two measured N each, in order.

    A plateau ends before the first N whose latency differs by more than FLAT from that of its first N.
    """
    complete: list[Plateau] = []
    level: list[Point] = []
    for p in [*sorted(points, key=lambda p: p.positions), None]:
        if p is not None and level and abs(p.latency_us / level[0].latency_us - 1) <= FLAT:
            level.append(p)
            continue
        if len(level) > 1:
            latencies = sorted(x.latency_us for x in level)
            complete.append(Plateau(level[0].positions, level[-1].positions, latencies[len(latencies) // 2]))
        level = [] if p is None else [p]
    return complete


def cliffs(points: Sequence[Point]) -> list[tuple[int, int, float]]:
    """(N, next measured N, growth) wherever T grows by more than CLIFF for each further position."""
    ordered = sorted(points, key=lambda p: p.positions)
    steps = [(a.positions, b.positions, b.latency_us / a.latency_us) for a, b in pairwise(ordered)]
    return [(a, b, growth) for a, b, growth in steps if growth ** (1 / (b - a)) > 1 + CLIFF]
