"""Whether a boundary known as an interval agrees with one number, within the match tolerance, both ways."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Literal

Agreement = Literal["agrees", "differs", "undecided"]


def match_slack(value: float, step: int, granule: int, match_tolerance: float) -> float:
    """The match tolerance in positions: the largest of one sweep step, one granule and a share of the value."""
    return max(step, granule, match_tolerance * value)


def sweep_step(positions: Iterable[int], at: float) -> int:
    """The gap of the measured N around a value: one sweep step; 1 past their end."""
    return next((b - a for a, b in pairwise(sorted(positions)) if b > at), 1)


def compare(interval: tuple[int, int | None], low: float, high: float | None, slack: float, decided: bool) -> Agreement:
    """Hold a measured interval to the expected [low, high] (high None: at least), widened by slack both ways.

    decided: the interval's width comes from the grid alone, so meeting is agreeing. Where noise made it wide, it must
    lie inside to agree and miss entirely to differ.
    """
    first, last = interval
    expected_low = low - slack
    expected_high = float("inf") if high is None else high + slack
    measured_high = float("inf") if last is None else last
    if measured_high < expected_low or first > expected_high:
        return "differs"
    if decided or (first >= expected_low and measured_high <= expected_high):
        return "agrees"
    return "undecided"
