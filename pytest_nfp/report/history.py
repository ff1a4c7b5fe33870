"""N_max over releases, from many records. A series is one case (GPU, framework, subject, workload)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pytest_nfp.compare.changes import release_order
from pytest_nfp.comparison import compare_boundaries, has_moved
from pytest_nfp.principle.boundary import bracketed
from pytest_nfp.records import CaseRecord, Record, is_trusted, key_of, known_boundary
from pytest_nfp.report import charts

CHARTS = 6
SERIES = 6
"""Lines of one chart; a reader can't tell more apart."""


def tables(runs: Sequence[Record]) -> list[dict[str, Any]]:
    """A table for each GPU and framework: `releases`, and `rows` of (name, kind, cells by release, points, changed).

    A row has one kind. Measured, recorded and predicted N_max are three rows, and are never compared with each other.
    A cell is (text, changed against the release before) or None. A row has at least two releases.
    Where several records have a case, the newest record is used. A curve that is not to be trusted gives no cell.
    """
    by_framework: dict[tuple[str, str], dict[tuple[str, str], dict[str, Entry]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for record in sorted(runs, key=lambda r: r.started):
        for c in record.cases:
            framework, _, release = c.backend.partition("==")
            if not release or c.kind == "executed":
                continue
            if c.curve and is_trusted(c) and c.n_max is not None:
                by_framework[c.gpu, framework][key_of(c), c.kind][release] = c, record
            if (c.predicted or {}).get("tile_roofline"):
                by_framework[c.gpu, framework][key_of(c), "predicted"][release] = c, record
    history_tables = []
    for (gpu, framework), series in by_framework.items():
        rows = {key: cases for key, cases in series.items() if len(cases) > 1}
        if not rows:
            continue
        cases = {r: c for by_release in rows.values() for r, (c, _) in by_release.items()}
        releases = sorted(cases, key=lambda r: release_order(cases[r]))
        table_rows = [_row(kind, by_release, releases) for (_, kind), by_release in rows.items()]
        table_rows.sort(key=lambda r: not r["changed"])
        history_tables.append({"gpu": gpu, "framework": framework, "releases": releases, "rows": table_rows})
    return history_tables


Entry = tuple[CaseRecord, Record]
"""A case and its record."""


def _row(kind: str, cases: dict[str, Entry], releases: Sequence[str]) -> dict[str, Any]:
    cells: list[tuple[str, bool] | None] = []
    points: list[tuple[str, int]] = []
    before: Entry | None = None
    for release in releases:
        if release not in cases:
            cells.append(None)
            continue
        term = _term(cases[release][0], kind)
        interval = term.get("interval")
        text = f"{term['n_max']} {bracketed(interval)}" if interval else str(term["n_max"])
        cells.append((text, before is not None and _has_moved(kind, before, cases[release])))
        points.append((release, term["n_max"]))
        before = cases[release]
    first_case = next(iter(cases.values()))[0]
    is_changed = any(cell is not None and cell[1] for cell in cells)
    name = f"{first_case.subject} {first_case.workload}"
    return {"name": name, "kind": kind, "cells": cells, "points": points, "changed": is_changed}


def _has_moved(kind: str, before: Entry, after: Entry) -> bool:
    """Whether N_max moved between two entries: by the rule for predictions, or by the rule for curves."""
    if kind == "predicted":
        return has_moved(_term(before[0], kind), _term(after[0], kind))
    was, now = (known_boundary(case, record.tolerance) for case, record in (before, after))
    assert was is not None and now is not None  # only cases with a curve are in a row of curves
    boundaries = compare_boundaries(was, now, after[0].baseline_positions or 1, after[1].match_tolerance)
    return boundaries.answer == "moved"


def _term(case: CaseRecord, kind: str) -> dict[str, Any]:
    """N_max with its interval: that of the curve, or that of the tile roofline."""
    if kind == "predicted":
        term: dict[str, Any] = (case.predicted or {})["tile_roofline"]
        return term
    return {"n_max": case.n_max, "interval": case.n_max_interval or (case.n_max, case.n_max)}


def figures(told: Sequence[dict[str, Any]]) -> list[tuple[str, Any]]:
    """(caption, SVG) of the series that changed: one chart a GPU and framework. told: the result of `tables`."""
    import markupsafe

    drawn: list[tuple[str, Any]] = []
    for table in told:
        changed = [r for r in table["rows"] if r["changed"]][:SERIES]
        if not changed or len(drawn) == CHARTS:
            continue
        rows = []
        for i, r in enumerate(changed):
            for place, (release, n) in enumerate(r["points"]):
                rows.append(
                    {
                        "series": f"{r['name']} {r['kind']}",
                        "release": release,
                        "order": table["releases"].index(release),
                        "n_max": n,
                        "colour": f"var(--s{i + 1})",
                        "label": str(i + 1) if place == len(r["points"]) - 1 else "",
                    }
                )
        names = "; ".join(f"{i}: {r['name']}, {r['kind']}" for i, r in enumerate(changed, 1))
        svg = markupsafe.Markup(charts.svg("history", {"series": rows}))  # noqa: S704  # Vega escapes its labels
        drawn.append((f"{table['gpu']} {table['framework']}, {names}", svg))
    return drawn
