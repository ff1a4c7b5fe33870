"""Plateaus with their sweet spots, and cliffs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp.principle import Point
from pytest_nfp.principle.plateaus import FLAT, Plateau, cliffs, plateaus
from pytest_nfp.testing import roofline, staircase


def curve(latency: object, *positions: int) -> list[Point]:
    return [Point(n, latency(n)) for n in positions]  # type: ignore[operator]


def test_a_staircase_is_its_steps() -> None:
    """Each step is a plateau whose last N is the sweet spot; each edge a cliff."""
    points = curve(staircase(16, 0.5), *range(1, 49))
    assert plateaus(points) == [Plateau(1, 16, 100.0), Plateau(17, 32, 150.0), Plateau(33, 48, 200.0)]
    assert cliffs(points) == [(16, 17, 1.5), (32, 33, pytest.approx(4 / 3))]


def test_a_slope_has_neither() -> None:
    """Latency that grows as N does, whatever the gaps between the measured N, is growth, not a cliff."""
    points = curve(roofline(1, 100), 6, 7, 8, 10, 13, 16)
    assert plateaus(points) == []
    assert cliffs(points) == []


def test_a_cliff_then_a_plateau() -> None:
    """22.8 times at two positions, and flat from there whatever N: one cliff, one plateau."""
    points = [Point(1, 61.0), Point(2, 1391.0), Point(4, 1400.0), Point(8, 1410.0)]
    assert plateaus(points) == [Plateau(2, 8, 1400.0)]
    assert [(a, b) for a, b, _ in cliffs(points)] == [(1, 2)]


@given(st.dictionaries(st.integers(1, 500), st.floats(1, 1e4), min_size=1, max_size=40))
def test_plateaus_are_flat_and_do_not_overlap(latencies: dict[int, float]) -> None:
    """Whatever the curve."""
    found = plateaus([Point(n, t) for n, t in latencies.items()])
    for p in found:
        inside = [latencies[n] for n in sorted(latencies) if p.first <= n <= p.last]
        assert all(abs(t / inside[0] - 1) <= FLAT for t in inside)
        assert len(inside) > 1
    assert all(a.last < b.first for a, b in pairwise(found))
