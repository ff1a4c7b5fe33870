"""The summary that pytest prints: a row a case, then the reasons that matter."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_nfp.records import CaseRecord, Record, totals
from pytest_nfp.report import words

HEADER = ("case", "N_idle", "principle", "tile roofline", "n_max", "interval", "first exit", "kind", "outcome")


def summary_lines(record: Record, verbosity: int = 0) -> list[str]:
    """Lines of the summary; reasons of cases that passed only with -v."""
    shared = f"{record.gpu}-"
    rows = [HEADER, *(_row(c, shared) for c in record.cases)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(HEADER))]
    lines = [_line(r, widths) for r in rows]
    reasons = [
        f"{c.outcome} {c.id.removeprefix(shared)}: {'; '.join(c.reasons)}"
        for c in record.cases
        if c.reasons and (c.outcome not in ("PASS", "SKIPPED") or verbosity > 0 or "deviates" in " ".join(c.reasons))
    ]
    counts = ", ".join(f"{n} {outcome}" for outcome, n in totals(record.cases).items())
    partial = ["partial: the run was interrupted; what was measured until then is kept"] if record.partial else []
    return [*lines, *([""] if reasons else []), *reasons, "", *partial, f"{len(record.cases)} cases: {counts}"]


def _row(c: CaseRecord, shared: str) -> tuple[str, ...]:
    return (
        c.id.removeprefix(shared),
        words.n_idle(c),
        words.term(c, "principle"),
        words.term(c, "tile_roofline"),
        words.n_max(c),
        words.interval(c),
        words.first_exit(c),
        c.kind,
        c.outcome,
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.rjust(w) if 0 < i < 7 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
    return "  ".join(cells).rstrip()
