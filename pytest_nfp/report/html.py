"""The HTML report: one self-contained file that works offline.

The verdict, the changes and the cases that matter are plain HTML. The page's script adds the table of all cases, which
can be filtered and sorted, and draws the charts of a case when a reader opens it.
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
"""Cases whose charts are in the page without its script: those that matter most."""
FEW = 20
"""With at most this many cases, the page has all charts. They take a second to draw, and a print is complete."""
LISTED = 100
"""Cases that the page lists without its script, and on paper."""
URGENT = ("FAIL", "INVALID", "UNDECIDED", "UNSUPPORTED", "SKIPPED", "PASS")


@lru_cache(maxsize=1)
def environment() -> Any:
    """The Jinja environment of the templates. Everything is escaped."""
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
    runs, case_pairs = view.runs, view.pairs
    ordered = by_urgency(case_pairs)
    script = {
        "columns": page.table(runs, case_pairs),
        "facets": page.FACETS,
        "numbers": page.COLUMNS,
        "tolerances": [r.tolerance for r in runs],
        "runs": [p.run for p in case_pairs],
        "shownRatio": charts.SHOWN_RATIO,
    }
    drawn = (f for p in ordered if (f := figure(p, runs[p.run].tolerance)))
    history_tables = history.tables(runs) if with_history else []
    text: str = (
        environment()
        .get_template("report.html")
        .render(
            title=title(runs, view.against),
            runs=runs,
            names=[page.run_name(r) for r in runs],
            cases=len(case_pairs),
            totals=totals(p.case for p in case_pairs),
            headline=headline(runs, view.changes),
            changes=view.changes,
            compared=any(p.before is not None for p in case_pairs),
            coverage=coverage(view),
            tolerances=" or ".join(f"{100 * t:g}%" for t in sorted({r.tolerance for r in runs})),
            reasons=reasons(case_pairs),
            listed=ordered[:LISTED],
            figures=list(islice(drawn, FIGURES if len(case_pairs) > FEW else FEW)),
            against=view.against,
            history=history_tables,
            history_svg=history.figures(history_tables),
            words=formatting,
            table=page.plain(script),
            details=page.packed_text(page.details(case_pairs)),
            specs=page.packed(charts.compiled()),
            vega=charts.bundle(),
            script_hashes=script_hashes(),
        )
    )
    return text


SCRIPTS = ("early.js", "report.js")


@lru_cache(maxsize=1)
def script_hashes() -> str:
    """Hashes of the page's scripts, Vega's included, for its policy. No other script runs; none may evaluate text."""
    texts = [environment().get_template(name).render() for name in SCRIPTS]
    digests = [hashlib.sha256(text.encode()).digest() for text in (*texts, charts.bundle_text())]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


def title(runs: Sequence[Record], against: Record | None) -> str:
    """The title: the GPUs, with "before and after" where an earlier record is compared."""
    gpus = ", ".join(dict.fromkeys(r.gpu for r in runs))
    return f"Near-free parallelism: {gpus}" + (", before and after" if against is not None else "")


def by_urgency(found: Sequence[Pair]) -> list[Pair]:
    """Failed cases first, then changed ones, then by outcome; otherwise in the order of the records."""
    return sorted(found, key=lambda p: (p.case.outcome != "FAIL", not p.is_changed, URGENT.index(p.case.outcome)))


def reasons(found: Sequence[Pair], most: int = 12) -> list[tuple[str, str, int, str]]:
    """(outcome, reason, number of cases, id of the first) of the cases that did not pass: by outcome, then by number.

    A case that fails only by a change of tiles or predictions is left out, as the list of changes names it.
    """
    counted: dict[tuple[str, str], list[str]] = {}
    for p in found:
        c = p.case
        worst = {q: t for q, t in c.tests.items() if t.outcome == c.outcome}
        if c.outcome == "PASS" or (c.outcome == "FAIL" and p.is_changed and worst and "boundary" not in worst):
            continue
        why = [r for t in worst.values() for r in t.reasons] or c.reasons
        counted.setdefault((c.outcome, "; ".join(dict.fromkeys(why))), []).append(c.id)
    order = sorted(counted.items(), key=lambda item: (URGENT.index(item[0][0]), -len(item[1])))
    return [(outcome, why, len(ids), ids[0]) for (outcome, why), ids in order[:most]]


def figure(pair: Pair, tolerance: float) -> dict[str, Any] | None:
    """A case's charts as SVG, with the case and a label; None where it has neither curve nor map."""
    import markupsafe

    curve = charts.curve_rows(pair.case, tolerance, pair.before)
    strip = charts.strip_rows(pair.before, pair.after, pair.tiles)
    if curve is None and strip is None:
        return None
    # Vega escapes the labels itself, so the template does not escape the SVG again.
    drawn = [markupsafe.Markup(charts.svg(n, rows)) for n, rows in (("curve", curve), ("strip", strip)) if rows]  # noqa: S704
    return {"case": pair.case, "svg": drawn, "label": label(pair)}


def label(pair: Pair) -> str:
    """What a chart shows, in words, for readers who can't see it."""
    c = pair.case
    description = f"T(N) over N of {c.id}, {c.kind}" if c.curve else f"Granularity of {c.id}"
    return (
        f"{description}: n_max {formatting.n_max(c)} {formatting.interval(c)}" if formatting.n_max(c) else description
    )
