"""One curve as SVG: T(N)/T(N0) over N on a log axis, with intervals, the limit, N_max and the predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pytest_nfp.records import CaseRecord

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 260, 46, 34, 12, 14
SHOWN_RATIO = 3.0
"""The axis ends here: past it, how much slower no longer matters to where the boundary is."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Coordinates for the template: everything is a number or a short text."""

    width: int
    height: int
    points: list[dict[str, Any]]
    line: str
    x_ticks: list[tuple[float, int]]
    y_ticks: list[tuple[float, str]]
    limit_y: float
    marks: list[dict[str, Any]]
    plot: tuple[int, int, int, int]


def chart(case: CaseRecord, tolerance: float) -> Chart | None:
    """The chart of a case with a curve, or None."""
    if not case.curve or case.baseline_positions is None:
        return None
    base = next((us for n, us in case.curve if n == case.baseline_positions), None)
    if base is None:
        return None
    lows_highs = {n: (low, high) for n, low, high in case.ratios}
    within = [(n, us / base) for n, us in case.curve]
    last = next((n for n, r in within if r > SHOWN_RATIO), within[-1][0])
    shown = [(n, r) for n, r in within if n <= last]
    first_log, last_log = math.log2(shown[0][0]), math.log2(max(shown[-1][0], shown[0][0] + 1))
    top = min(SHOWN_RATIO, max(1.4, *(r for _, r in shown))) * 1.02

    def x(n: float) -> float:
        share = (math.log2(n) - first_log) / (last_log - first_log)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(ratio: float) -> float:
        share = min(ratio, top) / top
        return round(HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP), 1)

    points = [
        {
            "x": x(n),
            "y": y(r),
            "low": y(lows_highs[n][0]) if n in lows_highs else None,
            "high": y(lows_highs[n][1]) if n in lows_highs else None,
            "title": f"N={n}: {r:.3f} T(N0)",
            "within": r <= 1 + tolerance,
        }
        for n, r in shown
    ]
    marks = []
    candidates = [("n_max", case.n_max, "measured")]
    if case.predicted is not None:
        candidates += [(p.replace("_", " "), term["n_max"], "predicted") for p, term in case.predicted.items()]
    for row, (label, n, kind) in enumerate(candidates):
        if n is not None and shown[0][0] <= n <= shown[-1][0]:
            # Beside the line, on the side with more room.
            at, is_right = x(n), x(n) > WIDTH * 0.7
            text = {"label_x": at - 4 if is_right else at + 4, "anchor": "end" if is_right else "start"}
            marks.append({"x": at, "label": f"{label} {n}", "kind": kind, "y": TOP + 10 + 13 * row, **text})
    step = max(1, round((last_log - first_log) / 8))
    x_ticks = [(x(2.0**e), 2**e) for e in range(math.ceil(first_log), math.floor(last_log) + 1, step)]
    y_ticks = [(y(v), f"{v:g}") for v in (0, 0.5, 1, 1.5, 2, 2.5, 3) if v <= top]
    return Chart(
        WIDTH,
        HEIGHT,
        points,
        " ".join(f"{p['x']},{p['y']}" for p in points),
        x_ticks,
        y_ticks,
        y(1 + tolerance),
        marks,
        (LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM),
    )
