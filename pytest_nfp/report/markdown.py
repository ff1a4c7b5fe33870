"""A report as Markdown, for a pull request or a CI step's summary: the verdict, what changed, and the cases that matter."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from pytest_nfp.compare.changes import Pair, View, coverage, headline
from pytest_nfp.records import Record, totals
from pytest_nfp.report import formatting
from pytest_nfp.report.html import by_urgency, reasons, title

LISTED = 50
"""Cases of a table: a pull request shows no thousand of them."""
_ACTIVE = re.compile(r"([\\`*_\[\]()#|~!+-])")

_LIVE = re.compile(r"([@#$:]|www)(?=\S)")


def escaped(text: object) -> str:
    """Text that Markdown shows as it is: no markup and no cell's end. What a forge makes of plain text (mentions, references, addresses,
    formulas, emoji) is undone by a comment, which nobody sees.
    """
    return _LIVE.sub(r"\1<!-- -->", _ACTIVE.sub(r"\\\1", html.escape(str(text), quote=False)))


def markdown(view: View) -> str:
    """The whole text."""
    runs, found, changed = view.runs, view.pairs, view.changes
    counts = ", ".join(f"{n} {outcome}" for outcome, n in totals(p.case for p in found).items())
    lines = [f"## {escaped(title(runs, view.against))}", "", f"**{escaped(headline(runs, changed))}** {counts}.", ""]
    lines += [
        f"- **{'Matters' if c.matters else 'Moves nothing'}** {escaped(c.where)}: {escaped(c.what)}; {escaped(c.effect)}"
        for c in changed[:LISTED]
    ]
    if said := coverage(view):
        lines.append(f"- {escaped(said)}")
    if len(changed) > LISTED:
        lines.append(f"- and {len(changed) - LISTED} more changes")
    for outcome, said, n, first in reasons(found):
        more = f" and {n - 1} more" if n > 1 else ""
        lines.append(f"- {outcome} {escaped(first)}{more}: {escaped(said)}")
    if found:
        lines += ["", *_table(by_urgency(found))]
    lines += ["", *(_run(r) for r in runs), ""]
    return "\n".join(lines)


def _table(found: Sequence[Pair]) -> list[str]:
    lines = [
        "| case | outcome | kind | n_max | interval | before | principle | tile roofline |",
        "| --- | --- | --- | ---: | --- | --- | --- | --- |",
    ]
    for p in found[:LISTED]:
        c = p.case
        was = p.before.n_max if p.before is not None else None
        cells = (c.id, c.outcome, c.kind, formatting.n_max(c), formatting.interval(c), was if was is not None else "")
        predictions = (formatting.term(c, "principle"), formatting.term(c, "tile_roofline"))
        lines.append("| " + " | ".join(escaped(cell) for cell in (*cells, *predictions)) + " |")
    if len(found) > LISTED:
        lines += ["", f"{len(found) - LISTED} more cases stand in the HTML report."]
    return lines


def _run(record: Record) -> str:
    partial = ", interrupted" if record.partial else ""
    machine = record.machine.get("title", "")
    return f"{escaped(record.gpu)}: {escaped(machine)}; {escaped(record.tool)}, {escaped(record.started)}{partial}  "
