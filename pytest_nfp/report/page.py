"""The data of the page's script: a table by columns, and the details of each case.

The two are separate, so that the table opens at once. The table is plain JSON, which the script reads as soon as the
browser reaches it. The details follow it compressed, as a reader opens only a few cases.
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
"""(column, heading) of the columns that a reader can filter by."""
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
    """The name of a run: its GPU and when it began."""
    return f"{record.gpu} {record.started[:16].replace('T', ' ')}"


def table(runs: Sequence[Record], found: Sequence[Pair]) -> dict[str, list[Any]]:
    """Column name -> [distinct values, index of each case's value among them].

    Numbers stay numbers, so that they sort as numbers. None stands for no value.
    """
    columns: dict[str, list[Any]] = {name: [] for name, _ in (*FACETS, *COLUMNS)} | {"id": []}
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
            columns[name].append(value)
    return {name: _coded(values) for name, values in columns.items()}


def _coded(values: Sequence[Any]) -> list[Any]:
    """[distinct values, index of each value among them]. A column of ten thousand cases has few distinct values."""
    places: dict[Any, int] = {}
    codes = [places.setdefault(value, len(places)) for value in values]
    return [list(places), codes]


HIDDEN = {"id", "samples", "baseline", "reasons", "outcome", "kind", "gpu", "backend", "subject", "workload", "module"}
"""Fields of a case's record that the details leave out: the page has them elsewhere, or not at all."""


def details(found: Sequence[Pair]) -> str:
    """JSON text: for each case [fields of its record, what its charts show besides the curve, and what changed].

    The fields of the record are text as pydantic writes it. Turning them into objects and back into text would take
    longer than the rest of a report.
    """
    parts = []
    for p in found:
        shown: dict[str, Any] = {"changes": formatting.changes(p)}
        if p.before is not None:
            shown |= {"before": p.before.name, "beforeCurve": p.before.curve}
        if not p.case.tests:
            shown["tests"] = {"case": {"outcome": p.case.outcome, "reasons": p.case.reasons}}
        if span := charts.span_of(p.case):
            shown["marks"] = charts.marks(p.case, p.before, *span)
        if strip := charts.strip_rows(p.before, p.after, p.tiles):
            shown["strip"] = strip["strip"]
        parts.append(f"[{p.case.model_dump_json(exclude_defaults=True, exclude=HIDDEN)},{_json(shown)}]")
    return f"[{','.join(parts)}]"


def _json(data: Any) -> str:
    # pydantic's writer is five times as fast as the standard library, and a report calls it ten thousand times.
    return to_json(data, inf_nan_mode="null").decode()


def plain(data: Any) -> Any:
    """Data as JSON for a script element: nothing in it ends the element or begins another."""
    import markupsafe

    return markupsafe.Markup(_json(data).replace("<", "\\u003c"))  # noqa: S704  # JSON has no < outside its strings


def packed(data: Any) -> str:
    """Data as JSON, compressed, in base64: text that any page can hold."""
    return packed_text(_json(data))


def packed_text(text: str) -> str:
    """Text, compressed, in base64."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode("ascii")
