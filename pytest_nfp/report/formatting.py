"""A record's numbers as text, the same in every report."""

from __future__ import annotations

from pytest_nfp.compare.changes import Pair
from pytest_nfp.granularity import tiles_in_words
from pytest_nfp.principle.boundary import bracketed
from pytest_nfp.records import CaseRecord


def n_idle(case: CaseRecord) -> str:
    """N_idle as a whole number of positions; "unbounded" where idle compute sets no bound."""
    if case.n_idle is None:
        return "unbounded" if case.n_idle_unbounded else ""
    return f"{case.n_idle:.0f}"


def term(case: CaseRecord, predictor: str) -> str:
    """`64 attention`: a predictor's N_max and its limiting module."""
    if case.predicted is None or predictor not in case.predicted:
        return ""
    return f"{case.predicted[predictor]['n_max']} {case.predicted[predictor]['limiting']}"


def n_max(case: CaseRecord) -> str:
    """The curve's N_max; empty without a curve, so that a prediction never appears as a measurement."""
    return str(case.n_max) if case.curve and case.n_max is not None else ""


def interval(case: CaseRecord) -> str:
    """The interval of N_max: `[256, 319]`, or `[64, ..]` where the curve ends within the tolerance."""
    if case.n_max_interval is None:
        return ""
    return bracketed(case.n_max_interval)


def first_exit(case: CaseRecord) -> str:
    """The case's n_first_exit; empty without one."""
    return str(case.n_first_exit) if case.n_first_exit is not None else ""


def changes(pair: Pair) -> list[str]:
    """What differs from before, one text a difference; empty where there is nothing to compare with."""
    sentences = []
    if pair.kernel:
        sentences.append(f"kernel: {pair.kernel[0]} to {pair.kernel[1]}")
    if pair.tiles:
        sentences.append(f"tiles: {tiles_in_words(pair.tiles, pair.after.tiles[-1][1])}")
    sentences += [f"N_max ({kind}): {old} to {new}" for kind, old, new in pair.n_max]
    return sentences
