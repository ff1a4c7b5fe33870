"""The summary that pytest prints: one row a case, then the reasons that matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_nfp.principle.boundary import bracketed
from pytest_nfp.records import CaseRecord, Record, totals
from pytest_nfp.records.shown import shown
from pytest_nfp.report import formatting

MODELS = (
    "full model",
    "n_max",
    "composed",
    "steps",
    "limited by",
    "T error",
    "principle",
    "steps",
    "tile roofline",
    "steps",
    "T error",
    "forward ms",
    "step ms",
    "of the byte floor",
)
"""Columns for a full model: its N_max, that of the sum of its modules, and that of both predictors.

At N0: the forward and the engine's step in milliseconds, and the forward over the time that reading its bytes takes.
"""
HEADER = ("case", "N_idle", "principle", "tile roofline", "n_max", "interval", "first exit", "kind", "outcome")


def headline(record: Record) -> list[str]:
    """Three lines: what was found, what it was held to, what to do."""
    asked = [c for c in record.cases if "boundary" in c.tests] or record.cases
    outcomes = ", ".join(f"{n} {outcome}" for outcome, n in totals(asked).items())
    noun = "boundaries" if any("boundary" in c.tests for c in asked) else "cases"
    agreeing = [c.tests["boundary"].held_to for c in asked if "boundary" in c.tests]
    counts = {
        name: sum(name in names for names in agreeing) for name in dict.fromkeys(n for names in agreeing for n in names)
    }
    agreed = ", ".join(f"{name} ({n} agree)" for name, n in counts.items())
    return [
        f"found: {len(asked)} {noun} on {record.machine.get('title', record.gpu)}: {outcomes}",
        f"held to: {agreed or 'nothing that a boundary agrees with'}",
        f"to do: {_to_do(asked)}",
    ]


def _to_do(cases: Sequence[CaseRecord]) -> str:
    """What a reader does about the worst outcome."""
    counts = totals(cases)
    if failed := counts.get("FAIL", 0) + counts.get("INVALID", 0):
        return f"read the reasons of the {failed} that FAIL or are INVALID, below"
    if undecided := counts.get("UNDECIDED", 0):
        return (
            f"nothing failed; --nfp-update=missing stores the {undecided} UNDECIDED as baselines, where their boundary is sure,"
            " and later runs are held to them"
        )
    return "nothing"


def summary_lines(record: Record, verbosity: int = 0) -> list[str]:
    """Lines of the summary. Reasons of passed and skipped cases are shown with -v, or where they name a deviation."""
    record = shown(record)
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
    models = _models(record, shared)
    return [
        *lines,
        *([""] if models else []),
        *models,
        *([""] if reasons else []),
        *reasons,
        "",
        *partial,
        f"{len(record.cases)} cases: {counts}",
    ]


def _models(record: Record, shared: str) -> list[str]:
    """A table of the full models whose modules were measured too; empty where there is none."""
    rows = [(c, c.composed) for c in record.cases if c.composed is not None and "n_max" in c.composed and c.curve]
    if not rows:
        return []
    lines: list[tuple[str, ...]] = [MODELS]
    for c, composed in rows:
        base = c.baseline_positions or 1
        forward = dict(c.curve)[base]
        step = c.steps.get(base)
        lines.append(
            (
                c.id.removeprefix(shared),
                formatting.interval(c),
                bracketed(composed["n_max_interval"]),
                str(composed["steps"]),
                composed["limiting"],
                f"{composed['error']:.0%}",
                *_beside(c, composed.get("predicted", {})),
                f"{forward / 1e3:.1f}",
                f"{step / 1e3:.1f}" if step is not None else "",
                f"{forward / c.floor_us:.1f}x" if c.floor_us else "",
            )
        )
    widths = [max(len(r[i]) for r in lines) for i in range(len(MODELS))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in lines]


def _beside(c: CaseRecord, predicted: dict[str, Any]) -> tuple[str, str, str, str, str]:
    """Both predictors' N_max, each with its steps from the measured N_max, then the tile roofline's error of T.

    A cell is empty where its number is missing.
    """
    steps = predicted.get("steps", {})
    error = f"{predicted['error']:.0%}" if "error" in predicted else ""
    return (
        formatting.term(c, "principle"),
        str(steps.get("principle", "")),
        formatting.term(c, "tile_roofline"),
        str(steps.get("tile_roofline", "")),
        error,
    )


def _row(c: CaseRecord, shared: str) -> tuple[str, ...]:
    return (
        c.id.removeprefix(shared),
        formatting.n_idle(c),
        formatting.term(c, "principle"),
        formatting.term(c, "tile_roofline"),
        formatting.n_max(c),
        formatting.interval(c),
        formatting.first_exit(c),
        c.kind,
        c.outcome,
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.rjust(w) if 0 < i < 7 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
    return "  ".join(cells).rstrip()
