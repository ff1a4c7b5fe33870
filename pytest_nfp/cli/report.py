"""nfp report: HTML, Markdown and JUnit from records of this or other machines."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Declare the command."""
    p = commands.add_parser(
        "report",
        help="render records again: HTML, Markdown, JUnit",
        description="One page over any number of records, from this machine or others: DIR/index.html, self-contained, with"
        " summary.md and junit.xml beside it. Exit 0 written, 2 bad input.",
        epilog="example: nfp report reports/*/record.json -o report    |    nfp report new.json --against old.json -o upgrade",
    )
    p.add_argument(
        "records",
        nargs="*",
        type=Path,
        metavar="RECORD",
        help="record.json, or the journal.jsonl of a run that was killed",
    )
    p.add_argument("-o", "--output", type=Path, metavar="DIR", help="folder to write to; made if it is not there")
    p.add_argument(
        "--against",
        type=Path,
        metavar="OLD",
        action="append",
        help="an earlier record to compare with, in place of the baselines; repeat it for each GPU",
    )
    p.add_argument("--schema", action="store_true", help="print the JSON Schema of record.json and end")
    p.add_argument("--history", action="store_true", help="N_max over the releases that the records have")
    p.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Write the report. Raises FileError."""
    from pytest_nfp import records
    from pytest_nfp.files import FileError
    from pytest_nfp.report.files import write_page

    if given.schema:
        print(json.dumps(records.json_schema(), indent=1))
        return 0
    if not given.records or given.output is None:
        raise FileError("give at least one record and -o DIR")
    runs = [record for path in given.records for record in _records(path)]
    against = _together([record for path in given.against for record in _records(path)]) if given.against else None
    try:
        written = write_page(given.output, runs, against, given.history)
    except OSError as error:
        free = ""
        if given.output.exists():
            free = f", {shutil.disk_usage(given.output).free / 1e6:.0f} MB are free there"
        raise FileError(f"{given.output}: the report can't be written: {error}{free}") from error
    cases = sum(len(r.cases) for r in runs)
    print(f"{written[0]}: {cases} cases of {len(runs)} record{'s' if len(runs) > 1 else ''}")
    return 0


def _together(olds: list[Any]) -> Any:
    """Earlier records merged into one, so that cases of every GPU find their counterpart.

    Facts about a machine carry the name of its GPU.
    """
    if len(olds) == 1:
        return olds[0]
    gpus = list(dict.fromkeys(r.gpu for r in olds))
    machine = {
        "title": "; ".join(f"{r.gpu}: {r.machine.get('title', '')}" for r in olds),
        "identity": {f"{r.gpu} {k}": v for r in olds for k, v in r.machine.get("identity", {}).items()},
    }
    return olds[0].model_copy(
        update={
            "gpu": ", ".join(gpus),
            "started": min(r.started for r in olds),
            "tool": ", ".join(dict.fromkeys(r.tool for r in olds)),
            "partial": any(r.partial for r in olds),
            "machine": machine,
            "cases": [c for r in olds for c in r.cases],
        }
    )


def _records(path: Path) -> list[Any]:
    """The record of a file, or the records of a journal, which are partial. Raises FileError."""
    from pytest_nfp import records
    from pytest_nfp.files import FileError
    from pytest_nfp.records import journal

    if path.suffix != ".jsonl":
        return [records.read(path)]
    partial_records = journal.records_of(journal.read(path))
    if not partial_records:
        raise FileError(f"{path}: that run ended before its first case did; run it again")
    return partial_records
