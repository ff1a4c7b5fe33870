"""The files of a report: records, pages, Markdown and JUnit, in one folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pytest_nfp import records
from pytest_nfp.compare.changes import view_of
from pytest_nfp.files import FileError, write_atomically
from pytest_nfp.records import Record
from pytest_nfp.report.html import render
from pytest_nfp.report.junit import junit
from pytest_nfp.report.markdown import markdown


def write_reports(folder: Path, runs: Sequence[Record]) -> list[Path]:
    """Write <folder>/<gpu>/ of each record (record.json, index.html, summary.md, junit.xml), then <folder>/index.html over all
    records that are there: those of earlier runs on other GPUs too.
    """
    written = []
    for record in runs:
        target = folder / record.gpu
        records.write(target / "record.json", record)
        written += write_page(target, [record])
    paths = sorted(folder.glob("*/record.json"))
    if len(paths) == len(written) == 1:
        text = written[0].read_text(encoding="utf-8")  # Of one record alone it is that record's page.
    else:
        text = render(view_of(_readable(paths)))
    write_atomically(folder / "index.html", text)
    return [*written, folder / "index.html"]


def _readable(paths: Sequence[Path]) -> list[Record]:
    found = []
    for path in paths:
        try:
            found.append(records.read(path))
        except FileError:
            continue  # Another release's record: its own report stands beside it.
    return found


def write_page(
    folder: Path, runs: Sequence[Record], against: Record | None = None, with_history: bool = False
) -> list[Path]:
    """Write index.html, summary.md and junit.xml over some records; returns the page's path."""
    view = view_of(runs, against)
    write_atomically(folder / "index.html", render(view, with_history))
    write_atomically(folder / "summary.md", markdown(view))
    write_atomically(folder / "junit.xml", junit(view))
    return [folder / "index.html"]


def why_not_writable(folder: Path) -> str:
    """Why no report can be written to a folder, told before anything is measured; empty where nothing speaks against it."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return f"{place} is not a folder"
    for written in (place, *(p.parent for p in folder.glob("*/record.json"))):
        if not os.access(written, os.W_OK):
            return f"{written} can't be written to"
    return ""


def rescue(runs: Sequence[Record]) -> Path:
    """Save the records where there is room, after their folder failed: the folder that has them. Raises OSError."""
    folder = Path(tempfile.mkdtemp(prefix="pytest-nfp-"))
    for record in runs:
        records.write(folder / record.gpu / "record.json", record)
    return folder
