"""A boundary interval held to an expectation, both ways."""

from __future__ import annotations

import pytest

from pytest_nfp.principle.agreement import compare, match_slack


@pytest.mark.parametrize(
    ("interval", "expected", "slack", "decided", "found"),
    [
        ((256, 319), (256, 256), 0, True, "agrees"),
        ((512, 767), (32, 32), 32, True, "differs"),
        ((1, 1), (3, 3), 1, True, "differs"),
        ((2, 2), (3, 3), 1, True, "agrees"),
        ((64, None), (32, 32), 16, True, "differs"),
        ((64, None), (100, None), 0, True, "agrees"),
        # Noise made the interval wide: meeting is not enough.
        ((2, 7), (4, 4), 1, False, "undecided"),
        ((3, 5), (4, 4), 1, False, "agrees"),
        ((6, 9), (4, 4), 1, False, "differs"),
    ],
)
def test_meeting_lying_inside_and_missing(
    interval: tuple[int, int | None], expected: tuple[int, int | None], slack: float, decided: bool, found: str
) -> None:
    """A grid's interval agrees by meeting; a noisy one must lie inside to agree and miss entirely to differ."""
    assert compare(interval, *expected, slack, decided) == found


def test_the_slack_is_the_largest_of_three() -> None:
    """One sweep step, one granule, a share of the value."""
    assert match_slack(200, 8, 1, 0.15) == 30
    assert match_slack(20, 8, 1, 0.15) == 8
    assert match_slack(20, 1, 32, 0.15) == 32
