"""N_max over releases, from many records: what stays of a case while its release changes is one series."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from packaging.version import InvalidVersion, Version

from pytest_nfp.principle.boundary import bracketed
from pytest_nfp.records import CaseRecord, Record
from pytest_nfp.report import charts
from pytest_nfp.report.changes import key_of

CHARTS = 6
SERIES = 6
"""Lines of one chart: more can't be told apart."""


def tables(runs: Sequence[Record]) -> list[dict[str, Any]]:
    """A table for each GPU and framework: `releases`, and `rows` of (subject and workload, a cell a release, changed).

    A cell is (text, kind, changed against the release before) or None. Only cases of at least two releases; a case that several
    records have is the newest record's.
    """
    seen: dict[tuple[str, str], dict[str, dict[str, CaseRecord]]] = defaultdict(lambda: defaultdict(dict))
    for record in sorted(runs, key=lambda r: r.started):
        for c in record.cases:
            framework, _, release = c.backend.partition("==")
            if release:
                seen[c.gpu, framework][key_of(c)][release] = c
    out = []
    for (gpu, framework), series in seen.items():
        rows = {key: cases for key, cases in series.items() if len(cases) > 1}
        if not rows:
            continue
        releases = sorted({r for cases in rows.values() for r in cases}, key=_order)
        out.append({"gpu": gpu, "framework": framework, "releases": releases, "rows": _rows(rows, releases)})
    return out


def _order(release: str) -> tuple[Any, ...]:
    try:
        return (1, Version(release))
    except InvalidVersion:
        return (0, re.sub(r"\d+", lambda m: m[0].zfill(8), release))


def _rows(series: dict[str, dict[str, CaseRecord]], releases: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for cases in series.values():
        cells: list[tuple[str, str, bool] | None] = []
        last: int | None = None
        for release in releases:
            c = cases.get(release)
            n = _n_max(c) if c is not None else None
            if c is None or n is None:
                cells.append(None)
                continue
            kind = c.kind if c.curve else "predicted"
            text = f"{n} {bracketed(c.n_max_interval)}" if c.n_max_interval and c.curve else str(n)
            cells.append((text, kind, last is not None and n != last))
            last = n
        some = next(iter(cases.values()))
        points = [(r, _n_max(cases[r])) for r in releases if r in cases and _n_max(cases[r]) is not None]
        rows.append(
            {
                "name": f"{some.subject} {some.workload}",
                "cells": cells,
                "points": points,
                "changed": any(cell is not None and cell[2] for cell in cells),
            }
        )
    return sorted(rows, key=lambda r: not r["changed"])


def _n_max(case: CaseRecord) -> int | None:
    """Of the curve where there is one, else of the tile roofline."""
    if case.curve:
        return case.n_max
    term = (case.predicted or {}).get("tile_roofline")
    return None if term is None else int(term["n_max"])


def figures(runs: Sequence[Record]) -> list[tuple[str, Any]]:
    """(what it shows, SVG) of the series that changed, those of a GPU and framework in one chart."""
    import markupsafe

    out: list[tuple[str, Any]] = []
    for t in tables(runs):
        changed = [r for r in t["rows"] if r["changed"]][:SERIES]
        if not changed or len(out) == CHARTS:
            continue
        rows = []
        for i, r in enumerate(changed):
            for at, (release, n) in enumerate(r["points"]):
                rows.append(
                    {
                        "series": r["name"],
                        "release": release,
                        "order": t["releases"].index(release),
                        "n_max": n,
                        "colour": f"var(--s{i + 1})",
                        "label": str(i + 1) if at == len(r["points"]) - 1 else "",
                    }
                )
        names = "; ".join(f"{i}: {r['name']}" for i, r in enumerate(changed, 1))
        svg = markupsafe.Markup(charts.svg("history", {"series": rows}))  # noqa: S704  # Vega escapes its labels
        out.append((f"{t['gpu']} {t['framework']}, {names}", svg))
    return out
