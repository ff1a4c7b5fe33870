"""The curve of a case: measured on the device, with what its forwards tell of themselves, or taken from a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from pytest_nfp import backends, recordings
from pytest_nfp.backends import REFUSALS, Prepared, PreparedEngine
from pytest_nfp.cases import ROUTINGS, Case
from pytest_nfp.curves import Curve
from pytest_nfp.devices import Device, Reading, as_it_is
from pytest_nfp.devices.lock import TooLong, device_lock, time_limit
from pytest_nfp.granularity import Granularity
from pytest_nfp.measure import PROTOCOLS, sweep, trust
from pytest_nfp.measure.grid import positions_to_measure
from pytest_nfp.principle import Boundary, active_experts
from pytest_nfp.principle.routing import Replay
from pytest_nfp.run.inputs import Inputs
from pytest_nfp.verdict import Verdict

GRAPH_TIMER = "cuda-graph"
"""The timer that captures each forward and times its replay."""
ENGINE_TIMER = "engine-forward"
"""The clock of an engine's own step: the forward inside it."""
BASELINE_RUNS = 3
"""Runs behind a measured baseline: their spread tells a machine with several states."""
RESTING = 0.1
"""Share of the time that a device is kept busy where its clock fell under load."""
COOLING_S = 30.0
"""Longest rest before such a device is measured again."""
CHECKED = 64
"""A result is held to its reference at N0 and at the largest N of the grid up to here."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A curve, or a verdict that says why there is none."""

    curve: Curve | None
    why_not: Verdict | None = None


def curve_of(inputs: Inputs, case: Case, granularity: Granularity | None) -> Measured:
    """The curve of a case from the device or a recording, or the one reason why there is none. Raises Interrupted."""
    mode = inputs.settings.measure
    if mode == "none":
        return Measured(None, Verdict("SKIPPED", ("--nfp-measure=none",)))
    device, absent = (None, "") if mode == "recorded" else inputs.device(case.gpu)
    if device is not None:
        return _on_device(inputs, case, granularity, device)
    if mode == "device":
        return Measured(None, Verdict("SKIPPED", (absent,)))
    try:
        return Measured(recordings.recorded_curve(case))
    except recordings.NoRecording as reason:
        return Measured(None, Verdict("SKIPPED", (f"{absent}; {reason}" if absent else str(reason),)))


def _on_device(inputs: Inputs, case: Case, granularity: Granularity | None, device: Device) -> Measured:
    try:
        prepared = backends.prepare_on(device, case, inputs.settings.seed)
    except backends.Unsupported as reason:
        return Measured(None, Verdict("SKIPPED", (str(reason),)))
    except backends.EngineDied as died:
        return Measured(replace(_nothing(case, device), invalid=(str(died),), log=died.log, died=True))
    grid = positions_to_measure(case, granularity)
    curve: Curve | None = None
    with ExitStack() as stack:
        if isinstance(prepared, PreparedEngine):
            stack.callback(prepared.close)
        try:
            with device_lock(device):
                if wrong := _first_wrong(prepared, grid, case.baseline_positions):
                    return Measured(None, Verdict("INVALID", (wrong,)))
                curve = _swept(inputs, case, prepared, grid, device)
            if not curve.died:  # An engine that died is asked nothing more.
                curve = _with_what_it_saw(inputs, case, curve, prepared, device)
        except backends.EngineDied as died:
            # Before it was measured, or when it was asked what it had seen.
            curve = curve or _nothing(case, device)
            curve = replace(curve, invalid=(str(died), *curve.invalid), log=died.log, died=True)
    return Measured(_without_idle_claim(case, curve))


def _swept(inputs: Inputs, case: Case, prepared: Prepared, grid: Sequence[int], device: Device) -> Curve:
    """The curve; measured once more where it can't be trusted, since load and drift pass."""
    clock = _clock_of(case, prepared, device)

    def measured(duty: float = 1.0) -> Curve:
        return sweep(
            prepared.forward,
            grid,
            clock,
            PROTOCOLS[inputs.settings.protocol],
            inputs.settings.tolerance,
            case.baseline_positions,
            inputs.settings.seed,
            prepared.kernel,
            lambda text: inputs.say(f"{case.key}: {text}"),
            prepared.turns,
            prepared.bytes_rotated,
            duty=duty,
            keep_samples=inputs.settings.samples,
        )

    curve = measured()
    if not curve.invalid or not curve.points or curve.died:
        return curve
    inputs.say(f"{case.key}: {curve.invalid[0]}; measured again")
    # A clock that fell under load holds when the device rests.
    is_hot = curve.trust.get("clock_moved", False)
    if is_hot:
        device.rest(min(COOLING_S, curve.counts["seconds"]))
    return measured(RESTING if is_hot else 1.0)


def _clock_of(case: Case, prepared: Prepared, device: Device) -> Device:
    """The device as it times this case's forwards."""
    clock = device
    if case.module == "model":
        # Of hundreds of operators no one is the model's kernel.
        clock = replace(device, kernels=None)
    if not isinstance(prepared, PreparedEngine):
        return clock
    if prepared.process is not None:
        clock = replace(clock, read=_with_engine(device, prepared.process))
    if prepared.own_timer:
        clock = replace(clock, time_us=_own_time, timer=ENGINE_TIMER, known_length=None, launch_us=None, ready=as_it_is)
    return clock


def measured_beside(inputs: Inputs, case: Case, granularity: Granularity | None) -> Curve | None:
    """A curve beside a case that failed, with fresh inputs and weights; None where there is none. Raises Interrupted."""
    device = inputs.measuring_device(case.gpu)
    try:
        with time_limit(inputs.settings.case_timeout):
            return curve_of(inputs, case, granularity).curve
    except TooLong as reason:
        inputs.say(f"{case.key}: not confirmed: {reason}")
        return None
    finally:
        if device is not None:
            device.clean()


def runs_of_baseline(
    inputs: Inputs, case: Case, granularity: Granularity | None, curve: Curve, boundary: Boundary
) -> list[tuple[int, float]]:
    """(N_max, T(N0) in microseconds) of a measured curve that becomes a baseline, and of further runs with fresh inputs and weights.

    A recorded curve and a user's own forward stand alone.
    """
    if curve.kind != "measured" or case.module == "own":
        return []
    runs = [(boundary.n_max, curve.baseline_us)]
    while len(runs) < BASELINE_RUNS:
        again = curve_of(inputs, case, granularity).curve
        seen = again.boundary(inputs.settings.tolerance) if again is not None and not again.invalid else None
        if again is None or seen is None:
            break
        runs.append((seen.n_max, again.baseline_us))
    return runs


def _first_wrong(prepared: Prepared, grid: Sequence[int], base: int) -> str:
    """What is wrong with a result, at N0 and at a few more positions; empty where they are right, or have no reference."""
    if prepared.check is None:
        return ""
    for n in dict.fromkeys((base, max(n for n in grid if n <= max(base, CHECKED)))):
        try:
            wrong = prepared.check(n)
        except (*REFUSALS, backends.Unsupported):
            continue  # The sweep meets the same refusal, and caps N_max there.
        if wrong:
            return f"N={n}: {prepared.kernel} computes something else: {wrong}"
    return ""


def _own_time(run: Callable[[], object]) -> float:
    """Microseconds that a run returns of itself."""
    latency_us = run()
    assert isinstance(latency_us, float)
    return latency_us


def _nothing(case: Case, device: Device) -> Curve:
    """A measured curve without a point."""
    return Curve((), case.baseline_positions, "measured", device.title, "", timer=device.timer)


def _with_engine(device: Device, process: Callable[[], tuple[int, float]]) -> Callable[[], Reading]:
    """The device's readings, in which the process of the engine is this run's own."""

    def read() -> Reading:
        reading, (pid, own_s) = device.read(), process()
        return replace(reading, own_s=reading.own_s + own_s, others=tuple(p for p in reading.others if p != pid))

    return read


def _with_what_it_saw(inputs: Inputs, case: Case, curve: Curve, prepared: Prepared, device: Device) -> Curve:
    """The curve with what its forwards tell of themselves, before they are given up."""
    if prepared.active is not None:
        curve = replace(curve, active_experts={p.positions: prepared.active(p.positions) for p in curve.points})
    if prepared.setting is not None:
        try:
            settings = {p.positions: _setting(prepared.setting, p.positions) for p in curve.points}
            curve = replace(curve, settings=settings)
        except REFUSALS as error:
            inputs.say(f"{case.key}: the selector gives no configuration: {error}")
    if isinstance(prepared, PreparedEngine):
        curve = replace(curve, padded=prepared.padded())
        return _proven(case, _with_modes(curve, prepared.modes()), prepared)
    if device.gpu == "cpu":
        return curve
    mode = "graph" if device.timer == GRAPH_TIMER else "eager"
    return _with_modes(curve, {p.positions: mode for p in curve.points})


def _setting(setting: Callable[[int], dict[str, Any]], positions: int) -> str:
    """ "BLOCK_SIZE_M=16 BLOCK_SIZE_N=64", in the order of their names."""
    return " ".join(f"{name}={value}" for name, value in sorted(setting(positions).items()))


def _with_modes(curve: Curve, modes: dict[int, str]) -> Curve:
    """The curve with the graph mode of every N: as an engine says of itself; of a kernel, as the GPU's timer makes it."""
    mixed = trust.graph_modes(modes)
    return replace(curve, modes=modes, invalid=(*curve.invalid, mixed) if mixed else curve.invalid)


def _proven(case: Case, curve: Curve, prepared: PreparedEngine) -> Curve:
    """The curve of a whole model with what its forwards were seen to process; invalid where that is not b*N over L tokens.

    So is one whose layers read other experts than the routing gives: dummy weights send every token to the same few.
    """
    seen, host = prepared.proof(), prepared.host()
    measured = [p.positions for p in curve.points]
    wrong = []
    for n in measured:
        wanted = (case.batch * n, case.batch * (case.context or 0))
        if seen.get(n) != wanted:
            had = f"{seen[n].tokens} over {seen[n].cached}" if n in seen else "nothing that was seen"
            wrong.append(f"N={n}: {had} cached tokens were processed, not {wanted[0]} over {wanted[1]}")
    wrong += _wrong_experts(case, curve)
    return replace(
        curve,
        invalid=(*curve.invalid, *wrong[:1]),
        proof={n: (seen[n].tokens, seen[n].cached) for n in measured if n in seen},
        # The step as its forward and what was taken beside it in the same runs: medians of both apart could cross.
        steps={p.positions: round(p.latency_us + host[p.positions], 1) for p in curve.points if p.positions in host},
    )


def _wrong_experts(case: Case, curve: Curve) -> list[str]:
    """Where other experts were read than the case's routing gives."""
    moe, top_k = case.subject.moe, case.top_k
    if moe is None or top_k is None or not (case.routing in ROUTINGS or isinstance(case.routing, Replay)):
        return []
    wrong = []
    for n in (p.positions for p in curve.points):
        expected = active_experts(case.routing, case.batch * n, moe.experts, top_k)
        if (read := curve.active_experts.get(n)) != expected:
            wrong.append(
                f"N={n}: {read} experts were read, {expected:g} in every layer are those of {case.routing} routing"
            )
    return wrong


def _without_idle_claim(case: Case, curve: Curve) -> Curve:
    """The curve, invalid where its kernel streams all experts whatever N is."""
    moe, top_k = case.subject.moe, case.top_k
    if case.module != "moe" or moe is None or top_k is None:
        return curve
    idle = 1 - min(1.0, case.batch * top_k / moe.experts)
    latencies = {p.positions: p.latency_us for p in curve.points}
    reason = trust.streams_all_experts(latencies, curve.baseline_positions, idle)
    return replace(curve, invalid=(*curve.invalid, reason)) if reason else curve
