"""What a curve looks like: plateaus, whose right ends are the sweet spots, and cliffs between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pytest_nfp.principle.boundary import Point

FLAT = 0.05
"""A plateau's latencies lie within this share of its first one."""
CLIFF = 0.20
"""Growth per further position that makes a step a cliff."""


@dataclass(frozen=True, slots=True)
class Plateau:
    """Measured N from `first` to `last` that cost the same; `last` is the sweet spot: the most positions at this latency."""

    first: int
    last: int
    latency_us: float


def plateaus(points: Sequence[Point]) -> list[Plateau]:
    """The plateaus of at least two measured N, in order.

    A level ends before the first N that lies more than FLAT above or below where it began.
    """
    found: list[Plateau] = []
    level: list[Point] = []
    for p in [*sorted(points, key=lambda p: p.positions), None]:
        if p is not None and level and abs(p.latency_us / level[0].latency_us - 1) <= FLAT:
            level.append(p)
            continue
        if len(level) > 1:
            latencies = sorted(x.latency_us for x in level)
            found.append(Plateau(level[0].positions, level[-1].positions, latencies[len(latencies) // 2]))
        level = [] if p is None else [p]
    return found


def cliffs(points: Sequence[Point]) -> list[tuple[int, int, float]]:
    """(N, next measured N, growth) wherever T grows by more than CLIFF for each further position."""
    ordered = sorted(points, key=lambda p: p.positions)
    steps = [(a.positions, b.positions, b.latency_us / a.latency_us) for a, b in pairwise(ordered)]
    return [(a, b, growth) for a, b, growth in steps if growth ** (1 / (b - a)) > 1 + CLIFF]
