"""N_max from a curve: both readings, holes, intervals, tolerance."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp.principle import Point, find_boundary, sensitivity


def points(**curve: float) -> list[Point]:
    return [Point(int(n[1:]), us) for n, us in curve.items()]


def test_the_largest_n_within_and_the_first_exit_differ_on_a_hole() -> None:
    """FP8 GEMM 65536 x 4096 on H200 (a published curve): 81 at 128, 165 at 129, 99 at 256, 369 at 257."""
    b = find_boundary(points(n128=81, n129=165, n192=97, n256=99, n257=369), 0.25, 128)
    assert (b.n_max, b.n_first_exit, b.has_hole) == (256, 128, True)


def test_a_coarse_grid_gives_an_interval() -> None:
    """Published dense Q8 curve, 31.0/36.2/42.3 ms at 1/2/4: N_max is 2 or 3, as 3 was not measured."""
    b = find_boundary(points(n1=31.0, n2=36.2, n4=42.3, n8=68.7, n9=106.9))
    assert (b.n_max, b.n_max_interval) == (2, (2, 3))


def test_a_curve_that_ends_within_gives_a_lower_bound() -> None:
    """The end of the grid is not a boundary."""
    assert find_boundary(points(n1=10, n2=10, n4=11)).n_max_interval == (4, None)


def test_an_undecided_point_widens_the_interval() -> None:
    """N = 4 straddles the limit: N_max is at least 2 and below 8."""
    curve = [Point(1, 10, 1, 1), Point(2, 10.5, 1.0, 1.1), Point(4, 11.9, 1.1, 1.3), Point(8, 20, 1.9, 2.1)]
    b = find_boundary(curve)
    assert (b.n_max, b.n_max_interval, b.undecided) == (4, (2, 7), (4,))


def test_exactly_at_the_tolerance_is_within() -> None:
    """T(N) <= (1 + tolerance) T(N0), whatever binary fractions make of 1.2."""
    assert find_boundary(points(n1=0.1, n2=0.1 * 1.2, n3=0.13)).n_max == 2


def test_points_below_n0_take_no_part() -> None:
    """Under balanced routing T(1) is cheap because few experts are read: it is not the baseline."""
    assert find_boundary(points(n1=2, n32=10, n64=11, n128=30), baseline_positions=32).n_max == 64


def test_sensitivity_covers_the_papers_tolerances() -> None:
    """0.05 to 0.30, and a larger tolerance never gives a smaller N_max."""
    found = sensitivity(points(n1=100, n2=104, n4=112, n8=118, n16=127, n32=140))
    assert [b.n_max for b in found.values()] == [2, 2, 4, 8, 8, 16]
    assert (min(found), max(found)) == (0.05, 0.30)


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        ([Point(2, 1.0)], "no point at N0 = 1"),
        ([Point(1, 0.0)], "T\\(1\\) must be finite and above 0"),
        ([Point(1, 1.0), Point(2, math.nan)], "T\\(2\\)"),
        ([Point(1, 1.0), Point(1, 2.0)], "two points at N = 1"),
    ],
)
def test_a_curve_that_cannot_be_read_says_why(curve: list[Point], message: str) -> None:
    """No NaN in, no boundary out."""
    with pytest.raises(ValueError, match=message):
        find_boundary(curve)


curves = st.lists(st.floats(0.1, 100), min_size=1, max_size=30).map(
    lambda us: [Point(n, t) for n, t in enumerate(us, 1)]
)


@given(curves, st.floats(0, 1))
def test_readings_are_ordered_and_inside_the_interval(curve: list[Point], tolerance: float) -> None:
    """1 <= first exit <= n_max <= end; without gaps or noise the interval holds n_max."""
    b = find_boundary(curve, tolerance)
    low, high = b.n_max_interval
    assert 1 <= b.n_first_exit <= b.n_max <= len(curve)
    assert low == b.n_max
    assert high is None or high == b.n_max


@given(curves, st.floats(0.01, 100))
def test_the_unit_of_time_does_not_matter(curve: list[Point], scale: float) -> None:
    """N_max depends on ratios alone."""
    scaled = [Point(p.positions, p.latency_us * scale) for p in curve]
    # A ratio within an ulp of the limit may fall to either side: leave those curves out.
    base = curve[0].latency_us
    if all(abs(p.latency_us / base - 1.2) > 1e-9 for p in curve):
        assert find_boundary(scaled).n_max == find_boundary(curve).n_max
