"""A curve: T(N) as measured here or recorded elsewhere, with how it came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from pytest_nfp.curves.statistics import CONFIDENCE, median_interval
from pytest_nfp.principle import Boundary, Point, find_boundary


@dataclass(frozen=True, slots=True)
class Curve:
    """T(N) as measured, or as recorded elsewhere.

    points: latency and the interval of T(N)/T(N0). kind: measured or recorded. timer: the clock that it was read from.
    invalid: why the measurement is not to be trusted, empty if nothing speaks against it. unsupported: N -> why the
    kernel refused it. kernels and modes: what ran at each N and in which graph mode, where that is known; padded: the token rows
    that its graph was made for. settings: the
    tile configuration that the framework's own selector gave at each N. active_experts: that one forward read. proof: of a
    full model, the token rows that a forward was seen to process, and over how many cached tokens. steps: microseconds of
    the engine's whole step, T and the median of what it took beside the forward. samples: single latencies for each N, kept on
    request. partial: interrupted. died: the engine did, while it was measured; log: its last lines.
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
    timer: str = ""
    kernels: dict[int, str] = field(default_factory=dict)
    modes: dict[int, str] = field(default_factory=dict)
    padded: dict[int, int] = field(default_factory=dict)
    settings: dict[int, str] = field(default_factory=dict)
    active_experts: dict[int, int] = field(default_factory=dict)
    proof: dict[int, tuple[int, int]] = field(default_factory=dict)
    steps: dict[int, float] = field(default_factory=dict)
    samples: dict[int, tuple[float, ...]] = field(default_factory=dict)
    log: tuple[str, ...] = ()
    died: bool = False

    @property
    def baseline_us(self) -> float:
        """T(N0). Raises StopIteration where it is missing."""
        return next(p.latency_us for p in self.points if p.positions == self.baseline_positions)

    def boundary_is_open(self, tolerance: float, grid: Sequence[int]) -> bool:
        """Whether noise leaves N_max open over more than one step of a grid."""
        boundary = self.boundary(tolerance)
        if boundary is None or not boundary.undecided:
            return boundary is None
        low, high = boundary.n_max_interval
        return high is None or sum(low < n <= high for n in grid) > 1

    def boundary(self, tolerance: float) -> Boundary | None:
        """N_max of this curve; None where T(N0) is missing."""
        if not any(p.positions == self.baseline_positions for p in self.points):
            return None
        return find_boundary(self.points, tolerance, self.baseline_positions, self.unsupported)


def make_point(
    positions: int, latencies_us: Sequence[float], ratios: Sequence[float], confidence: float = CONFIDENCE
) -> Point:
    """The median latency, with the median of its ratios to the T(N0) beside it and their interval."""
    low, high = median_interval(ratios, confidence)
    return Point(positions, median(latencies_us), low, high, median(ratios))
