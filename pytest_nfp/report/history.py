"""N_max over releases, from many records: what stays of a case while its release changes is one series."""

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
"""Lines of one chart: more can't be told apart."""


def tables(runs: Sequence[Record]) -> list[dict[str, Any]]:
    """A table for each GPU and framework: `releases`, and `rows` of (name, kind, cells by release, points, changed).

    A row is of one kind: what was measured, recorded and predicted are three rows, and never compared. A cell is (text, changed
    against the release before) or None. Only rows of at least two releases; a case that several records have is the newest
    record's; a curve that is not to be trusted has no cell.
    """
    seen: dict[tuple[str, str], dict[tuple[str, str], dict[str, Entry]]] = defaultdict(lambda: defaultdict(dict))
    for record in sorted(runs, key=lambda r: r.started):
        for c in record.cases:
            framework, _, release = c.backend.partition("==")
            if not release or c.kind == "executed":
                continue
            if c.curve and is_trusted(c) and c.n_max is not None:
                seen[c.gpu, framework][key_of(c), c.kind][release] = c, record
            if (c.predicted or {}).get("tile_roofline"):
                seen[c.gpu, framework][key_of(c), "predicted"][release] = c, record
    out = []
    for (gpu, framework), series in seen.items():
        rows = {key: cases for key, cases in series.items() if len(cases) > 1}
        if not rows:
            continue
        cases = {r: c for by_release in rows.values() for r, (c, _) in by_release.items()}
        releases = sorted(cases, key=lambda r: release_order(cases[r]))
        told = [_row(kind, by_release, releases) for (_, kind), by_release in rows.items()]
        told.sort(key=lambda r: not r["changed"])
        out.append({"gpu": gpu, "framework": framework, "releases": releases, "rows": told})
    return out


Entry = tuple[CaseRecord, Record]
"""A case and the record that it is of."""


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
    some = next(iter(cases.values()))[0]
    is_changed = any(cell is not None and cell[1] for cell in cells)
    name = f"{some.subject} {some.workload}"
    return {"name": name, "kind": kind, "cells": cells, "points": points, "changed": is_changed}


def _has_moved(kind: str, before: Entry, after: Entry) -> bool:
    """As predictions move, or as curves do."""
    if kind == "predicted":
        return has_moved(_term(before[0], kind), _term(after[0], kind))
    was, now = (known_boundary(case, record.tolerance) for case, record in (before, after))
    assert was is not None and now is not None  # only cases with a curve are in a row of curves
    found = compare_boundaries(was, now, after[0].baseline_positions or 1, after[1].match_tolerance)
    return found.answer == "moved"


def _term(case: CaseRecord, kind: str) -> dict[str, Any]:
    """N_max with its interval: of the curve, or the tile roofline's."""
    if kind == "predicted":
        term: dict[str, Any] = (case.predicted or {})["tile_roofline"]
        return term
    return {"n_max": case.n_max, "interval": case.n_max_interval or (case.n_max, case.n_max)}


def figures(told: Sequence[dict[str, Any]]) -> list[tuple[str, Any]]:
    """(what it shows, SVG) of the series that changed, those of a GPU and framework in one chart. told: what `tables` gives."""
    import markupsafe

    out: list[tuple[str, Any]] = []
    for t in told:
        changed = [r for r in t["rows"] if r["changed"]][:SERIES]
        if not changed or len(out) == CHARTS:
            continue
        rows = []
        for i, r in enumerate(changed):
            for at, (release, n) in enumerate(r["points"]):
                rows.append(
                    {
                        "series": f"{r['name']} {r['kind']}",
                        "release": release,
                        "order": t["releases"].index(release),
                        "n_max": n,
                        "colour": f"var(--s{i + 1})",
                        "label": str(i + 1) if at == len(r["points"]) - 1 else "",
                    }
                )
        names = "; ".join(f"{i}: {r['name']}, {r['kind']}" for i, r in enumerate(changed, 1))
        svg = markupsafe.Markup(charts.svg("history", {"series": rows}))  # noqa: S704  # Vega escapes its labels
        out.append((f"{t['gpu']} {t['framework']}, {names}", svg))
    return out
