"""The interval of a median, and points from samples."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp.measure.curve import make_point, median_interval


@pytest.mark.parametrize(("n", "rank"), [(6, 0), (8, 0), (9, 1), (12, 2), (20, 5)])
def test_the_order_statistics_of_the_binomial_law(n: int, rank: int) -> None:
    """The ranks of the tables: for n = 20 the 6th and the 15th value bound the median at 95%."""
    assert median_interval(list(range(n))) == (rank, n - 1 - rank)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_too_few_samples_decide_nothing(n: int) -> None:
    """With five values no pair reaches 95%."""
    assert median_interval([1.0] * n) == (0.0, math.inf)


def test_coverage_is_at_least_the_confidence() -> None:
    """Of 2000 draws of a skewed law, at least 94% of the intervals hold the true median."""
    r = random.Random(1)
    for n in (8, 13, 20):
        hits = 0
        for _ in range(2000):
            low, high = median_interval([r.expovariate(1) for _ in range(n)])
            hits += low <= math.log(2) <= high
        assert hits / 2000 > 0.94


@given(st.lists(st.floats(0.1, 10), min_size=6, max_size=40))
def test_the_interval_holds_the_median(ratios: list[float]) -> None:
    """And the point's latency is the median of the samples."""
    p = make_point(4, ratios, ratios)
    assert p.ratio_low is not None
    assert p.ratio_high is not None
    assert p.ratio_low <= p.latency_us <= p.ratio_high
