"""A sweep finds a known boundary, says when it can't, and survives what goes wrong."""

from __future__ import annotations

import pytest

from pytest_nfp.measure import PROTOCOLS, sweep
from pytest_nfp.measure.protocol import Protocol
from pytest_nfp.measure.sweep import Interrupted
from pytest_nfp.principle import find_boundary

from .fakes import FakeDevice, staircase

GRID = [1, 2, 4, 8, 15, 16, 17, 32, 33]


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
def test_a_staircase_is_found_through_noise(noise: float) -> None:
    """The edge at 16 rows, with N0 measured in every round."""
    curve = sweep(staircase(), GRID, FakeDevice(noise).device(), PROTOCOLS["adaptive"])
    b = find_boundary(curve.points)
    assert (b.n_max, b.n_max_interval, b.undecided) == (16, (16, 16), ())
    assert curve.kind == "measured"
    assert not curve.invalid


def test_adaptive_stops_early_and_paper_does_not() -> None:
    """A clear staircase costs adaptive a fraction of the paper's forwards; both find the same boundary."""
    boundaries, calls = {}, {}
    for name in ("adaptive", "paper"):
        device = FakeDevice(0.01)
        curve = sweep(staircase(), GRID, device.device(), PROTOCOLS[name])
        boundaries[name], calls[name] = find_boundary(curve.points).n_max, device.calls
        assert curve.counts["protocol"] == name
    assert boundaries == {"adaptive": 16, "paper": 16}
    assert calls["adaptive"] * 20 < calls["paper"]


def test_the_papers_protocol_is_the_papers() -> None:
    """50 warm-ups, then 10 rounds of 200 forwards at every N."""
    device = FakeDevice()
    sweep(staircase(), [1, 2], device.device(), PROTOCOLS["paper"])
    assert device.calls == 2 * 50 + 2 * 10 * 200


def test_a_point_on_the_limit_stays_undecided() -> None:
    """T(2) = 1.2 T(1) under noise: no number of rounds decides it, and the interval says so."""
    curve = sweep(
        lambda n: lambda: {1: 100.0, 2: 120.0, 4: 200.0}[n], [1, 2, 4], FakeDevice(0.05).device(), PROTOCOLS["adaptive"]
    )
    b = find_boundary(curve.points)
    assert b.undecided == (2,)
    assert b.n_max_interval == (1, 3)
    assert curve.counts["rounds"] == PROTOCOLS["adaptive"].max_rounds


def test_a_position_that_the_kernel_refuses_is_left_out() -> None:
    """From 5 positions on the kernel raises: those are unsupported with the reason, the others are measured."""

    def make(n: int) -> object:
        if n > 4:
            raise RuntimeError("no 64-row variant is compiled")
        return lambda: 100.0

    curve = sweep(make, [1, 2, 4, 5, 8], FakeDevice().device(), PROTOCOLS["quick"])  # type: ignore[arg-type]
    assert [p.positions for p in curve.points] == [1, 2, 4]
    assert curve.unsupported == dict.fromkeys((5, 8), "RuntimeError: no 64-row variant is compiled")


def test_without_n0_nothing_is_claimed() -> None:
    """T(N0) that can't be measured makes the curve invalid."""

    def make(n: int) -> object:
        raise RuntimeError("out of memory")

    curve = sweep(make, [1, 2], FakeDevice().device(), PROTOCOLS["quick"])  # type: ignore[arg-type]
    assert curve.points == ()
    assert curve.invalid == ("T(N0 = 1) can't be measured: RuntimeError: out of memory",)


def test_ctrl_c_keeps_what_was_measured() -> None:
    """The interruption carries the curve so far."""
    device = FakeDevice()
    calls = 0

    def forward() -> float:
        nonlocal calls
        calls += 1
        if calls > 90:
            raise KeyboardInterrupt
        return 100.0

    with pytest.raises(Interrupted) as raised:
        sweep(lambda n: forward, [1, 2, 4], device.device(), PROTOCOLS["paper"])
    assert raised.value.curve.partial
    calls = 0
    with pytest.raises(Interrupted) as raised:
        sweep(lambda n: forward, [1, 2, 4], device.device(), Protocol("p", 1, 3, 100, 100, 1e9, adaptive=False))
    assert [p.positions for p in raised.value.curve.points] == [1, 2, 4]


def test_points_below_n0_are_kept_for_the_curve() -> None:
    """Under balanced routing T(1) shows how coverage grows; N0 carries the ratio of one."""
    curve = sweep(staircase(), [1, 2, 16, 17], FakeDevice().device(), PROTOCOLS["quick"], baseline_positions=16)
    assert [p.positions for p in curve.points] == [1, 2, 16, 17]
    assert [p.ratio_low for p in curve.points if p.positions == 16] == [1.0]
