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
    """Write the reports of a run; returns the paths of the pages.

    Each record gets <folder>/<gpu>/ with record.json, index.html, summary.md and junit.xml. Then <folder>/index.html is
    written over all records in the folder, including those of earlier runs on other GPUs.
    """
    written = []
    for record in runs:
        target = folder / record.gpu
        records.write(target / "record.json", record)
        written += write_page(target, [record])
    paths = sorted(folder.glob("*/record.json"))
    if len(paths) == len(written) == 1:
        text = written[0].read_text(encoding="utf-8")  # With one record only, the common page is that record's page.
    else:
        text = render(view_of(_readable(paths)))
    write_atomically(folder / "index.html", text)
    return [*written, folder / "index.html"]


def _readable(paths: Sequence[Path]) -> list[Record]:
    readable = []
    for path in paths:
        try:
            readable.append(records.read(path))
        except FileError:
            continue  # A record that this release can't read has its own report beside it.
    return readable


def write_page(
    folder: Path, runs: Sequence[Record], against: Record | None = None, with_history: bool = False
) -> list[Path]:
    """Write index.html, summary.md and junit.xml over some records; returns the path of the page, in a list."""
    view = view_of(runs, against)
    write_atomically(folder / "index.html", render(view, with_history))
    write_atomically(folder / "summary.md", markdown(view))
    write_atomically(folder / "junit.xml", junit(view))
    return [folder / "index.html"]


def why_not_writable(folder: Path) -> str:
    """Why no report can be written to a folder, checked before anything is measured; empty where one can."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is not a folder"
    for target in (existing, *(p.parent for p in folder.glob("*/record.json"))):
        if not os.access(target, os.W_OK):
            return f"{target} can't be written to"
    return ""


def rescue(runs: Sequence[Record]) -> Path:
    """Save the records in a new temporary folder, as their own folder failed. Returns that folder. Raises OSError."""
    folder = Path(tempfile.mkdtemp(prefix="pytest-nfp-"))
    for record in runs:
        records.write(folder / record.gpu / "record.json", record)
    return folder
