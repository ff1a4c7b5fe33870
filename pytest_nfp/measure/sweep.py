"""Measure T(N) over a grid: interleaved rounds, N0 in each of them, until every N is decided or the budget ends."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median

from pytest_nfp.devices import Device
from pytest_nfp.measure.curve import Curve, make_point, median_interval
from pytest_nfp.measure.protocol import Protocol
from pytest_nfp.measure.trust import Watch
from pytest_nfp.principle import Point

Forward = Callable[[], object]
Progress = Callable[[str], None]
Clock = Callable[[Forward], float]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C inside a sweep; `curve` holds what was measured until then."""

    def __init__(self, curve: Curve) -> None:
        super().__init__()
        self.curve = curve


def sweep(
    forward: Callable[[int], Forward],
    positions: Sequence[int],
    device: Device,
    protocol: Protocol,
    tolerance: float = 0.20,
    baseline_positions: int = 1,
    seed: int = 0,
    kernel: str = "",
    progress: Progress = lambda text: None,
) -> Curve:
    """T(N) of a forward over `positions`, which get N0 if they lack it.

    An N whose forward can't be built or raises is left out with its reason and the others go on. Raises Interrupted
    on Ctrl-C, with the curve so far.
    """
    grid = sorted({baseline_positions, *positions})
    unsupported: dict[int, str] = {}
    runs: dict[int, Forward] = {}
    samples: dict[int, list[float]] = {}
    ratios: dict[int, list[float]] = {}
    watch = Watch(device)
    rounds = 0
    forwards = 0
    started = time.monotonic()
    partial = False
    try:
        for n in grid:
            try:
                run = forward(n)
                for _ in range(protocol.warmup):
                    device.time_us(run)
            except (RuntimeError, ValueError, TypeError) as error:
                unsupported[n] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                continue
            runs[n], samples[n], ratios[n] = run, [], []
        if baseline_positions in unsupported:
            reason = f"T(N0 = {baseline_positions}) can't be measured: {unsupported[baseline_positions]}"
            return Curve((), baseline_positions, "measured", "", kernel, (reason,), unsupported)
        shuffled = random.Random(seed)  # noqa: S311  # the order of a round, not a secret
        open_positions = [n for n in runs if n != baseline_positions]
        while open_positions and rounds < protocol.max_rounds:
            if rounds >= protocol.min_rounds and time.monotonic() - started > protocol.budget_s:
                break
            rounds += 1
            progress(f"round {rounds}, {len(open_positions)} of {len(runs)} positions open")
            base = _sample(device, runs[baseline_positions], protocol.forwards)
            samples[baseline_positions].append(base)
            shuffled.shuffle(open_positions)
            for i, n in enumerate(open_positions, 1):
                latency = _sample(device, runs[n], protocol.forwards)
                samples[n].append(latency)
                ratios[n].append(latency / base)
                if i % 4 == 0:
                    # N0 again within a long round, so that a ratio compares neighbours in time.
                    base = _sample(device, runs[baseline_positions], protocol.forwards)
                    samples[baseline_positions].append(base)
            forwards += protocol.forwards * (len(open_positions) * 5 // 4 + 1)
            if protocol.adaptive and rounds >= protocol.min_rounds:
                open_positions = [n for n in open_positions if not _decided(ratios[n], tolerance)]
    except KeyboardInterrupt:
        partial = True
    invalid, trust = watch.verdict(samples.get(baseline_positions, []))
    points = [make_point(n, samples[n], ratios[n]) for n in sorted(runs) if ratios[n]]
    if samples.get(baseline_positions):
        base_us = median(samples[baseline_positions])
        points.insert(
            sum(p.positions < baseline_positions for p in points), Point(baseline_positions, base_us, 1.0, 1.0)
        )
    curve = Curve(
        points=tuple(points),
        baseline_positions=baseline_positions,
        kind="measured",
        source=device.title,
        kernel=kernel,
        invalid=tuple(invalid),
        unsupported=unsupported,
        partial=partial,
        counts={"protocol": protocol.name, "rounds": rounds, "forwards": forwards},
        trust=trust,
    )
    if partial:
        raise Interrupted(curve)
    return curve


def _sample(device: Device, run: Forward, forwards: int) -> float:
    return median(device.time_us(run) for _ in range(forwards))


def _decided(ratios: Sequence[float], tolerance: float) -> bool:
    low, high = median_interval(ratios)
    return high <= 1 + tolerance or low > 1 + tolerance
