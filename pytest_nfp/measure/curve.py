"""A measured curve: samples per N, and what they say with how much confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pytest_nfp.principle import Point

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Curve:
    """T(N) as measured, or as recorded elsewhere.

    points: latency and the interval of T(N)/T(N0). kind: measured or recorded. invalid: why the measurement is not to
    be trusted, empty if nothing speaks against it. unsupported: N -> why the kernel refused it. partial: interrupted.
    """

    points: tuple[Point, ...]
    baseline_positions: int
    kind: str
    source: str
    kernel: str
    invalid: tuple[str, ...] = ()
    unsupported: dict[int, str] = field(default_factory=dict)
    partial: bool = False
    counts: dict[str, Any] = field(default_factory=dict)
    trust: dict[str, Any] = field(default_factory=dict)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """A distribution-free confidence interval of the median: two order statistics, by the binomial law.

    With five values or fewer no pair reaches 95%: the interval is then (0, inf), which decides nothing.
    """
    ordered = sorted(values)
    n = len(ordered)
    tail, rank = 0.5**n, 0
    # rank order statistics may be left out at each end as long as the two tails stay below 1 - confidence.
    while 2 * tail <= 1 - confidence:
        rank += 1
        tail += math.comb(n, rank) * 0.5**n
    if rank == 0:
        return 0.0, math.inf
    return ordered[rank - 1], ordered[n - rank]


def make_point(positions: int, latencies_us: Sequence[float], ratios: Sequence[float]) -> Point:
    """The median latency, with the interval of the median ratio to T(N0) of the same round."""
    low, high = median_interval(ratios)
    return Point(positions, median(latencies_us), low, high)
