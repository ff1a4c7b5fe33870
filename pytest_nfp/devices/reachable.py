"""How much of a last-level cache this process can use: the host's number is that of a whole processor, which others share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

LINE = 64
STEPS = 20_000
"""Loads of one chase: each depends on the one before, so that nothing hides how long it takes."""
SMALLEST = 8 * 2**20
GROWTH = 1.5
BEYOND = 1.5
"""How far past the host's number the sweep goes, where memory allows: there all loads miss."""
CONTRAST = 1.3
"""Memory must be this much slower than the cache for the two to be told apart."""
MISSES = 0.8
"""Share of the way from the cache's latency to memory's at which a buffer counts as outside."""


def sizes(reported: int, memory: int) -> list[int]:
    """Bytes of the buffers to chase through, ascending; at most a quarter of the memory that is free."""
    end = min(int(BEYOND * reported), memory // 4)
    found, size = [], float(SMALLEST)
    while size < end:
        found.append(int(size))
        size *= GROWTH
    return [*found, end] if end > SMALLEST else found


def reachable(reported: int, latencies: Sequence[tuple[int, float]]) -> int:
    """Bytes from which on every buffer lies outside the cache; the host's number where the latencies do not tell.

    reported: bytes that the host gives. latencies: (bytes, nanoseconds of a dependent load), ascending.
    """
    if len(latencies) < 3 or latencies[-1][0] <= reported:
        return reported
    quickest, slowest = min(ns for _, ns in latencies), max(ns for _, ns in latencies[-2:])
    if slowest < CONTRAST * quickest:
        return reported
    limit = quickest + MISSES * (slowest - quickest)
    found = latencies[-1][0]
    for size, ns in reversed(latencies):
        if ns < limit:
            break
        found = size
    return found


def measure(
    reported: int, memory: int, load_ns: Callable[[int], float] | None = None
) -> tuple[int, list[tuple[int, float]]]:
    """Bytes of the cache that this process reaches, and what they were read from. load_ns: of a buffer of so many bytes."""
    load = load_ns or chase_ns
    latencies = [(size, load(size)) for size in sizes(reported, memory)]
    return reachable(reported, latencies), latencies


def chase_ns(size: int) -> float:
    """Nanoseconds of a dependent load from random lines of a buffer that was just read from end to end; the best of three."""
    import numpy as np

    buffer: Any = np.ones(size // 8, dtype=np.int64)
    count = size // LINE
    lines = np.unique(np.random.default_rng(0).integers(0, count, STEPS))
    np.random.default_rng(1).shuffle(lines)
    lines *= LINE // 8
    buffer[lines] = np.roll(lines, -1)
    view, best = memoryview(buffer), float("inf")
    for _ in range(3):
        buffer.sum()  # What fits stays; what was chased before is as old as all the rest.
        at, steps = int(lines[0]), len(lines)
        start = time.perf_counter_ns()
        for _ in range(steps):
            at = view[at]
        best = min(best, (time.perf_counter_ns() - start) / steps)
    return best
