"""HTML reports: one self-contained file per GPU, and an index that leads to them. Works offline, without script."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_nfp import records
from pytest_nfp.files import FileError, write_atomically
from pytest_nfp.records import Record, totals
from pytest_nfp.report import words
from pytest_nfp.report.chart import chart


@lru_cache(maxsize=1)
def _environment() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(record: Record) -> str:
    """A record as one HTML file."""
    charts = {c.id: chart(c, record.tolerance) for c in record.cases}
    text: str = (
        _environment()
        .get_template("report.html")
        .render(record=record, totals=totals(record.cases), charts=charts, words=words)
    )
    return text


def write_reports(folder: Path, runs: Sequence[Record]) -> list[Path]:
    """Write <folder>/<gpu>/record.json and index.html for each record, then <folder>/index.html over all there are."""
    written = []
    for record in runs:
        target = folder / record.gpu
        records.write(target / "record.json", record)
        write_atomically(target / "index.html", render(record))
        written.append(target / "index.html")
    found = []
    for path in sorted(folder.glob("*/record.json")):
        try:
            found.append((path.parent.name, records.read(path)))
        except FileError:
            continue  # Another version's record: its own report stands beside it.
    rows = [(name, r, totals(r.cases)) for name, r in found]
    write_atomically(folder / "index.html", _environment().get_template("index.html").render(rows=rows))
    return [*written, folder / "index.html"]
