"""How sure a number is: intervals of medians, and whether two sets of samples differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

CONFIDENCE = 0.95
LARGE = 500


@lru_cache(maxsize=4096)
def median_rank(n: int, confidence: float) -> int:
    """How many of n order statistics may be left out at each end so that the rest covers the median; 0 if none may."""
    if n > LARGE:  # The binomial is normal by then, and its smallest terms are too small for a float.
        return max(0, math.floor(n / 2 - NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(n) / 2))
    # The median lies outside with twice the binomial tail; ranks are few, so the sum is short.
    term = tail = 0.5**n
    rank = 0
    while 2 * tail <= 1 - confidence:
        rank += 1
        term *= (n - rank + 1) / rank
        tail += term
    return rank


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """A distribution-free confidence interval of the median: two order statistics, by the binomial law.

    With too few values no pair reaches the confidence (95%: five or fewer, 99.9%: ten or fewer): the interval is then
    (0, inf), which decides nothing.
    """
    ordered = sorted(values)
    n = len(ordered)
    rank = median_rank(n, confidence) if n else 0
    return (ordered[rank - 1], ordered[n - rank]) if rank else (0.0, math.inf)


def differs(before: Sequence[float], after: Sequence[float], level: float = 0.001) -> bool:
    """Whether two sets of samples come from different places, by the Mann-Whitney rank test.

    Raises ImportError without scipy (extra `stats`).
    """
    from scipy.stats import mannwhitneyu

    if len(before) < 2 or len(after) < 2:
        return False
    return bool(mannwhitneyu(before, after, alternative="two-sided").pvalue < level)
