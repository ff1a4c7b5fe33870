"""What the page's script works on: a table by columns, and the details of each case, apart so that the table opens at once."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from typing import Any

from pytest_nfp.records import Record
from pytest_nfp.report import charts, words
from pytest_nfp.report.changes import Pair, interval_or_nothing

FACETS = (
    ("run", "Run"),
    ("gpu", "GPU"),
    ("backend", "Backend"),
    ("release", "Release"),
    ("subject", "Model"),
    ("module", "Module"),
    ("dtype", "Dtype"),
    ("batch", "b"),
    ("context", "L"),
    ("top_k", "k"),
    ("routing", "Routing"),
    ("kind", "Kind"),
    ("outcome", "Outcome"),
    ("changed", "Changed"),
)
"""Columns that can be filtered by, with their names."""
COLUMNS = (
    ("n_idle", "N_idle"),
    ("principle", "Principle"),
    ("tile_roofline", "Tile roofline"),
    ("n_max", "n_max"),
    ("interval", "Interval"),
    ("first_exit", "First exit"),
    ("before", "Before"),
)


def run_name(record: Record) -> str:
    """A run among others: its GPU and when it began."""
    return f"{record.gpu} {record.started[:16].replace('T', ' ')}"


def table(runs: Sequence[Record], found: Sequence[Pair]) -> dict[str, list[Any]]:
    """Column name -> a value a case. Numbers stay numbers, so that they sort as such; None where there is none."""
    out: dict[str, list[Any]] = {name: [] for name, _ in (*FACETS, *COLUMNS)} | {"id": []}
    names = [run_name(r) for r in runs]
    for p in found:
        c = p.case
        framework, _, release = c.backend.partition("==")
        row = {
            "id": c.id,
            "run": names[p.run],
            "gpu": c.gpu,
            "backend": framework,
            "release": release or None,
            "subject": c.subject,
            "module": c.module if c.module != "own" else "own kernel",
            "dtype": c.dtype,
            "batch": c.batch,
            "context": c.context,
            "top_k": c.top_k,
            "routing": c.routing,
            "kind": c.kind,
            "outcome": c.outcome,
            "changed": "changed" if p.is_changed else "as before" if p.before is not None else "nothing before",
            "n_idle": round(c.n_idle) if c.n_idle is not None else "unbounded" if c.n_idle_unbounded else None,
            "principle": words.term(c, "principle") or None,
            "tile_roofline": words.term(c, "tile_roofline") or None,
            "n_max": c.n_max if c.curve else None,
            "interval": words.interval(c) or None,
            "first_exit": c.n_first_exit,
            "before": interval_or_nothing(p.before) or None,
        }
        for name, value in row.items():
            out[name].append(value)
    return out


HIDDEN = {"id", "samples", "baseline", "reasons", "outcome", "kind"}


def details(runs: Sequence[Record], found: Sequence[Pair]) -> list[dict[str, Any]]:
    """Of each case: what its record holds, the data of its charts, and what changed."""
    out = []
    for p in found:
        c = p.case
        data = c.model_dump(mode="json", exclude_defaults=True, exclude=HIDDEN)
        data["reasons"] = [[question, test.outcome, test.reasons] for question, test in sorted(c.tests.items())] or [
            ["case", c.outcome, c.reasons]
        ]
        data.pop("tests", None)
        if rows := charts.curve_rows(c, runs[p.run].tolerance, p.before):
            data["chart"] = _slim(rows)
        if strip := charts.strip_rows(p.before, p.after, p.tiles):
            data["strip"] = _slim(strip)
        if p.before is not None:
            data["before"] = p.before.name
        data["changes"] = words.changes(p)
        out.append(data)
    return out


def _slim(rows: charts.Rows) -> dict[str, Any]:
    """Rows as their names once and a list a row: half of a page is chart data."""
    return {
        name: [list(listed[0]), *([_short(v) for v in row.values()] for row in listed)]
        for name, listed in rows.items()
        if listed
    }


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def packed(data: Any) -> str:
    """JSON, compressed, in base64: text that can stand in any page."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode("ascii")
