"""nfp judge: N_max of a curve from a file. nfp compare: two records, case by case."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_nfp.cli import options
from pytest_nfp.settings import Settings

if TYPE_CHECKING:
    from pytest_nfp.compare.one_curve import Compared

COLUMNS = (
    "A CSV or JSON table of positions (N) with latency_us, or samples, or a median with low and high or spread (its"
    " half-width); columns kernel, mode (CUDA graph), host_us, tokens_per_s and error are used where there are any."
    " nvbench's JSON and triton's perf_report CSV are read too. Exit 0 pass, 1 fail or invalid, 2 bad input, 3 undecided."
)


def add(commands: Any) -> None:
    """Declare the two commands."""
    p = commands.add_parser(
        "judge",
        help="N_max of a curve from a file",
        description=COLUMNS,
        epilog="example: nfp judge curve.csv --expect 8",
    )
    p.add_argument("file", type=Path, help="CSV or JSON")
    p.add_argument(
        "--tolerance", type=float, default=Settings.tolerance, help=f"epsilon (default {Settings.tolerance})"
    )
    p.add_argument("--baseline-positions", type=options.positive, default=1, help="N0 (default 1)")
    p.add_argument("--column", help="the column of latencies, where a table has several")
    p.add_argument("--expect", type=options.positive, help="fail if N_max is below this")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=run_judge)

    p = commands.add_parser(
        "compare",
        help="two records, case by case",
        description="Did N_max change from one record to another? Exit 0 no, 1 yes, 2 bad input, 3 undecided.",
        epilog="example: nfp compare old/record.json reports/h200/record.json",
    )
    p.add_argument("old", type=Path, metavar="OLD", help="record.json of an earlier run")
    p.add_argument("new", type=Path, metavar="NEW", help="record.json of a later run, of another release or not")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=run_compare)


def run_judge(given: argparse.Namespace) -> int:
    """Judge a curve. Raises FileError."""
    from pytest_nfp.compare.one_curve import EXIT, judge_curve
    from pytest_nfp.curves.formats import read_curve
    from pytest_nfp.verdict import interval_in_words

    table = read_curve(given.file, given.baseline_positions, given.column)
    judged = judge_curve(table, given.tolerance, given.expect)
    if given.json:
        print(json.dumps(judged.as_dict(), indent=1))
        return EXIT[judged.outcome]
    b = judged.boundary
    if b is None:
        print(f"{judged.outcome}: no N_max is claimed")
    else:
        print(f"{judged.outcome}: N_max {interval_in_words(b)}, first exit {b.n_first_exit}, N0 {b.baseline_positions}")
    for p in judged.plateaus:
        print(f"  plateau {p.first}..{p.last}: {p.latency_us:.1f} us; sweet spot N={p.last}")
    for reason in judged.reasons:
        print(f"  {reason}")
    return EXIT[judged.outcome]


def run_compare(given: argparse.Namespace) -> int:
    """Compare two records. Raises FileError."""
    from pytest_nfp import records
    from pytest_nfp.compare.one_curve import EXIT, compare_records
    from pytest_nfp.records.shown import shown
    from pytest_nfp.verdict import worst

    compared, notes = compare_records(shown(records.read(given.old)), shown(records.read(given.new)))
    outcome = worst([c.outcome for c in compared]) if compared else "UNDECIDED"
    if given.json:
        rows = [_as_json(c) for c in compared]
        print(json.dumps({"outcome": outcome, "machine": notes, "cases": rows}, indent=1))
        return EXIT[outcome]
    for note in notes:
        print(f"machine  {note}")
    for c in compared:
        before, after = (str(case.n_max) if case else "-" for case in (c.before, c.after))
        print(f"{c.outcome:<9}  {c.name}: N_max {before} to {after}")
        for reason in c.reasons:
            print(f"           {reason}")
    if not compared:
        print("neither record holds a curve, so nothing was compared")
    return EXIT[outcome]


def _as_json(c: Compared) -> dict[str, Any]:
    sides = {
        when: None
        if case is None
        else {"backend": case.backend, "n_max": case.n_max, "n_max_interval": case.n_max_interval}
        for when, case in (("before", c.before), ("after", c.after))
    }
    return {"case": c.name, "outcome": c.outcome, "reasons": list(c.reasons), **sides}
