"""The HTML report: one self-contained file, offline. The verdict, what changed and the cases that matter stand in it as they are;
its script adds the table of all cases, to filter and sort, and draws a case's charts when it is opened.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from pytest_nfp.compare.changes import Pair, View, coverage, headline
from pytest_nfp.records import Record, totals
from pytest_nfp.report import charts, formatting, history, page

FIGURES = 6
"""Cases whose charts stand in the page without its script: those that matter most."""
FEW = 20
"""Of so many cases all charts stand there: a second to draw, and a page that is complete on paper."""
LISTED = 100
"""Cases that the page lists without its script, and on paper."""
URGENT = ("FAIL", "INVALID", "UNDECIDED", "UNSUPPORTED", "SKIPPED", "PASS")


@lru_cache(maxsize=1)
def environment() -> Any:
    """Jinja's, with everything escaped."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(view: View, with_history: bool = False) -> str:
    """Records as one page."""
    runs, found = view.runs, view.pairs
    first = by_urgency(found)
    script = {
        "columns": page.table(runs, found),
        "facets": page.FACETS,
        "numbers": page.COLUMNS,
        "tolerances": [r.tolerance for r in runs],
        "runs": [p.run for p in found],
        "shownRatio": charts.SHOWN_RATIO,
    }
    drawn = (f for p in first if (f := figure(p, runs[p.run].tolerance)))
    told = history.tables(runs) if with_history else []
    text: str = (
        environment()
        .get_template("report.html")
        .render(
            title=title(runs, view.against),
            runs=runs,
            names=[page.run_name(r) for r in runs],
            cases=len(found),
            totals=totals(p.case for p in found),
            headline=headline(runs, view.changes),
            changes=view.changes,
            compared=any(p.before is not None for p in found),
            coverage=coverage(view),
            tolerances=" or ".join(f"{100 * t:g}%" for t in sorted({r.tolerance for r in runs})),
            reasons=reasons(found),
            listed=first[:LISTED],
            figures=list(islice(drawn, FIGURES if len(found) > FEW else FEW)),
            against=view.against,
            history=told,
            history_svg=history.figures(told),
            words=formatting,
            table=page.plain(script),
            details=page.packed_text(page.details(found)),
            specs=page.packed(charts.compiled()),
            vega=charts.bundle(),
            script_hashes=script_hashes(),
        )
    )
    return text


SCRIPTS = ("early.js", "report.js")


@lru_cache(maxsize=1)
def script_hashes() -> str:
    """The page's scripts as its policy names them, Vega's own among them: no other runs, and none may evaluate a text."""
    texts = [environment().get_template(name).render() for name in SCRIPTS]
    digests = [hashlib.sha256(text.encode()).digest() for text in (*texts, charts.bundle_text())]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def title(runs: Sequence[Record], against: Record | None) -> str:
    """GPUs, and that it is an upgrade where two records stand side by side."""
    gpus = ", ".join(dict.fromkeys(r.gpu for r in runs))
    return f"Near-free parallelism: {gpus}" + (", before and after" if against is not None else "")


def by_urgency(found: Sequence[Pair]) -> list[Pair]:
    """What changed and what did not pass first, otherwise in the records' order."""
    return sorted(found, key=lambda p: (p.case.outcome != "FAIL", not p.is_changed, URGENT.index(p.case.outcome)))


def reasons(found: Sequence[Pair], most: int = 12) -> list[tuple[str, str, int, str]]:
    """(outcome, reason, how many cases, the first of them) of what did not pass, the most frequent first.

    A case that fails by a change of tiles or predictions alone is told of by that change.
    """
    counted: dict[tuple[str, str], list[str]] = {}
    for p in found:
        c = p.case
        worst = {q: t for q, t in c.tests.items() if t.outcome == c.outcome}
        if c.outcome == "PASS" or (c.outcome == "FAIL" and p.is_changed and worst and "boundary" not in worst):
            continue
        said = [r for t in worst.values() for r in t.reasons] or c.reasons
        counted.setdefault((c.outcome, "; ".join(dict.fromkeys(said))), []).append(c.id)
    order = sorted(counted.items(), key=lambda item: (URGENT.index(item[0][0]), -len(item[1])))
    return [(outcome, said, len(ids), ids[0]) for (outcome, said), ids in order[:most]]


def figure(pair: Pair, tolerance: float) -> dict[str, Any] | None:
    """A case's charts as SVG, with what the page says beside them; None where it has neither curve nor map."""
    import markupsafe

    curve = charts.curve_rows(pair.case, tolerance, pair.before)
    strip = charts.strip_rows(pair.before, pair.after, pair.tiles)
    if curve is None and strip is None:
        return None
    # Drawn by Vega from escaped labels: the one text that is not escaped again.
    drawn = [markupsafe.Markup(charts.svg(n, rows)) for n, rows in (("curve", curve), ("strip", strip)) if rows]  # noqa: S704
    return {"case": pair.case, "svg": drawn, "label": label(pair)}


def label(pair: Pair) -> str:
    """What a chart shows, for those who don't see it."""
    c = pair.case
    said = f"T(N) over N of {c.id}, {c.kind}" if c.curve else f"Granularity of {c.id}"
    return f"{said}: n_max {formatting.n_max(c)} {formatting.interval(c)}" if formatting.n_max(c) else said
