"""Charts by Vega. Each kind has one specification, which is compiled once and filled with the data of each case.

The page draws them with the Vega bundle that vl-convert carries. Static SVG is drawn by vl-convert itself. Colours are
variables of the page, so that one chart works in light mode, in dark mode and on paper.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from pytest_nfp.compare.changes import Side
from pytest_nfp.records import CaseRecord

SHOWN_RATIO = 3.0
"""T(N)/T(N0) at which the axis ends. Larger ratios don't matter to where the boundary is."""
WIDTH, HEIGHT = 640, 250
Rows = dict[str, list[dict[str, Any]]]
_AXIS = {
    "labelColor": "currentColor",
    "titleColor": "currentColor",
    "domainColor": "var(--line)",
    "tickColor": "var(--line)",
    "gridColor": "var(--line)",
    "gridOpacity": 0.6,
    "labelFontSize": 11,
    "titleFontSize": 11,
    "titleFontWeight": "normal",
}
_CONFIG = {"background": None, "view": {"stroke": None}, "axis": _AXIS, "font": "system-ui, sans-serif"}
_X = {
    "field": "n",
    "type": "quantitative",
    "scale": {"type": "log", "base": 2, "nice": False},
    "title": "positions N",
    "axis": {"grid": False, "format": "d", "tickCount": 8},
}


def _curve() -> dict[str, Any]:
    """T(N)/T(N0) over N: limit, tile edges, earlier and composed curve, intervals, points, and a line at each N_max."""
    y = {"field": "ratio", "type": "quantitative", "title": "T(N) / T(N0)", "scale": {"domainMin": 0, "nice": False}}
    tooltip = [
        {"field": "n", "title": "N"},
        {"field": "us", "title": "T(N) us", "format": ".1f"},
        {"field": "ratio", "title": "T(N)/T(N0)", "format": ".3f"},
    ]
    outside = {"condition": {"test": "datum.within", "value": "var(--curve)"}, "value": "var(--fail)"}

    def line(name: str, colour: str, dash: list[int]) -> dict[str, Any]:
        return {
            "data": {"name": name},
            "mark": {"type": "line", "color": colour, "strokeDash": dash, "strokeWidth": 1.5},
            "encoding": {"x": _X, "y": y},
        }

    return {
        "width": WIDTH,
        "height": HEIGHT,
        "layer": [
            {
                "data": {"name": "limit"},
                "mark": {"type": "rule", "color": "var(--fail)", "strokeDash": [5, 4]},
                "encoding": {"y": y},
            },
            {
                "data": {"name": "edges"},
                "mark": {"type": "rule", "color": "var(--soft)", "strokeDash": [1, 3]},
                "encoding": {"x": _X},
            },
            line("before", "var(--before)", [4, 3]),
            line("composed", "var(--pred)", [2, 2]),
            {
                "data": {"name": "points"},
                "mark": {"type": "rule", "color": "var(--curve)"},
                "encoding": {"x": _X, "y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}},
            },
            {
                "data": {"name": "points"},
                "mark": {"type": "line", "color": "var(--curve)", "strokeWidth": 2},
                "encoding": {"x": _X, "y": y},
            },
            {
                "data": {"name": "points"},
                "mark": {"type": "point", "filled": True, "size": 36, "opacity": 1},
                "encoding": {"x": _X, "y": y, "color": outside, "tooltip": tooltip},
            },
            {
                "data": {"name": "marks"},
                "mark": {"type": "rule", "strokeDash": [2, 3]},
                "encoding": {"x": _X, "color": {"field": "colour", "type": "nominal", "scale": None}},
            },
            {
                "data": {"name": "marks"},
                "mark": {"type": "text", "baseline": "top", "fontSize": 11, "align": {"expr": "datum.align"}, "dx": {"expr": "datum.dx"}},
                "encoding": {
                    "x": _X,
                    "y": {"field": "row", "type": "quantitative", "scale": None},
                    "text": {"field": "label"},
                    "color": {"value": "currentColor"},
                },
            },
        ],
        "resolve": {"scale": {"y": "shared"}},
        "config": _CONFIG,
    }  # fmt: skip


def _strip() -> dict[str, Any]:
    """The granularity map as a strip over row counts M, before and now."""
    x = {
        "field": "first",
        "type": "quantitative",
        "scale": {"type": "log", "base": 2, "nice": False},
        "title": "rows M",
    }
    y = {"field": "side", "type": "nominal", "sort": ["before", "now"], "title": None, "axis": {"labelFontSize": 12}}
    return {
        "width": WIDTH,
        "height": {"step": 30},
        "data": {"name": "strip"},
        "layer": [
            {
                "mark": {"type": "rect", "stroke": "var(--card)", "strokeWidth": 1},
                "encoding": {
                    "x": {**x, "axis": {"grid": False, "format": "d"}},
                    "x2": {"field": "end"},
                    "y": y,
                    "fill": {
                        "condition": {"test": "datum.changed", "value": "var(--changed)"},
                        "value": "var(--strip)",
                    },
                    "tooltip": [
                        {"field": "tile", "title": "rows of a tile"},
                        {"field": "first", "title": "from M"},
                        {"field": "last", "title": "to M"},
                    ],
                },
            },
            {
                "mark": {"type": "text", "fontSize": 11, "color": "currentColor"},
                "encoding": {
                    "x": {**x, "field": "middle"},
                    "y": y,
                    "text": {"field": "label", "type": "nominal"},
                },
            },
        ],
        "config": _CONFIG,
    }


def _history() -> dict[str, Any]:
    """N_max over releases, one line a series."""
    x = {
        "field": "release",
        "type": "ordinal",
        "sort": {"field": "order"},
        "title": None,
        "axis": {"labelAngle": -35, "grid": False},
    }
    y = {
        "field": "n_max",
        "type": "quantitative",
        "scale": {"type": "log", "base": 2, "nice": False},
        "title": "N_max",
        "axis": {"format": "d"},
    }
    colour = {"field": "colour", "type": "nominal", "scale": None}
    detail = {"field": "series"}
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "data": {"name": "series"},
        "layer": [
            {
                "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 2},
                "encoding": {"x": x, "y": y, "stroke": colour, "detail": detail},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 40, "opacity": 1},
                "encoding": {"x": x, "y": y, "color": colour, "detail": detail},
            },
            {
                "transform": [{"filter": "datum.label != ''"}],
                "mark": {"type": "text", "align": "left", "dx": 6, "dy": -8, "fontSize": 11, "color": "currentColor"},
                "encoding": {"x": x, "y": y, "text": {"field": "label"}},
            },
        ],
        "config": _CONFIG,
    }


@lru_cache(maxsize=1)
def compiled() -> dict[str, Any]:
    """The specifications compiled to Vega, by name (curve, strip, history), without data."""
    import vl_convert

    return {
        name: vl_convert.vegalite_to_vega(spec)
        for name, spec in (("curve", _curve()), ("strip", _strip()), ("history", _history()))
    }


@lru_cache(maxsize=3)
def _text_of(name: str) -> str:
    return json.dumps(compiled()[name])


def with_data(name: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """A specification with its data in place."""
    spec: dict[str, Any] = json.loads(_text_of(name))  # ten times as fast as a deep copy
    for source in spec["data"]:
        if "source" not in source and source["name"] in rows:
            source["values"] = list(rows[source["name"]])
    return spec


def svg(name: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A chart as SVG. Vega escapes the texts of its labels."""
    import vl_convert

    text: str = vl_convert.vega_to_svg(with_data(name, rows))
    # The page names the chart, and scales it to its column.
    return text.replace('class="marks"', 'class="marks" role="presentation" aria-hidden="true"', 1)


@lru_cache(maxsize=1)
def bundle() -> str:
    """Vega's JavaScript from vl-convert, compressed, in base64. Cached by version, as bundling takes two seconds."""
    import vl_convert

    from pytest_nfp.files import write_atomically
    from pytest_nfp.granularity.artifacts import cache_folder

    path = cache_folder("report") / f"vega-{version('vl-convert-python')}.b64"
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        script: str = vl_convert.javascript_bundle(None)  # type: ignore[arg-type]  # None is the default bundle
        text = base64.b64encode(gzip.compress(script.encode(), 9, mtime=0)).decode("ascii")
    with suppress(OSError):  # Without a cache it is bundled again the next time.
        write_atomically(path, text)
    return text


def bundle_text() -> str:
    """The JavaScript of `bundle`, unpacked as the browser unpacks it."""
    return gzip.decompress(base64.b64decode(bundle())).decode()


def curve_rows(case: CaseRecord, tolerance: float, before: Side | None) -> Rows | None:
    """Data of a case's chart; None without a curve.

    The page's script computes the same from the record (report.js, curveRows).
    """
    base, span = dict(case.curve).get(case.baseline_positions or 0), span_of(case)
    if not base or span is None:
        return None
    first, last = span
    intervals = {n: (low, high) for n, low, high in case.ratios}
    base_before = dict(before.curve).get(case.baseline_positions or 0) if before is not None else None

    def ratios(curve: Sequence[tuple[int, float]], to: float) -> list[dict[str, Any]]:
        return [{"n": n, "ratio": min(us / to, SHOWN_RATIO)} for n, us in curve if first <= n <= last]

    points = [
        {
            "n": n,
            "us": us,
            "ratio": min(us / base, SHOWN_RATIO),
            "low": min(intervals[n][0] if n in intervals else us / base, SHOWN_RATIO),
            "high": min(intervals[n][1] if n in intervals else us / base, SHOWN_RATIO),
            "within": us / base <= 1 + tolerance,
        }
        for n, us in case.curve
        if n <= last
    ]
    return {
        "points": points,
        "limit": [{"ratio": 1 + tolerance}],
        "edges": [{"n": n} for n in (case.granularity or {}).get("edges", []) if first < n < last],
        "before": ratios(before.curve, base_before) if before is not None and base_before else [],
        "composed": ratios((case.composed or {}).get("curve", []), base),
        "marks": marks(case, before, first, last),
    }


def span_of(case: CaseRecord) -> tuple[int, int] | None:
    """First and last N of a case's chart, which ends at the first N past the end of the axis. None without T(N0)."""
    base = dict(case.curve).get(case.baseline_positions or 0)
    if not base:
        return None
    return case.curve[0][0], next((n for n, us in case.curve if us / base > SHOWN_RATIO), case.curve[-1][0])


def marks(case: CaseRecord, before: Side | None, first: int, last: int) -> list[dict[str, Any]]:
    """Vertical lines of a chart. The label of each has a row of its own."""
    candidates: list[tuple[str, int | None, str]] = [
        ("N0", case.baseline_positions if case.baseline_positions != first else None, "var(--soft)"),
        ("n_max", case.n_max, "var(--curve)"),
        ("first exit", case.n_first_exit if case.n_first_exit != case.n_max else None, "var(--curve)"),
    ]
    if before is not None:
        candidates.append(("n_max before", before.n_max, "var(--before)"))
    candidates += [
        (name.replace("_", " "), term["n_max"], "var(--pred)") for name, term in (case.predicted or {}).items()
    ]
    shown = [(label, n, colour) for label, n, colour in candidates if n is not None and first <= n <= last]
    middle = (first * last) ** 0.5
    return [
        {
            "n": n,
            "label": f"{label} {n}",
            "colour": colour,
            "row": 4 + 14 * i,
            # The label goes on the side of the line with more room.
            "align": "right" if n > middle else "left",
            "dx": -4 if n > middle else 4,
        }
        for i, (label, n, colour) in enumerate(shown)
    ]


def strip_rows(before: Side | None, after: Side, changed: tuple[tuple[int, int, int, int], ...]) -> Rows | None:
    """Data of a case's strip; None without a map."""
    if not after.tiles:
        return None
    return {"strip": _strip_of(before.tiles if before is not None else (), after.tiles, changed)}


@lru_cache(maxsize=4096)
def _strip_of(
    before: tuple[tuple[int, int, int], ...],
    after: tuple[tuple[int, int, int], ...],
    changed: tuple[tuple[int, int, int, int], ...],
) -> list[dict[str, Any]]:
    """The rows of a strip. Cached, as many cases share a map."""
    cuts = sorted({first for first, _, _, _ in changed} | {last + 1 for _, last, _, _ in changed})
    rows = []
    for name, tiles in (("before", before), ("now", after)):
        for first, last, tile in _cut(tiles, cuts):
            end = last + 1
            rows.append(
                {
                    "side": name,
                    "first": first,
                    "last": last,
                    "end": end,
                    "middle": round((first * end) ** 0.5, 2),
                    "tile": tile,
                    "label": str(tile) if end / first > 1.3 else "",
                    "changed": any(a <= first <= b for a, b, _, _ in changed),
                }
            )
    return rows


def _cut(tiles: Sequence[tuple[int, int, int]], cuts: Sequence[int]) -> list[tuple[int, int, int]]:
    """The ranges, cut before each of the counts in `cuts` that lies inside a range."""
    pieces = []
    for first, last, tile in tiles:
        starts = [first, *(c for c in cuts if first < c <= last)]
        pieces += [(a, b - 1, tile) for a, b in zip(starts, [*starts[1:], last + 1], strict=True)]
    return pieces
