"""The tile roofline: a predicted curve T(N) from the tile that the rule picks at every token count.

    T(N) = sum over modules of (T_mem**p + T_comp**p + T_block**p)**(1/p) + T_act + fixed
    T_comp  = tiles * tile rows * FLOPs per row / (effective FLOP/s * share of this tile height)
    T_mem   = (weights or KV) * (1 + r * (tiles per owner - 1)) / effective bytes/s
    T_block = thread blocks / multiprocessors * microseconds of a block's own (start, prologue, epilogue)
    T_act   = activations * a / effective bytes/s   (the small kernels around the GEMMs; without an `a` they count as T_mem)

p is the overlap exponent. Infinity: memory and compute time overlap fully; 1: they add up. r is the share of a tile's
re-read of its weights (or KV) that misses the last-level cache. Devices without a calibration use datasheet peaks, p =
infinity, r = 1 and no fixed cost. N_max is read from the predicted curve by the same definition as from a measured one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_nfp.principle.boundary import TOLERANCE, Boundary, Point, find_boundary
from pytest_nfp.principle.checks import require_positive
from pytest_nfp.principle.idle_compute import ACTIVATION_TERMS
from pytest_nfp.principle.routing import Routing, rows_per_expert

TileRule = Callable[[int], int] | None
"""Tile rows at a row count. None for a kernel without a tile: nothing is padded, weights are read once."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a device and kernel reach."""

    flops: float
    """FLOP/s."""
    bandwidth: float
    """Bytes/s."""
    overlap: float = math.inf
    """Overlap exponent p, at least 1. Infinity: full overlap."""
    reread: float = 1.0
    """Re-read share r in [0, 1]."""
    fixed_us: float = 0.0
    """Fixed cost in microseconds."""
    tile_shares: tuple[tuple[int, float], ...] = ()
    """(tile rows, share of `flops` that tiles of at most so many rows reach), ascending. Higher tiles reach the last
    share."""
    block_us: float = 0.0
    """A thread block's own time in microseconds, spread over `processors`."""
    processors: int = 1
    """Multiprocessors."""
    activation: float | None = None
    """Factor a on the time that the activations' bytes take at full bandwidth: they are moved by kernels of their own.
    None counts them with the weights."""

    def __post_init__(self) -> None:
        require_positive(flops=self.flops, bandwidth=self.bandwidth)
        if not self.overlap >= 1:
            raise ValueError(f"overlap must be at least 1, got {self.overlap!r}")
        if not 0 <= self.reread <= 1:
            raise ValueError(f"reread must lie in [0, 1], got {self.reread!r}")
        if not (math.isfinite(self.fixed_us) and self.fixed_us >= 0):
            raise ValueError(f"fixed_us must be finite and at least 0, got {self.fixed_us!r}")
        if not (math.isfinite(self.block_us) and self.block_us >= 0):
            raise ValueError(f"block_us must be finite and at least 0, got {self.block_us!r}")
        require_positive(processors=self.processors, **{f"share_{rows}": share for rows, share in self.tile_shares})

    def flops_of(self, tile: int | None) -> float:
        """FLOP/s that tiles of this height reach."""
        if tile is None or not self.tile_shares:
            return self.flops
        tile_share = next((share for rows, share in self.tile_shares if tile <= rows), self.tile_shares[-1][1])
        return self.flops * tile_share


@dataclass(frozen=True, slots=True)
class Work:
    """What one forward computes and moves."""

    flops: float
    """FLOPs, with the padding of the tiles."""
    bytes_once: float
    """Bytes that are read once."""
    bytes_again: float = 0.0
    """Bytes that further tiles of the same owner read again."""
    activations: float = 0.0
    """Part of bytes_once that is neither weights nor KV, in bytes."""
    tile: int | None = None
    """Rows of a tile. None for a kernel without a tile."""
    blocks: float = 0.0
    """Number of thread blocks."""

    def share(self, ranks: int) -> Work:
        """One rank's part of work that is spread evenly over the ranks."""
        return Work(
            self.flops / ranks,
            self.bytes_once / ranks,
            self.bytes_again / ranks,
            self.activations / ranks,
            self.tile,
            self.blocks / ranks,
        )

    def latency_us(self, c: Calibration) -> float:
        """Microseconds of this work without the fixed cost."""
        activation_bytes = self.activations if c.activation is not None else 0.0
        compute = self.flops / c.flops_of(self.tile)
        memory = (self.bytes_once - activation_bytes + c.reread * self.bytes_again) / c.bandwidth
        blocks = self.blocks / c.processors * c.block_us / 1e6
        activation_s = activation_bytes * (c.activation or 0.0) / c.bandwidth
        slowest = max(compute, memory, blocks)
        if math.isinf(c.overlap):
            return (slowest + activation_s) * 1e6
        # The terms are scaled by the largest one, so that a large exponent can't underflow.
        share = sum((term / slowest) ** c.overlap for term in (compute, memory, blocks))
        return float((slowest * share ** (1 / c.overlap) + activation_s) * 1e6)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted boundary."""

    boundary: Boundary
    limiting: str
    """The module whose time grows most across the boundary."""
    points: tuple[Point, ...]
    """The evaluated points of the curve."""

    @property
    def n_max(self) -> int:
        """Largest predicted N within the tolerance. It is the end of the range if the curve never leaves it."""
        return self.boundary.n_max


def dense_work(
    positions: int, batch: int, shapes: Sequence[tuple[int, int]], bytes_per_element: float, tile: TileRule
) -> Work:
    """GEMMs [rows, k] x [k, n], shapes as (n, k). rows = b*N, padded to the tile; weights are read once."""
    rows = positions * batch
    if tile is not None:
        rows = -(-rows // tile(rows)) * tile(rows)
    weights = sum(n * k for n, k in shapes)
    activations = positions * batch * sum(n + k for n, k in shapes)
    return Work(2.0 * rows * weights, bytes_per_element * (weights + activations))


def moe_work(
    positions: int,
    batch: int,
    routing: Routing,
    experts: int,
    top_k: int,
    hidden: int,
    expert_width: int,
    bytes_per_element: float,
    tile: TileRule,
    matrices: int = 2,
    columns: TileRule = None,
) -> Work:
    """Experts of `matrices` GEMMs (2 plain, 3 gated) of hidden x expert_width. Each expert's rows are padded to tiles.

    columns: columns of a thread block's tile at a token count. None: they are not known, and no blocks are counted.
    """
    tokens = positions * batch
    rows_in_tile = tile(tokens) if tile is not None else None
    weights = matrices * hidden * expert_width
    computed = once = again = tiles = 0.0
    for count, rows in rows_per_expert(routing, tokens, experts, top_k):
        per_expert = -(-rows // rows_in_tile) if rows_in_tile is not None else 1
        computed += count * (per_expert * rows_in_tile if rows_in_tile is not None else rows)
        tiles += count * per_expert
        once += count * weights
        again += count * weights * (per_expert - 1)
    activations = ACTIVATION_TERMS * tokens * top_k * (hidden + expert_width)
    blocks = 0.0
    if columns is not None:
        wide = columns(tokens)
        # The first GEMM writes the columns of all matrices but the last side by side, the second the hidden width.
        blocks = tiles * (-(-(matrices - 1) * expert_width // wide) - (-hidden // wide))
    return Work(
        2.0 * computed * weights,
        bytes_per_element * (once + activations),
        bytes_per_element * again,
        bytes_per_element * activations,
        rows_in_tile,
        blocks,
    )


def attention_work(
    positions: int,
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    bytes_per_element: float,
    tile: TileRule,
    packed: bool = False,
    padded: bool = True,
    value_dim: int | None = None,
) -> Work:
    """Attention core over `context` cached tokens. packed: the query heads of a KV head share a tile.

    padded: the kernel computes the whole tile (GPU). Not padded: the last tile ends with its rows (torch's CPU kernel).
    value_dim: that of MLA, whose values are a part of the keys: a cached token is read once.

    The tile rule gets the rows that the kernel sees: positions, or positions * group if packed. Unpacked, the heads of
    a group read the same KV at the same time. One read is counted, the rest is left to the cache.
    """
    group = heads // kv_heads
    rows = positions * (group if packed else 1)
    rows_in_tile = tile(rows) if tile is not None else rows
    tiles = -(-rows // rows_in_tile)
    owners = batch * (kv_heads if packed else heads)
    values = value_dim or head_dim
    kv = batch * context * kv_heads * (head_dim if value_dim else 2 * head_dim)
    queries = batch * positions * heads * (head_dim + values)
    computed = tiles * rows_in_tile if padded else rows
    return Work(
        2.0 * owners * computed * context * (head_dim + values),
        bytes_per_element * (kv + queries),
        bytes_per_element * kv * (tiles - 1),
    )


def predict_boundary(
    modules: Mapping[Any, Callable[[int], Work]],
    calibration: Calibration,
    tolerance: float = TOLERANCE,
    baseline_positions: int = 1,
    max_positions: int = 4096,
    edges: Sequence[int] | None = None,
) -> Prediction:
    """N_max of the predicted curve over N0..max_positions.

    modules: name (a str) -> work of one forward at N positions. edges: the last N of each tile, if they are known.

    With edges, the number of tiles does not fall between two of them as N grows, and so T does not fall either. The
    crossing is found by halving, and the prediction's points are the evaluated ones. Without edges every N is
    evaluated. The range is doubled until the curve has been outside the tolerance for as long as it was inside, so that
    a hole is seen.
    """
    if not modules:
        raise ValueError("the tile roofline needs at least one module")

    def terms(n: int) -> dict[str, float]:
        return {name: work(n).latency_us(calibration) for name, work in modules.items()}

    known: dict[int, float] = {}

    def latency(n: int) -> float:
        if n not in known:
            known[n] = sum(terms(n).values()) + calibration.fixed_us
        return known[n]

    if edges is None:
        end = max(64, 2 * baseline_positions)
        while True:
            points = tuple(Point(n, latency(n)) for n in range(baseline_positions, end + 1))
            boundary = find_boundary(points, tolerance, baseline_positions)
            if boundary.n_max * 2 < end or end >= max_positions:
                break
            end = min(2 * end, max_positions)
    else:
        boundary = _by_segments(latency, tolerance, baseline_positions, max_positions, edges)
        latency(min(boundary.n_max + 1, max_positions))
        points = tuple(Point(n, known[n]) for n in sorted(known))
    after = min(boundary.n_max + 1, max_positions)
    low, high = terms(baseline_positions), terms(after)
    limiting = max(modules, key=lambda name: high[name] - low[name])
    return Prediction(boundary, limiting, points)


def predict_on(
    latencies: Mapping[Any, Callable[[int], float]],
    positions: Sequence[int],
    tolerance: float,
    baseline_positions: int,
    spread: tuple[float, float],
) -> Prediction:
    """N_max of a predicted curve whose T may fall as N grows.

    The curve is evaluated at these N. The crossing past the last N within is found exactly. latencies: name (a str) ->
    microseconds at N positions. spread: the factors by which a predicted T(N)/T(N0) may be too small and too large,
    which make N_max an interval.
    """
    low, high = spread
    base = sum(latency(baseline_positions) for latency in latencies.values())

    def point(n: int) -> Point:
        us = sum(latency(n) for latency in latencies.values())
        if n == baseline_positions:
            return Point(n, us)
        return Point(n, us, us / base / high, us / base / low)

    known = {n: point(n) for n in sorted({baseline_positions, *positions})}
    last = find_boundary(tuple(known.values()), tolerance, baseline_positions).n_max
    after = next((n for n in known if n > last), last)
    # The curve has no edge between two of these N, so the crossing is found by halving.
    while after - last > 1:
        middle = (last + after) // 2
        known[middle] = point(middle)
        if known[middle].latency_us <= (1 + tolerance) * base:
            last = middle
        else:
            after = middle
    points = tuple(known[n] for n in sorted(known))
    boundary = find_boundary(points, tolerance, baseline_positions)
    growth = {name: t(after) - t(baseline_positions) for name, t in latencies.items()}
    return Prediction(boundary, max(growth, key=lambda name: growth[name]), points)


def _by_segments(
    latency: Callable[[int], float], tolerance: float, baseline_positions: int, max_positions: int, edges: Sequence[int]
) -> Boundary:
    """N_max where T is known not to fall between two edges."""
    limit = latency(baseline_positions) * (1 + tolerance) * (1 + 1e-12)
    n_max = n_first_exit = baseline_positions
    has_left = False
    first = baseline_positions
    for last in sorted({e for e in edges if baseline_positions <= e < max_positions} | {max_positions}):
        within = bisect_left(range(first, last + 1), True, key=lambda n: latency(n) > limit)
        if within:
            n_max = first + within - 1
            n_first_exit = n_first_exit if has_left else n_max
        has_left = has_left or within < last + 1 - first
        first = last + 1
    return Boundary(n_max, (n_max, None if n_max == max_positions else n_max), n_first_exit, (), baseline_positions)
