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
    """T(N) as measured here, or as recorded elsewhere."""

    points: tuple[Point, ...]
    """Latency in microseconds and the interval of T(N)/T(N0), in the order of N."""
    baseline_positions: int
    """N0."""
    kind: str
    """"measured" or "recorded"."""
    source: str
    """The device, or the recording."""
    kernel: str
    """The operator's name; empty where it is not known."""
    invalid: tuple[str, ...] = ()
    """Why the measurement is not to be trusted; empty where nothing speaks against it."""
    unsupported: dict[int, str] = field(default_factory=dict)
    """N -> why the kernel refused it."""
    partial: bool = False
    """Whether the measurement was interrupted."""
    counts: dict[str, Any] = field(default_factory=dict)
    """How much was measured: forwards, rounds, seconds."""
    trust: dict[str, Any] = field(default_factory=dict)
    """The signs that `invalid` was decided by."""
    timer: str = ""
    """The clock that latencies were read from."""
    kernels: dict[int, str] = field(default_factory=dict)
    """N -> the kernels that ran, where that is known."""
    modes: dict[int, str] = field(default_factory=dict)
    """N -> the graph mode, where that is known: graph or eager."""
    padded: dict[int, int] = field(default_factory=dict)
    """N -> the token rows that its graph was made for."""
    settings: dict[int, str] = field(default_factory=dict)
    """N -> the tile configuration that the framework's own selector gave."""
    active_experts: dict[int, int] = field(default_factory=dict)
    """N -> the experts that one forward read."""
    proof: dict[int, tuple[int, int]] = field(default_factory=dict)
    """N -> the token rows that a forward of a whole model was seen to process, and over how many cached tokens."""
    steps: dict[int, float] = field(default_factory=dict)
    """N -> microseconds of the engine's whole step: T, and the median of what it took beside the forward."""
    samples: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """N -> single latencies in microseconds, kept on request."""
    log: tuple[str, ...] = ()
    """The last lines of an engine that died."""
    died: bool = False
    """Whether the engine died while it was measured."""

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
