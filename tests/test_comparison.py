"""One rule for "is it the same as before": intervals, clocks, predictions and maps, and that every tool asks it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pytest_nfp import catalog
from pytest_nfp.baselines import CaseBaseline, Measured
from pytest_nfp.cases import Backend, expand
from pytest_nfp.compare.changes import pairs
from pytest_nfp.compare.one_curve import compare_records
from pytest_nfp.comparison import (
    KnownBoundary,
    KnownMap,
    compare_boundaries,
    compare_intervals,
    compare_maps,
    moved_predictions,
    slack,
)
from pytest_nfp.curves.curve import Curve
from pytest_nfp.principle import Boundary, Point
from pytest_nfp.records import SCHEMA, CaseRecord, Record
from pytest_nfp.report.history import tables
from pytest_nfp.verdict import Evidence, judge_boundary

CASE = next(expand("h20", Backend("vllm", "0.33.0"), "dense", catalog.model("qwen3-8b")))
NONE: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("interval", "expected", "positions", "granule", "noisy", "found"),
    [
        ((256, 319), (256, 256), NONE, 1, False, "same"),
        ((512, 767), (32, 32), NONE, 32, False, "moved"),
        ((1, 1), (3, 3), NONE, 1, False, "moved"),
        ((2, 2), (3, 3), NONE, 1, False, "same"),
        ((64, None), (32, 32), NONE, 16, False, "moved"),
        ((64, None), (100, None), NONE, 1, False, "same"),
        # Noise made the interval wide: meeting is not enough.
        ((2, 7), (4, 4), NONE, 1, True, "undecided"),
        ((3, 5), (4, 4), NONE, 1, True, "same"),
        ((6, 9), (4, 4), NONE, 1, True, "moved"),
        # One sweep step around the expected end.
        ((90, 90), (64, 64), (64, 96, 128), 1, False, "same"),
        ((97, 97), (64, 64), (64, 96, 128), 1, False, "moved"),
    ],
)
def test_meeting_lying_inside_and_missing(
    interval: tuple[int, int | None],
    expected: tuple[int, int | None],
    positions: tuple[int, ...],
    granule: int,
    noisy: bool,
    found: str,
) -> None:
    """A grid's interval is the same by meeting; a noisy one must lie inside to be the same and miss entirely to have moved."""
    assert compare_intervals(expected, interval, positions, granule, 0.15, noisy) == found


def test_the_slack_is_the_largest_of_three() -> None:
    """One sweep step, one granule, a share of the boundary."""
    assert slack(200, range(0, 400, 8), 1, 0.15) == 30
    assert slack(20, range(0, 400, 8), 1, 0.15) == 8
    assert slack(20, (), 32, 0.15) == 32


def boundary(n: int, high: int | None, timer: str = "cuda-graph", kind: str = "measured") -> KnownBoundary:
    """A boundary [n, high]."""
    return KnownBoundary(n, (n, high), kind, timer)


@pytest.mark.parametrize(
    ("before", "after", "answer"),
    [
        # The three rows that three tools answered in three ways.
        (boundary(24, 84), boundary(96, 99), "same"),  # 12 apart, 15% of 84 is 12.6
        (boundary(80, 100), boundary(116, 119), "moved"),  # 16 apart, 15% of 100 is 15
        (boundary(64, 64), boundary(64, 64, timer=""), "undecided"),
        (boundary(64, 64, timer=""), boundary(64, 64, timer=""), "undecided"),
        (boundary(64, 64), boundary(64, 64, timer="cuda-events"), "undecided"),
        (boundary(64, 64, "", "recorded"), boundary(64, 64), "undecided"),
        (boundary(64, 64, "", "recorded"), boundary(64, 64, "", "recorded"), "same"),
    ],
)
def test_clocks_and_one_slack_decide(before: KnownBoundary, after: KnownBoundary, answer: str) -> None:
    """The tolerance is that of the earlier interval's last N, both ways; a clock that one side lacks is unknown."""
    assert compare_boundaries(before, after, 1, 0.15).answer == answer


GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 116, 128, 192, 256)


@st.composite
def sides(draw: st.DrawFn) -> dict[str, Any]:
    """One side: N_max and its interval on the grid, the clock, and whether noise left N open."""
    low = draw(st.sampled_from(GRID))
    n = draw(st.sampled_from([g for g in GRID if g >= low]))
    high = draw(st.sampled_from([None, *(g for g in range(n, 300))]))
    kind = draw(st.sampled_from(["measured", "recorded"]))
    timer = draw(st.sampled_from(["", "cuda-graph", "cuda-events"])) if kind == "measured" else ""
    return {"n": n, "interval": (low, high), "kind": kind, "timer": timer, "noisy": draw(st.booleans())}


def side(low: int, high: int | None, timer: str = "cuda-graph") -> dict[str, Any]:
    """A measured side without noise."""
    return {"n": low, "interval": (low, high), "kind": "measured", "timer": timer, "noisy": False}


def record_of(s: dict[str, Any], release: str) -> Record:
    """A record of one case with this boundary: what is open by noise straddles the limit."""
    low, high = s["interval"]
    open_at = next((n for n in GRID if n > low and (high is None or n <= high)), None)
    ratios = [(open_at, 1.1, 1.3)] if s["noisy"] and open_at is not None else []
    found = CaseRecord(
        id=f"h20-vllm=={release}-qwen3-8b-{CASE.key}",
        gpu="h20",
        backend=f"vllm=={release}",
        module="dense",
        subject="qwen3-8b",
        workload=CASE.key,
        kind=s["kind"],
        outcome="PASS",
        n_max=s["n"],
        n_max_interval=s["interval"],
        baseline_positions=1,
        curve=[(n, 10.0) for n in GRID],
        ratios=ratios,
        timer=s["timer"],
    )
    return Record(
        schema=SCHEMA,
        tool="test",
        gpu="h20",
        started=f"2026-01-0{release[-1]}T00:00:00Z",
        partial=False,
        tolerance=0.2,
        match_tolerance=0.15,
        protocol="adaptive",
        seed=0,
        machine={},
        cases=[found],
    )


def gate(before: dict[str, Any], after: dict[str, Any]) -> str:
    """What the gate says of `after` held to `before` as its baseline, which has no noise."""
    low, high = after["interval"]
    is_open = after["noisy"] and any(n > low and (high is None or n <= high) for n in GRID)
    found = Boundary(after["n"], after["interval"], after["n"], (low + 1,) if is_open else (), 1)
    kind = "recorded" if after["kind"] == "recorded" else "measured"
    points = tuple(Point(n, 10.0) for n in GRID)
    curve = Curve(points, 1, kind, "", "", timer=after["timer"])
    stored = Measured(
        kind=before["kind"],
        n_max=before["n"],
        interval=before["interval"],
        n_first_exit=before["n"],
        prediction="agrees",
        source="",
        kernel="",
        timer=before["timer"],
        curve=[(n, 10.0) for n in GRID],
    )
    baseline = CaseBaseline(baseline_positions=1, measured=stored)
    verdict = judge_boundary(Evidence(CASE, curve, found, baseline=baseline))
    return {"PASS": "same", "FAIL": "moved", "UNDECIDED": "undecided"}[verdict.outcome]


@settings(max_examples=10_000, deadline=None)
@given(sides(), sides())
@example(side(24, 84), side(96, 99))
@example(side(80, 100), side(116, 119))
@example(side(64, 64), side(64, 64, ""))
def test_gate_compare_and_report_give_one_answer(before: dict[str, Any], after: dict[str, Any]) -> None:
    """The gate against a baseline, `nfp compare` and the report of the same two boundaries."""
    before = before | {"noisy": False}
    old, new = record_of(before, "0.1"), record_of(after, "0.2")
    [compared], _ = compare_records(old, new)
    told = {"PASS": "same", "FAIL": "moved", "UNDECIDED": "undecided"}[compared.outcome]
    [pair] = pairs([new], old)
    shown = "moved" if pair.n_max else "undecided" if pair.undecided else "same"
    assert gate(before, after) == told == shown
    if before["kind"] == after["kind"]:
        [row] = [r for t in tables([old, new]) for r in t["rows"]]
        assert row["changed"] == (told == "moved")


def test_predictions_move_where_one_lies_outside_the_other() -> None:
    """Without an interval any difference is a move; a predictor that one side lacks says nothing."""
    wide, near, far = ({"n_max": n, "interval": [n // 2, 2 * n]} for n in (64, 96, 256))
    assert moved_predictions({"tile_roofline": wide}, {"tile_roofline": near}) == []
    assert moved_predictions({"tile_roofline": wide}, {"tile_roofline": far, "principle": {"n_max": 3}}) == [
        "tile_roofline"
    ]
    assert moved_predictions({"principle": {"n_max": 4}}, {"principle": {"n_max": 3}}) == ["principle"]
    assert moved_predictions(None, {"principle": {"n_max": 3}}) == []


TILES = [[1, 64, 16], [65, 4096, 64]]
WIDER = [[1, 64, 32], [65, 4096, 64]]


@pytest.mark.parametrize(
    ("before", "after", "answer", "said"),
    [
        (KnownMap("triton", TILES), KnownMap("triton", TILES), "same", ""),
        (KnownMap("triton", TILES), KnownMap("triton", WIDER), "moved", ""),
        (KnownMap("triton", TILES), KnownMap("marlin", TILES), "moved", ""),
        (
            KnownMap("triton", TILES),
            KnownMap("unknown", WIDER, why="no stub"),
            "undecided",
            "unknown now (now: no stub)",
        ),
        (KnownMap("unknown", TILES), KnownMap("triton", TILES), "undecided", "unknown before"),
        (KnownMap("unknown", TILES), KnownMap("unknown", TILES), "undecided", "unknown before and now"),
        (KnownMap("unknown", TILES, "a"), KnownMap("unknown", TILES, "a"), "same", ""),
        (KnownMap("unknown", TILES, "a"), KnownMap("unknown", WIDER, "a"), "moved", ""),
        (
            KnownMap("unknown", TILES, "a", (("f.py: choose", "1"), ("f.py: same", "2"))),
            KnownMap("unknown", TILES, "b", (("f.py: choose", "3"), ("f.py: same", "2"))),
            "undecided",
            "the code that chooses it differs in choose",
        ),
    ],
)
def test_an_unknown_kernel_is_never_the_same(before: KnownMap, after: KnownMap, answer: str, said: str) -> None:
    """Unless the same code chooses it on both sides; then the tiles decide."""
    found = compare_maps(before, after)
    assert found.answer == answer
    assert said in found.unknown and bool(said) == bool(found.unknown)
    if found.unknown:
        assert found.tiles == () and found.kernel is None
