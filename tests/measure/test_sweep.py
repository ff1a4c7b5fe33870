"""A sweep finds a known boundary, says when it can't, and survives what goes wrong."""

from __future__ import annotations

import random
import weakref

import pytest

from pytest_nfp.curves import Curve
from pytest_nfp.devices import Forward
from pytest_nfp.measure import PROTOCOLS, sweep
from pytest_nfp.measure.protocol import PAPER_FORWARDS, Protocol
from pytest_nfp.measure.sweep import Interrupted
from pytest_nfp.principle import Boundary, Point, find_boundary
from pytest_nfp.testing import Latency, Noise, Simulated, roofline, staircase, with_hole

GRID = [1, 2, 4, 8, 15, 16, 17, 32, 33]
ADAPTIVE = PROTOCOLS["adaptive"]


def measured(machine: Simulated, positions: list[int], protocol: Protocol = ADAPTIVE, base: int = 1) -> Curve:
    return sweep(machine.forward, positions, machine.device(), protocol, baseline_positions=base)


def boundary(curve: Curve) -> Boundary:
    found = curve.boundary(0.2)
    assert found is not None
    return found


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("positions", [GRID, [1, 33], [1, 3, 9, 33]])
def test_a_staircase_is_found_through_noise_with_a_map_and_without(noise: float, positions: list[int]) -> None:
    """The edge at 16 rows, to the position, whether the grid holds it or not."""
    curve = measured(Simulated(staircase(), Noise(noise)), positions)
    b = boundary(curve)
    assert (b.n_max, b.n_max_interval, b.undecided) == (16, (16, 16), ())
    assert curve.kind == "measured"
    assert not curve.invalid


def test_the_same_boundary_for_a_twentieth_of_the_forwards() -> None:
    """Sixty machines with noise of 0.5 to 5%: within the interval of every one lies the exact N_max, at most 1/20 is spent."""
    r = random.Random(3)
    for seed in range(60):
        steps = staircase(r.choice((4, 8, 16, 32)), r.uniform(0.05, 1))
        latency: Latency = steps if seed % 2 else roofline(r.uniform(4, 64), r.uniform(2, 16))
        machine = Simulated(latency, Noise(r.uniform(0.005, 0.05), spikes=0.01), seed)
        low, high = boundary(measured(machine, [1, 2, 4, 8, 16, 32, 64])).n_max_interval
        exact = find_boundary([Point(n, latency(n)) for n in range(1, 65)]).n_max
        assert low <= exact <= (64 if high is None else high)
        assert machine.calls * 20 <= 64 * PAPER_FORWARDS


def test_a_hole_that_no_grid_point_shows_is_found() -> None:
    """The curve leaves at 9 and is back from 41 to 45: both ends, and the exit before it."""
    b = boundary(measured(Simulated(with_hole(staircase(8, 1.0), 41, 45), Noise(0.02)), [1, 2, 4, 8, 16, 32, 64]))
    assert (b.n_first_exit, b.n_max, b.n_max_interval) == (8, 45, (45, 45))
    assert b.has_hole


def test_what_begins_past_a_gate_is_probed() -> None:
    """A kernel that is fast up to eight query positions: nine is looked at though no grid holds it."""
    curve = measured(Simulated(lambda n: 33.0 if n <= 8 else 1279.0, Noise(0.02)), [1, 2, 4, 16])
    assert boundary(curve).n_max_interval == (8, 8)
    assert {8, 9} <= {p.positions for p in curve.points}


def test_the_papers_protocol_is_the_papers() -> None:
    """50 warm-ups, then 10 rounds of 200 forwards at every N of the grid as it is given, N0 as often as the others."""
    machine = Simulated(staircase())
    curve = measured(machine, GRID, PROTOCOLS["paper"])
    assert machine.calls == len(GRID) * (50 + 10 * 200) + 3  # the three of the timer's self-test
    assert curve.counts["forwards"] == len(GRID) * 2000
    assert curve.counts["warmups"] == len(GRID) * 50
    assert [p.positions for p in curve.points] == GRID
    assert boundary(curve).n_max == 16


def test_the_record_says_which_protocol_and_every_count() -> None:
    """Rounds, forwards, warm-ups, positions, seconds."""
    for name, protocol in PROTOCOLS.items():
        curve = measured(Simulated(staircase()), [1, 16, 17], protocol)
        assert curve.counts["protocol"] == name
        assert all(curve.counts[c] > 0 for c in ("rounds", "forwards", "warmups", "positions", "seconds"))


def test_quick_costs_less_than_adaptive_and_adaptive_less_than_paper() -> None:
    """In this order, for the same clear staircase and the same answer."""
    calls = {}
    for name, protocol in PROTOCOLS.items():
        machine = Simulated(staircase(), Noise(0.01))
        assert boundary(measured(machine, [1, 16, 17, 32], protocol)).n_max == 16
        calls[name] = machine.calls
    assert calls["quick"] < calls["adaptive"]
    # The reference looked at four N alone, the others at all 32.
    assert calls["adaptive"] * 3 < calls["paper"]


def test_a_point_on_the_limit_stays_undecided_within_a_bounded_budget() -> None:
    """T(2) = 1.2 T(1) under noise: no number of rounds decides it, the interval says so, and the budget holds."""
    machine = Simulated(lambda n: {1: 100.0, 2: 120.0, 3: 180.0, 4: 200.0}[n], Noise(0.05))
    curve = measured(machine, [1, 2, 4])
    b = boundary(curve)
    assert b.undecided == (2,)
    assert b.n_max_interval == (1, 2)
    assert machine.calls < 4 * PAPER_FORWARDS


def test_a_position_that_the_kernel_refuses_is_left_out_and_caps() -> None:
    """From 5 positions on the kernel raises: those are unsupported with the reason, the others are measured."""
    refuses = dict.fromkeys(range(5, 9), "no 64-row variant is compiled")
    curve = measured(Simulated(lambda n: 100.0, refuses=refuses), [1, 2, 4, 8])
    assert [p.positions for p in curve.points] == [1, 2, 3, 4]
    assert curve.unsupported[5] == "RuntimeError: no 64-row variant is compiled"
    b = boundary(curve)
    assert (b.n_max, b.n_max_interval) == (4, (4, 4))


def test_without_n0_nothing_is_claimed() -> None:
    """T(N0) that can't be measured makes the curve invalid."""
    curve = measured(Simulated(staircase(), refuses={1: "out of memory"}), [1, 2])
    assert curve.points == ()
    assert curve.invalid == ("T(N0 = 1) can't be measured: RuntimeError: out of memory",)
    assert curve.boundary(0.2) is None


def test_ctrl_c_keeps_what_was_measured() -> None:
    """The interruption carries the curve so far."""
    calls = 0

    def interrupted_after(limit: int) -> Latency:
        def latency(n: int) -> float:
            nonlocal calls
            calls += 1
            if calls > limit:
                raise KeyboardInterrupt
            return 100.0 + n

        return latency

    machine = Simulated(interrupted_after(90))
    with pytest.raises(Interrupted) as raised:
        measured(machine, [1, 2, 4], PROTOCOLS["paper"])
    assert raised.value.curve.partial
    calls = 0
    with pytest.raises(Interrupted) as raised:
        measured(Simulated(interrupted_after(120)), [1, 2, 4], Protocol("p", 1, 3, 100, 100, 1e9, adaptive=False))
    assert [p.positions for p in raised.value.curve.points] == [1, 2, 4]


def test_points_below_n0_are_kept_for_the_curve() -> None:
    """Under balanced routing T(1) shows how coverage grows; N0 carries the ratio of one."""
    curve = measured(Simulated(staircase()), [1, 2, 16, 17], PROTOCOLS["quick"], base=16)
    assert {1, 2, 16, 17} <= {p.positions for p in curve.points}
    assert [p.ratio for p in curve.points if p.positions == 16] == [None]
    assert boundary(curve).n_max == 16


def test_a_slow_device_is_not_filled_beyond_its_budget() -> None:
    """Forwards of a second: the grid and the crossing are measured, the budget stops the rest."""
    machine = Simulated(staircase(16, 0.5, base_us=1e6))
    curve = measured(machine, [1, 16, 17, 64])
    assert boundary(curve).n_max_interval == (16, 16)
    assert len(curve.points) < 20
    assert curve.counts["seconds"] < 6 * ADAPTIVE.budget_s


def test_samples_are_kept_on_request_alone() -> None:
    """For rank tests; a record stays small otherwise."""
    machine = Simulated(staircase(), Noise(0.01))
    assert measured(machine, [1, 16, 17]).samples == {}
    kept = sweep(machine.forward, [1, 16, 17], machine.device(), ADAPTIVE, keep_samples=True).samples
    assert set(kept) >= {1, 16, 17}
    assert all(len(s) >= ADAPTIVE.min_rounds for s in kept.values())


def test_a_captured_graph_is_what_is_timed() -> None:
    """The device is given the forward and how many its banks take in turn."""
    given = []

    def ready(forward: Forward, turns: int) -> Forward:
        given.append(turns)
        return forward

    machine = Simulated(staircase())
    sweep(machine.forward, [1, 2], machine.device(ready=ready), PROTOCOLS["quick"], turns=7)
    assert given == [7, 7]


def test_memory_of_a_position_that_does_not_fit_is_given_back_before_the_next_one() -> None:
    """Out of memory at 8 while the forward is warmed up: the bytes are in the reason, and nothing of it is alive when the
    device is cleaned.
    """
    alive: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
    cleaned: list[set[int]] = []

    class Tensor:
        """What a forward holds."""

    def forward(n: int) -> Forward:
        alive[n] = mine = Tensor()

        def run() -> float:
            if n == 8:
                raise RuntimeError("CUDA out of memory. Tried to allocate 96.00 GiB.", mine)
            return 100.0

        return run

    device = Simulated(staircase()).device(clean=lambda: cleaned.append(set(alive)))
    curve = sweep(forward, [1, 2, 8, 16], device, PROTOCOLS["quick"])
    assert "Tried to allocate 96.00 GiB" in curve.unsupported[8]
    (then,) = cleaned
    assert {1, 2} <= then
    assert 8 not in then
    assert boundary(curve).n_first_exit == 7
