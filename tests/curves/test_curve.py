"""Points from samples, and a curve's own boundary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp.curves.curve import Curve, make_point
from pytest_nfp.principle import Point


@given(st.lists(st.floats(0.1, 10), min_size=6, max_size=40))
def test_the_interval_holds_the_median(ratios: list[float]) -> None:
    """And the point's latency is the median of the samples."""
    p = make_point(4, ratios, ratios)
    assert p.ratio_low is not None
    assert p.ratio_high is not None
    assert p.ratio_low <= p.latency_us <= p.ratio_high
    assert p.ratio == p.latency_us


def test_a_refused_position_caps_the_boundary() -> None:
    """Four positions run, five raise: N_max is 4, known to the position, and no latency is invented."""
    points = tuple(Point(n, 100.0) for n in (1, 2, 3, 4))
    found = Curve(points, 1, "measured", "s", "k", unsupported={5: "no variant"}).boundary(0.2)
    assert found is not None
    assert (found.n_max, found.n_max_interval, found.n_first_exit, found.refused) == (4, (4, 4), 4, (5,))
    assert Curve(points[1:], 1, "measured", "s", "k").boundary(0.2) is None
