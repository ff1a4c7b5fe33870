"""Signs that a measurement is not to be trusted, each with the figures that it rests on.

What a reading can show is gathered while a curve is measured (`Watch`); what the samples and the points show, after it.
A device that does not give a figure is not judged by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from pytest_nfp.devices import Device, Forward
from pytest_nfp.principle import Point

MAX_OTHER_LOAD = 0.25
"""Share of the processors that other processes may use before ratios stop meaning anything."""
MAX_DRIFT = 0.25
"""Relative change of T(N0) from the first third of a run to its last."""
CONSTANT = 0.9
"""A limit that is in force in this share of the readings is constant: recorded, and no drift."""
OUTLIER = 1.5
"""T(N0) of a round beyond this many medians makes the round an outlier."""
MAX_OUTLIERS = 0.25
SELF_TEST_US = 2000.0
SELF_TEST_ERROR = 0.5
HOST_BOUND = 0.8
"""Host time as a share of device time from which a forward waits for its launch."""
COLD_TURNS = 2
"""Cache sizes to be read before a byte is read again."""
SETTLED = 0.1
"""Settled batches differ by less from the one before them."""
FALLING = 0.01
"""A batch that is quicker than every one before it by more than this is still part of the warm-up."""
BATCH = 2
MAX_BATCHES = 60
FLAT = 0.01
FLAT_RANGE = 32
"""N0's in a range over which T must grow by more than FLAT: 32 times the positions are never free altogether."""
STREAMED = 0.8
"""T(1) as a share of T(N0) from which routing that leaves most experts idle at N = 1 costs as if it did not."""


def settle(device: Device, run: Forward) -> tuple[int, bool]:
    """Run a forward until its timings have settled: (forwards, whether they did).

    They have when two batches in a row are no quicker than the quickest before them, and alike: a slow warm-up still
    falls by a little with every batch. Noise that keeps them from being alike is no warm-up: at the bound they are
    called unsettled if the last third of them was still getting quicker.
    """
    batches: list[float] = []
    calm = 0
    while len(batches) < MAX_BATCHES:
        now = median(device.time_us(run) for _ in range(BATCH))
        quickest, before = min(batches, default=float("inf")), batches[-1] if batches else float("inf")
        calm = calm + 1 if now > (1 - FALLING) * quickest and abs(before / now - 1) < SETTLED else 0
        batches.append(now)
        if calm == 2:
            return len(batches) * BATCH, True
    third = MAX_BATCHES // 3
    return MAX_BATCHES * BATCH, min(batches[-third:]) > (1 - 3 * FALLING) * min(batches[:-third])


def timer_self_test(device: Device) -> str:
    """Empty if the timer reads about what a forward of known length lasts; else what it reads."""
    if device.known_length is None:
        return ""
    run = device.known_length(SELF_TEST_US)
    read = median(device.time_us(run) for _ in range(3))
    if abs(read / SELF_TEST_US - 1) <= SELF_TEST_ERROR:
        return ""
    return f"the timer {device.timer} reads {read:.1f} us for a forward of {SELF_TEST_US:.0f} us"


class Watch:
    """Reads the device when it is made, at every round, and for the verdict."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._readings = [device.read()]
        self._lie = ""

    def warm(self) -> None:
        """N0 is warmed up: a forward of known length lasts as long as it should."""
        self._lie = timer_self_test(self._device)

    def round(self) -> None:
        """Another round has been measured."""
        self._readings.append(self._device.read())

    def verdict(self, baseline_us: Sequence[float]) -> tuple[list[str], dict[str, Any]]:
        """Reasons against the measurement, and figures for the record. baseline_us: T(N0) of each round, in order."""
        self.round()
        reasons = [self._lie] if self._lie else []
        figures: dict[str, Any] = {"timer": self._device.timer}
        for check in (self._load, self._limits, self._others, self._threads):
            reason, figure = check()
            reasons += [reason] if reason else []
            figures |= figure
        if clock := self._clock():
            reasons.append(clock)
            figures["clock_moved"] = True
        said, shown = _baseline(baseline_us)
        return [*reasons, *said], figures | shown

    def _load(self) -> tuple[str, dict[str, Any]]:
        first, last = self._readings[0], self._readings[-1]
        wall = last.wall_s - first.wall_s
        busy, own = last.busy_s - first.busy_s, last.own_s - first.own_s
        cores = self._device.identity.get("cores", 1)
        others = max(0.0, busy - own) / (wall * cores) if wall > 0 else 0.0
        reason = ""
        if others > MAX_OTHER_LOAD:
            reason = (
                f"other processes used {others:.0%} of the processors while this was measured (at most"
                f" {MAX_OTHER_LOAD:.0%}): end them and run again"
            )
        return reason, {"other_load": round(others, 3)}

    def _clock(self) -> str:
        clocks = [r.clock_mhz for r in self._readings if r.clock_mhz is not None]
        if len(clocks) < 3:
            return ""
        third = max(1, len(clocks) // 3)
        first, last = median(clocks[:third]), median(clocks[-third:])
        allowed = self._device.clock_drift
        if abs(last / first - 1) <= allowed:
            return ""
        return f"the clock went from {first:.0f} to {last:.0f} MHz within the run (at most {allowed:.0%})"

    def _limits(self) -> tuple[str, dict[str, Any]]:
        clocks = [r.clock_mhz for r in self._readings if r.clock_mhz is not None]
        figures: dict[str, Any] = {"clock_mhz": [min(clocks), max(clocks)]} if clocks else {}
        names = dict.fromkeys(limit for r in self._readings for limit in r.limits)
        shares = {n: sum(n in r.limits for r in self._readings) / len(self._readings) for n in names}
        if shares:
            figures["limits"] = {n: round(share, 2) for n, share in shares.items()}
        passing = [n for n, share in shares.items() if share < CONSTANT]
        if not passing:
            return "", figures
        return f"the device was slowed in part of the run: {', '.join(passing)}", figures

    def _others(self) -> tuple[str, dict[str, Any]]:
        pids = sorted({pid for r in self._readings for pid in r.others})
        if not pids:
            return "", {}
        return f"other processes use the device: {', '.join(map(str, pids))}", {"others": pids}

    def _threads(self) -> tuple[str, dict[str, Any]]:
        counts = sorted({r.threads for r in self._readings if r.threads is not None})
        if len(counts) < 2:
            return "", {}
        return f"the number of threads changed within the run: {', '.join(map(str, counts))}", {"threads": counts}


def _baseline(baseline_us: Sequence[float]) -> tuple[list[str], dict[str, Any]]:
    """What T(N0), sampled in every round, says of the run."""
    if any(not t > 0 for t in baseline_us):
        return [f"the timer read {min(baseline_us):.1f} us: it stands still or runs backwards"], {}
    figures: dict[str, Any] = {"drift": 0.0}
    reasons = []
    if len(baseline_us) >= 6:
        third = len(baseline_us) // 3
        drift = median(baseline_us[-third:]) / median(baseline_us[:third]) - 1
        middle = median(baseline_us)
        outliers = sum(t > OUTLIER * middle for t in baseline_us)
        figures = {"drift": round(drift, 3), "outlier_rounds": outliers}
        if abs(drift) > MAX_DRIFT:
            reasons.append(f"T(N0) drifted by {drift:+.0%} within the run (at most {MAX_DRIFT:.0%})")
        if outliers > MAX_OUTLIERS * len(baseline_us):
            reasons.append(f"{outliers} of {len(baseline_us)} samples of T(N0) are over {OUTLIER:g} times its median")
    return reasons, figures


def host_bound(device: Device, runs: Mapping[int, Forward]) -> tuple[str, dict[str, Any]]:
    """Whether the host takes as long to launch a forward as the device to run it, at the N that are given."""
    if device.launch_us is None:
        return "", {}
    figures = {}
    bound = []
    for n, run in runs.items():
        pairs = [device.launch_us(run) for _ in range(5)]
        device_us, host_us = median(d for d, _ in pairs), median(h for _, h in pairs)
        figures[str(n)] = [round(device_us, 1), round(host_us, 1)]
        if host_us > HOST_BOUND * device_us:
            bound.append(f"N={n}: {host_us:.0f} us on the host for {device_us:.0f} us on the device")
    reason = ""
    if bound:
        reason = (
            f"bound by the launch on the host, which hides what N costs ({'; '.join(bound)}): measure with"
            " --nfp-timer=cuda-graph"
        )
    return reason, {"device_and_host_us": figures}


def cold_cache(bytes_rotated: int | None, cache_bytes: int) -> tuple[str, str]:
    """(reason against, words for the record): whether a byte has left the cache before it is read again."""
    mib = 2**20
    if bytes_rotated is None:
        return "", "not proven: the forward does not say what it reads"
    said = f"{bytes_rotated / mib:.0f} MiB are read before a byte is read again, the last-level cache has {cache_bytes / mib:.0f} MiB"
    if bytes_rotated < COLD_TURNS * cache_bytes:
        return f"the cache is warm: {said}", f"warm: {said}"
    return "", f"proven: {said}"


def graph_modes(modes: Mapping[int, str]) -> str:
    """Why a curve over several graph modes has no N_max; empty if there is one mode."""
    named: dict[str, list[int]] = {}
    for n, mode in sorted(modes.items()):
        named.setdefault(mode, []).append(n)
    if len(named) < 2:
        return ""
    parts = "; ".join(f"{mode} at N = {', '.join(map(str, at))}" for mode, at in named.items())
    return f"graph modes are mixed on one curve, so T(N) compares two things: {parts}"


def streams_all_experts(latencies: Mapping[int, float], baseline_positions: int, idle_share: float) -> str:
    """Why no N_max is claimed where T(1) costs as much as T(N0), though routing leaves `idle_share` of the experts idle."""
    if baseline_positions <= 1 or idle_share < 1 - STREAMED or 1 not in latencies:
        return ""
    share = latencies[1] / latencies[baseline_positions]
    if share < STREAMED:
        return ""
    return (
        f"T(1) is {share:.0%} of T({baseline_positions}) though {idle_share:.0%} of the experts are idle at N = 1: all"
        " experts are streamed whatever N, so no N_max is claimed"
    )


def does_not_depend(points: Sequence[Point], baseline_positions: int) -> str:
    """Why no N_max is claimed where T stays the same over so many N that the work of N positions can't be in it."""
    curve = [p for p in points if p.positions >= baseline_positions]
    if len(curve) < 4 or curve[-1].positions < FLAT_RANGE * baseline_positions:
        return ""
    latencies = [p.latency_us for p in curve]
    if max(latencies) / min(latencies) > 1 + FLAT:
        return ""
    return (
        f"T does not depend on N: from {curve[0].positions} to {curve[-1].positions} positions it stays within {FLAT:.0%}, so the"
        " work of N positions is not what is timed (all experts streamed, or a fixed cost); no N_max is claimed"
    )
