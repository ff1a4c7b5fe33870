"""The interval of a median, and whether samples differ."""

from __future__ import annotations

import math
import random

import pytest

from pytest_nfp.curves.statistics import LARGE, differs, median_interval, median_rank


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


@pytest.mark.parametrize("confidence", [0.95, 0.999])
def test_ranks_go_on_smoothly_where_the_sum_gives_way_to_the_normal_law(confidence: float) -> None:
    """Around LARGE neither jumps; thousands of samples give an interval, not an endless sum."""
    before, after = median_rank(LARGE, confidence), median_rank(LARGE + 1, confidence)
    assert abs(after - before) <= 1
    assert 4500 < median_rank(10_000, confidence) < 5000


def test_99_9_percent_needs_eleven() -> None:
    """Ten samples decide nothing at that confidence."""
    assert median_rank(10, 0.999) == 0
    assert median_rank(11, 0.999) == 1


def test_the_rank_test_tells_a_shift_from_noise() -> None:
    """3% at 2% noise is found with 40 samples; two draws of one law differ in at most a few of 500 pairs."""
    r = random.Random(0)

    def draw(scale: float) -> list[float]:
        return [scale * r.lognormvariate(0, 0.02) for _ in range(40)]

    assert all(differs(draw(1.0), draw(1.03)) for _ in range(50))
    assert sum(differs(draw(1.0), draw(1.0)) for _ in range(500)) <= 3
    assert not differs([1.0], [2.0])
