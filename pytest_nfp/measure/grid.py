"""Which N a curve is measured at."""

from __future__ import annotations

from pytest_nfp.cases import Case
from pytest_nfp.granularity import Granularity
from pytest_nfp.predict import edge_positions
from pytest_nfp.principle.routing import Replay

GRID = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
"""The positions measured by default; the map's edges inside the range, edge and edge + 1, come on top."""
LONG_CURVE = 192
"""Up to where an attention curve is measured on a CPU: past the first tile switch of its kernel."""


def positions_to_measure(case: Case, granularity: Granularity | None) -> list[int]:
    """N0, the default grid, and the map's edges (edge, edge + 1) in positions as far as the grid reaches."""
    base = case.baseline_positions
    grid = {base, *(n for n in GRID if n >= base), *(base * f for f in (2, 3, 4, 6, 8, 12, 16) if base > 1)}
    if case.module == "attention":
        grid |= {96, 128, LONG_CURVE - 1, LONG_CURVE}
    end = max(grid)
    if granularity is not None and granularity.has_tiles:
        for last in edge_positions(case, granularity):
            grid |= {n for n in (last, last + 1) if base <= n <= end}
        if case.module == "attention":
            # The end of the first tile: the next query row begins another one.
            group = case.subject.attention.group if granularity.packed and case.subject.attention else 1
            tile = granularity.tile(base * group) // group
            grid |= {n for n in (tile, tile + 1) if base <= n <= end}
    if isinstance(case.routing, Replay):
        grid = {n for n in grid if n * case.batch <= len(case.routing.tokens)} | {base}
    if base > 1:
        # Below N0 the curve shows how coverage grows; it takes no part in the boundary.
        grid |= {n for n in (1, 2, 4) if n < base}
    return sorted(grid)
