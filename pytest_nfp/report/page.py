"""What the page's script works on: a table by columns, and the details of each case, apart so that the table opens at once.

The table is plain JSON, which the script reads as soon as the browser has come so far; the rest, of which a reader opens a few
cases, is compressed and comes behind it.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from pytest_nfp.compare.changes import Pair, interval_or_nothing
from pytest_nfp.records import Record
from pytest_nfp.report import charts, formatting

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
    """Column name -> [its different values, and which of them each case has].

    Numbers stay numbers, so that they sort as such; None where there is none.
    """
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
            "principle": formatting.term(c, "principle") or None,
            "tile_roofline": formatting.term(c, "tile_roofline") or None,
            "n_max": c.n_max if c.curve else None,
            "interval": formatting.interval(c) or None,
            "first_exit": c.n_first_exit,
            "before": interval_or_nothing(p.before) or None,
        }
        for name, value in row.items():
            out[name].append(value)
    return {name: _coded(values) for name, values in out.items()}


def _coded(values: Sequence[Any]) -> list[Any]:
    """[different values, the place of each among them]: a column of ten thousand cases has few."""
    places: dict[Any, int] = {}
    codes = [places.setdefault(value, len(places)) for value in values]
    return [list(places), codes]


HIDDEN = {"id", "samples", "baseline", "reasons", "outcome", "kind", "gpu", "backend", "subject", "workload", "module"}
"""Of a case's record what the page has elsewhere, or not at all."""


def details(found: Sequence[Pair]) -> str:
    """JSON text, of each case [what its record holds, what its charts show besides the curve, and what changed].

    The record's part is text as pydantic writes it: made into objects here and into text again, it would take longer than all the
    rest of a report.
    """
    parts = []
    for p in found:
        more: dict[str, Any] = {"changes": formatting.changes(p)}
        if p.before is not None:
            more |= {"before": p.before.name, "beforeCurve": p.before.curve}
        if not p.case.tests:
            more["tests"] = {"case": {"outcome": p.case.outcome, "reasons": p.case.reasons}}
        if span := charts.span_of(p.case):
            more["marks"] = charts.marks(p.case, p.before, *span)
        if strip := charts.strip_rows(p.before, p.after, p.tiles):
            more["strip"] = strip["strip"]
        parts.append(f"[{p.case.model_dump_json(exclude_defaults=True, exclude=HIDDEN)},{_json(more)}]")
    return f"[{','.join(parts)}]"


def _json(data: Any) -> str:
    # As pydantic writes the records: five times as fast as the standard library, ten thousand times a report.
    return to_json(data, inf_nan_mode="null").decode()


def plain(data: Any) -> Any:
    """Data as JSON that can stand in a script element: nothing in it ends the element, or begins another."""
    import markupsafe

    return markupsafe.Markup(_json(data).replace("<", "\\u003c"))  # noqa: S704  # JSON has no < outside its strings


def packed(data: Any) -> str:
    """Data as JSON, compressed, in base64: text that can stand in any page."""
    return packed_text(_json(data))


def packed_text(text: str) -> str:
    """Text, compressed, in base64."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode("ascii")
