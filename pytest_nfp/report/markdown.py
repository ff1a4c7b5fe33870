"""A report as Markdown, for a pull request or a CI step's summary: verdict, changes, and the cases that matter."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from pytest_nfp.compare.changes import Pair, View, coverage, headline
from pytest_nfp.records import Record, totals
from pytest_nfp.report import formatting
from pytest_nfp.report.html import by_urgency, reasons, title

LISTED = 50
"""How many cases and how many changes the text lists. A pull request can't show thousands."""
_ACTIVE = re.compile(r"([\\`*_\[\]()#|~!+-])")

_LIVE = re.compile(r"([@#$:]|www)(?=\S)")


def escaped(text: object) -> str:
    """Text that Markdown shows as it is, without markup and without the end of a table cell.

    A forge turns some plain text into mentions, references, addresses, formulas or emoji. An invisible comment
    prevents that.
    """
    return _LIVE.sub(r"\1<!-- -->", _ACTIVE.sub(r"\\\1", html.escape(str(text), quote=False)))


def markdown(view: View) -> str:
    """The whole report as Markdown."""
    runs, case_pairs, changed = view.runs, view.pairs, view.changes
    counts = ", ".join(f"{n} {outcome}" for outcome, n in totals(p.case for p in case_pairs).items())
    lines = [f"## {escaped(title(runs, view.against))}", "", f"**{escaped(headline(runs, changed))}** {counts}.", ""]
    lines += [
        f"- **{'Matters' if c.matters else 'Moves nothing'}** {escaped(c.where)}: {escaped(c.what)}; {escaped(c.effect)}"
        for c in changed[:LISTED]
    ]
    if sentence := coverage(view):
        lines.append(f"- {escaped(sentence)}")
    if len(changed) > LISTED:
        lines.append(f"- and {len(changed) - LISTED} more changes")
    for outcome, sentence, n, first in reasons(case_pairs):
        others = f" and {n - 1} more" if n > 1 else ""
        lines.append(f"- {outcome} {escaped(first)}{others}: {escaped(sentence)}")
    if case_pairs:
        lines += ["", *_table(by_urgency(case_pairs))]
    lines += ["", *(_run(r) for r in runs), ""]
    return "\n".join(lines)


def _table(found: Sequence[Pair]) -> list[str]:
    lines = [
        "| case | outcome | kind | n_max | interval | before | principle | tile roofline |",
        "| --- | --- | --- | ---: | --- | --- | --- | --- |",
    ]
    for p in found[:LISTED]:
        c = p.case
        n_max_before = p.before.n_max if p.before is not None else None
        cells = (
            c.id,
            c.outcome,
            c.kind,
            formatting.n_max(c),
            formatting.interval(c),
            n_max_before if n_max_before is not None else "",
        )
        predictions = (formatting.term(c, "principle"), formatting.term(c, "tile_roofline"))
        lines.append("| " + " | ".join(escaped(cell) for cell in (*cells, *predictions)) + " |")
    if len(found) > LISTED:
        lines += ["", f"{len(found) - LISTED} more cases stand in the HTML report."]
    return lines


def _run(record: Record) -> str:
    partial = ", interrupted" if record.partial else ""
    machine = record.machine.get("title", "")
    return f"{escaped(record.gpu)}: {escaped(machine)}; {escaped(record.tool)}, {escaped(record.started)}{partial}  "
