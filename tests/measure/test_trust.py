"""Each sign against a measurement, planted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import count
from typing import Any

import pytest

from pytest_nfp.curves import Curve
from pytest_nfp.devices import Reading
from pytest_nfp.measure import PROTOCOLS, sweep, trust
from pytest_nfp.principle import Point
from pytest_nfp.testing import Noise, Simulated, staircase

GRID = [1, 2, 4, 8, 16, 17]


def measured(machine: Simulated, grid: list[int] = GRID, **asked: Any) -> Curve:
    device = machine.device(**asked.pop("device", {}))
    return sweep(machine.forward, grid, device, PROTOCOLS["adaptive"], **asked)


def only_reason(curve: Curve, pattern: str) -> None:
    assert len(curve.invalid) == 1, curve.invalid
    assert re.search(pattern, curve.invalid[0]), curve.invalid[0]


def test_a_quiet_machine_is_trusted() -> None:
    """Little load and noise leave nothing against the measurement, and the record holds the figures."""
    curve = measured(Simulated(staircase(), Noise(0.02)))
    assert curve.invalid == ()
    assert {"timer", "other_load", "drift", "outlier_rounds", "clock_mhz", "cold_cache", "profile"} <= set(curve.trust)


@pytest.mark.parametrize("drift", [0.6, -0.6])
def test_drift_within_a_run(drift: float) -> None:
    """T(N0) at the end is not what it was at the beginning."""
    only_reason(
        measured(Simulated(staircase(base_us=2000.0), Noise(0.01, drift=drift))),
        r"T\(N0\) drifted by [+-]\d+% within the run",
    )


def test_other_processes_on_the_processors() -> None:
    """Seconds of all processes, less this one's, over all cores."""
    seconds = count()
    read = lambda: Reading(wall_s=float(t := next(seconds)), busy_s=t * 2 * 0.4)  # noqa: E731
    only_reason(measured(Simulated(staircase()), device={"read": read}), "other processes used 40% of the processors")


def test_a_clock_that_falls_and_what_resting_does() -> None:
    """1965 to 1580 MHz over back-to-back rounds is invalid; with rests between them the clock holds."""
    noise = Noise(0.005, throttle=1965 / 1580 - 1, throttle_after_s=0.4)
    hot = measured(Simulated(staircase(base_us=2000.0), noise, clock_mhz=1965))
    assert any("the clock went from 1965 to 1580 MHz" in r for r in hot.invalid)
    assert hot.trust["clock_moved"]
    assert measured(Simulated(staircase(base_us=2000.0), noise, clock_mhz=1965), duty=0.05).invalid == ()


def test_a_constant_power_cap_is_recorded_and_does_not_reject() -> None:
    """In force in all readings, with a steady clock."""
    curve = measured(Simulated(staircase(), reading={"limits": ("power cap",)}))
    assert curve.invalid == ()
    assert curve.trust["limits"] == {"power cap": 1.0}


def test_a_slowdown_in_part_of_the_run() -> None:
    """It compares a hot half with a cool one."""
    turn = count()
    read = lambda: Reading(clock_mhz=1980.0, limits=("thermal slowdown",) if next(turn) > 6 else ())  # noqa: E731
    only_reason(measured(Simulated(staircase()), device={"read": read}), "slowed in part of the run: thermal slowdown")


def test_other_processes_on_the_device() -> None:
    """By their process ids."""
    only_reason(measured(Simulated(staircase(), reading={"others": (4711,)})), "other processes use the device: 4711")


def test_a_changed_number_of_threads() -> None:
    """Somebody set it in between."""
    turn = count()
    read = lambda: Reading(threads=2 if next(turn) else 1)  # noqa: E731
    only_reason(
        measured(Simulated(staircase()), device={"read": read}), "the number of threads changed within the run: 1, 2"
    )


@pytest.mark.parametrize(
    ("reads", "reason"),
    [
        (lambda us: 0.0, "stands still or runs backwards"),
        (lambda us: -us, "reads -2000"),
        (lambda us: us / 1000, "reads 2.0 us for a forward of 2000 us"),
    ],
)
def test_a_timer_that_lies(reads: Any, reason: str) -> None:
    """One that reads 0, runs backwards, or counts in another unit."""
    machine = Simulated(staircase())
    exact = machine.device().time_us
    curve = measured(machine, device={"time_us": lambda run: reads(exact(run))})
    assert any(reason in r for r in curve.invalid), curve.invalid


def test_warm_up_ends_when_the_timings_have_settled_not_at_a_count() -> None:
    """A device that starts at four times its latency is warmed as long as it takes, and T is that of the warm device."""
    noise = Noise(0.01, cold=3.0, cold_forwards=12)
    machine = Simulated(lambda n: 100.0, noise)
    forwards, settled = trust.settle(machine.device(), machine.forward(1))
    assert settled
    assert forwards > 9
    assert machine.device().time_us(machine.forward(1)) < 130
    curve = measured(Simulated(staircase(), noise))
    assert curve.invalid == ()
    assert curve.points[0].latency_us == pytest.approx(100, rel=0.03)


def test_timings_that_never_settle() -> None:
    """Ever quicker: the warm-up ends at its bound, and the curve says at which N."""
    machine = Simulated(lambda n: 1e6 * 0.99**machine.calls)
    bound = trust.MAX_BATCHES * trust.BATCH
    assert trust.settle(machine.device(), machine.forward(1)) == (bound, False)
    machine.calls = 0
    assert any("did not settle in 120 forwards at N = 1" in r for r in measured(machine).invalid)


def test_noise_is_no_warm_up() -> None:
    """At 40% jitter no two batches are alike; that is for the intervals to say, not for the warm-up."""
    forwards, settled = trust.settle(Simulated(lambda n: 100.0, Noise(0.4)).device(), lambda: 100.0)
    assert settled
    assert forwards <= trust.MAX_BATCHES * trust.BATCH


def test_outlier_rounds_are_counted_and_too_many_reject() -> None:
    """A few spikes are survived, in the medians; a third of the samples is no measurement."""
    assert measured(Simulated(staircase(), Noise(0.01, spikes=0.02))).invalid == ()
    reasons, figures = trust._baseline([100.0] * 8 + [300.0] * 4)
    assert figures["outlier_rounds"] == 4
    assert any("4 of 12 samples of T(N0) are over 1.5 times its median" in r for r in reasons)


def test_a_forward_that_waits_for_its_launch() -> None:
    """The host takes as long as the device: said with both figures and what to do."""
    machine = Simulated(staircase())
    for host, bound in ((95.0, True), (30.0, False)):
        curve = measured(machine, device={"launch_us": lambda run, h=host: (100.0, h)})
        assert any("--nfp-timer=cuda-graph" in r for r in curve.invalid) == bound
        assert curve.trust["device_and_host_us"]["1"] == [100.0, host]


def test_a_warm_cache_is_shown_by_the_bytes_touched() -> None:
    """Less than two cache sizes between two reads of a byte; a forward that does not say is marked, not rejected."""
    mib = 2**20
    device = {"cache_bytes": 60 * mib}
    only_reason(
        measured(Simulated(staircase()), device=device, bytes_rotated=100 * mib), "the cache is warm: 100 MiB are read"
    )
    assert (
        measured(Simulated(staircase()), device=device, bytes_rotated=120 * mib)
        .trust["cold_cache"]
        .startswith("proven")
    )
    assert measured(Simulated(staircase()), device=device).trust["cold_cache"].startswith("not proven")


def test_graph_modes_that_change_along_a_curve() -> None:
    """Full graphs at some N and piecewise at others compare two things."""
    modes = {1: "piecewise", 2: "piecewise", 16: "full", 17: "full"}
    only_reason(measured(Simulated(staircase()), modes=modes), "piecewise at N = 1, 2; full at N = 16, 17")
    assert measured(Simulated(staircase()), modes=dict.fromkeys(GRID, "full")).invalid == ()


def test_a_profile_that_is_not_allowed_is_one_reason_and_timing_goes_on() -> None:
    """The driver refuses performance counters; what would run is unknown, what it costs is not."""

    def refused(run: object) -> list[str]:
        raise RuntimeError("ERR_NVGPUCTRPERM: no permission to read performance counters\nsee elsewhere")

    curve = measured(Simulated(staircase()), device={"kernels": refused})
    assert curve.invalid == ()
    assert curve.kernels == {}
    assert curve.trust["profile"] == "not profiled: ERR_NVGPUCTRPERM: no permission to read performance counters"
    assert curve.boundary(0.2).n_max == 16  # type: ignore[union-attr]


def test_the_kernels_of_each_n_are_recorded() -> None:
    """By one untimed forward."""
    names = lambda run: ["decode" if run() <= 100 else "prefill"]  # noqa: E731
    curve = measured(Simulated(staircase(1, 0.9)), [1, 2, 4], device={"kernels": names})
    assert curve.kernels == {1: "decode", 2: "prefill", 3: "prefill", 4: "prefill"}


def test_experts_that_are_streamed_whatever_n_is() -> None:
    """T(1) with eight of 256 experts costs as much as T(32) with all of them."""
    streamed: Mapping[int, float] = {1: 98.0, 32: 100.0}
    assert "all experts are streamed whatever N" in trust.streams_all_experts(streamed, 32, 1 - 8 / 256)
    assert trust.streams_all_experts({1: 30.0, 32: 100.0}, 32, 1 - 8 / 256) == ""
    assert trust.streams_all_experts(streamed, 32, 0.1) == ""
    assert trust.streams_all_experts(streamed, 1, 0.9) == ""


def test_t_that_does_not_depend_on_n() -> None:
    """Sixty-four times the positions within a percent: no N_max is claimed; over a short range it may be free."""
    assert "no N_max is claimed" in trust.does_not_depend([Point(n, 100.0) for n in (1, 4, 16, 64)], 1)
    assert trust.does_not_depend([Point(n, 100.0) for n in (1, 2, 4, 8)], 1) == ""
    assert trust.does_not_depend([Point(n, 100.0 + n / 10) for n in (1, 4, 16, 64)], 1) == ""


def test_every_sweep_looks_whether_t_depends_on_n() -> None:
    """A suite's case or a user's own forward: the sweep itself says so."""
    only_reason(measured(Simulated(lambda n: 100.0), [1, 64]), "T does not depend on N: from 1 to 64 positions")
