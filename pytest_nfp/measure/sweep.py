"""Measure T(N) and close in on the boundary: interleaved rounds, N0 in each of them, until every N is decided or the
budget ends.

The adaptive search looks at the N it is given (N0, the edges of the granularity map, a grid), halves its way to every
crossing of the limit that these show, then looks at the other N of the range for holes, and spends what is left of its
budget on the N that are still open. It needs no map: without one it starts from the grid alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from pytest_nfp.backends import REFUSALS, EngineDied, Prepared, Unsupported
from pytest_nfp.curves.curve import Curve, make_point
from pytest_nfp.curves.statistics import median_interval
from pytest_nfp.devices import Device, Forward
from pytest_nfp.measure import trust
from pytest_nfp.measure.protocol import CALIBRATION, PAPER_FORWARDS, Protocol
from pytest_nfp.principle import Point
from pytest_nfp.principle.boundary import TOLERANCE

Progress = Callable[[str], None]
CHUNK = 4
"""N between two samples of N0, so that a ratio compares neighbours in time."""
CLOSING = 8
"""Open N that the rest of the budget is spent on at a time."""
BASE_FORWARDS = 3
"""Forwards of a sample of N0 in an adaptive round."""
PROFILED = 64
"""Up to this many N are profiled for the kernels that they run."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C inside a sweep; `curve` holds what was measured until then."""

    def __init__(self, curve: Curve) -> None:
        super().__init__()
        self.curve = curve


def sweep(
    forward: Callable[[int], Forward],
    positions: Collection[int],
    device: Device,
    protocol: Protocol,
    tolerance: float = TOLERANCE,
    baseline_positions: int = 1,
    seed: int = 0,
    kernel: str = "",
    progress: Progress = lambda text: None,
    turns: int = 1,
    bytes_rotated: int | None = None,
    modes: Mapping[int, str] | None = None,
    duty: float = 1.0,
    keep_samples: bool = False,
) -> Curve:
    """T(N) of a forward from N0 to the last of `positions`; N0 is added if they lack it.

    turns: forwards that the banks of weights take in turn. bytes_rotated: bytes read before one is read again; None if
    the forward does not say. modes: graph mode of each N. duty: share of the time that the device may be busy; below 1
    it rests between rounds. An N whose forward can't be built or raises is left out with its reason and the others go on.
    An engine that dies ends the sweep: the curve so far is invalid and has the engine's last lines. Raises Interrupted on
    Ctrl-C, with the curve so far.
    """
    search = _Search(forward, device, protocol, tolerance, baseline_positions, seed, progress, turns, duty)
    partial = False
    died: EngineDied | None = None
    try:
        search.run(sorted({baseline_positions, *positions}))
    except KeyboardInterrupt:
        partial = True
    except EngineDied as death:
        died = death
    curve = search.curve(kernel, bytes_rotated, dict(modes or {}), partial or died is not None, keep_samples)
    if died is not None:
        return replace(curve, invalid=(str(died), *curve.invalid), log=died.log, died=True, partial=False)
    if partial:
        raise Interrupted(curve)
    return curve


def sweep_module(
    prepared: Prepared,
    positions: Collection[int],
    device: Device,
    baseline_positions: int,
    seed: int,
    protocol: Protocol = CALIBRATION,
) -> Curve:
    """T(N) of a module that something else is made from: a calibration, or a model's sum. No search for a boundary."""
    return sweep(
        prepared.forward,
        positions,
        device,
        protocol,
        baseline_positions=baseline_positions,
        seed=seed,
        turns=prepared.turns,
        bytes_rotated=prepared.bytes_rotated,
    )


class _Search:
    """What is known of a curve while it is measured: forwards, samples, ratios to N0, and what has been spent."""

    def __init__(
        self,
        forward: Callable[[int], Forward],
        device: Device,
        protocol: Protocol,
        tolerance: float,
        base: int,
        seed: int,
        progress: Progress,
        turns: int,
        duty: float,
    ) -> None:
        self._forward, self._device, self._protocol, self._progress = forward, device, protocol, progress
        self._limit, self._base, self._turns, self._duty = 1 + tolerance, base, turns, duty
        self._random = random.Random(seed)  # noqa: S311  # the order of a round, not a secret
        self._watch = trust.Watch(device)
        self._started = device.now()
        self._runs: dict[int, Forward] = {}
        self._refused: dict[int, str] = {}
        self._samples: dict[int, list[float]] = {}
        self._ratios: dict[int, list[float]] = {}
        self._unsettled: list[int] = []
        self._rounds = self._forwards = self._warmups = 0

    def run(self, grid: list[int]) -> None:
        """Measure the grid, and with `refine` whatever else the boundary needs. Stops early at the end of the budget."""
        if not self._prepare(self._base):
            return
        self._watch.warm()
        self._measure(grid)
        if not self._protocol.refine:
            return
        allowed = self._protocol.share * PAPER_FORWARDS * (grid[-1] - self._base + 1)
        while (missing := self._between_crossings()) and self._may_spend(allowed):
            self._measure(missing)
        self._measure(self._fill(grid[-1]))
        while (missing := self._between_crossings()) and self._may_spend(allowed):
            self._measure(missing)
        rounds = 0
        while (still := self._open()) and rounds < self._protocol.max_rounds and self._may_spend(allowed):
            self._round(still[:CLOSING])
            rounds += 1

    def _prepare(self, n: int) -> bool:
        """Build and warm up the forward of an N, once; False where the kernel refuses it."""
        if n in self._refused:
            return False
        if n in self._runs:
            return True
        started = self._device.now()
        try:
            run, forwards = self._warmed(n)
        except (*REFUSALS, Unsupported) as error:
            self._refused[n] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if n in self._refused:
            # The error is gone, and with it the frames that held what was allocated: the next N may need the memory.
            self._device.clean()
            return False
        self._warmups += forwards
        self._rest(started)
        self._runs[n], self._samples[n], self._ratios[n] = run, [], []
        return True

    def _warmed(self, n: int) -> tuple[Forward, int]:
        """The forward of an N, and how many forwards warmed it up. Raises what the kernel raises."""
        run = self._device.ready(self._forward(n), self._turns)
        if self._protocol.warmup is None:
            forwards, settled = trust.settle(self._device, run)
            self._unsettled += [] if settled else [n]
            return run, forwards
        for _ in range(self._protocol.warmup):
            self._device.time_us(run)
        return run, self._protocol.warmup

    def _measure(self, positions: Sequence[int]) -> None:
        """As many rounds as the protocol asks for at least; N that a round decides need not wait for a later phase."""
        wanted = [n for n in positions if n != self._base and self._prepare(n)]
        if not wanted:
            return
        for done in range(self._protocol.min_rounds if self._protocol.adaptive else self._protocol.max_rounds):
            # Every N gets a few rounds, whatever the budget: a point without an interval helps nobody.
            if done >= self._protocol.min_rounds and self._seconds() > self._protocol.budget_s:
                return
            self._round(wanted)

    def _round(self, positions: Sequence[int]) -> None:
        """One sample of every N, in a new order, each beside one of N0."""
        self._rounds += 1
        self._progress(f"round {self._rounds}, {len(positions)} of {len(self._runs)} positions open")
        started = self._device.now()
        order = list(positions)
        self._random.shuffle(order)
        adaptive = self._protocol.adaptive
        chunk = CHUNK if adaptive else len(order)
        forwards = self._protocol.forwards
        if adaptive:
            # Few open N get more forwards a sample: the sample of N0 beside them costs the same.
            forwards *= max(1, CHUNK // len(order))
        for first in range(0, len(order), chunk):
            base = self._sample(self._base, max(BASE_FORWARDS, forwards) if adaptive else forwards)
            for n in order[first : first + chunk]:
                self._ratios[n].append(self._sample(n, forwards) / base if base > 0 else 0.0)
        self._watch.round()
        self._rest(started)

    def _rest(self, since: float) -> None:
        """As long as it takes for the device to have been busy for no more than its share of the time."""
        if self._duty < 1:
            self._device.rest((self._device.now() - since) * (1 / self._duty - 1))

    def _sample(self, n: int, forwards: int) -> float:
        latency = median(self._device.time_us(self._runs[n]) for _ in range(forwards))
        self._forwards += forwards
        self._samples[n].append(latency)
        return latency

    def _state(self, n: int) -> bool | None:
        """Whether an N is within the limit; None while it is open."""
        low, high = median_interval(self._ratios[n], self._protocol.confidence)
        return True if high <= self._limit else False if low > self._limit else None

    def _open(self) -> list[int]:
        """The N that noise leaves open, those that decide N_max first: from the last one down to the last sure one."""
        states = {n: self._state(n) for n in self._runs if n > self._base}
        sure = max((n for n, within in states.items() if within), default=self._base)
        still = [n for n, within in states.items() if within is None]
        return sorted((n for n in still if n > sure), reverse=True) + sorted(n for n in still if n < sure)

    def _between_crossings(self) -> list[int]:
        """The middle of every gap across which the curve leaves the limit or comes back."""
        within = {n: median(r) <= self._limit for n, r in self._ratios.items() if n > self._base and r}
        within |= dict.fromkeys((n for n in self._refused if n > self._base), False) | {self._base: True}
        return [(a + b) // 2 for a, b in pairwise(sorted(within)) if within[a] != within[b] and b - a > 1]

    def _fill(self, end: int) -> list[int]:
        """The N of the range that were not looked at, evenly thinned to what a quarter of the time that is left allows."""
        missing = [n for n in range(self._base + 1, end + 1) if n not in self._runs and n not in self._refused]
        if not missing or len(missing) > self._protocol.fill:
            return []
        slowest = max(median(s) for s in self._samples.values() if s) / 1e6
        if not slowest > 0:
            return []  # A timer that reads nothing: the verdict says so.
        each = slowest * (self._protocol.min_rounds * 2 + 2 * trust.BATCH)
        affordable = int((self._protocol.budget_s - self._seconds()) / 4 / each)
        if affordable < 1:
            return []
        return missing[:: -(-len(missing) // affordable)]

    def _may_spend(self, allowed: float) -> bool:
        return self._forwards + self._warmups < allowed and self._seconds() < self._protocol.budget_s

    def _seconds(self) -> float:
        return self._device.now() - self._started

    def curve(
        self, kernel: str, bytes_rotated: int | None, modes: dict[int, str], partial: bool, keep_samples: bool
    ) -> Curve:
        """What has been measured, and what speaks against it."""
        if self._base in self._refused or self._base not in self._runs:
            reason = f"T(N0 = {self._base}) can't be measured: {self._refused.get(self._base, 'interrupted')}"
            return Curve(
                (), self._base, "measured", "", kernel, (reason,), self._refused, partial, timer=self._device.timer
            )
        reasons, figures = self._watch.verdict(self._samples[self._base])
        if self._unsettled:
            reasons.append(
                f"the timings did not settle in {trust.MAX_BATCHES * trust.BATCH} forwards at N = {_list(self._unsettled)}"
            )
        if any(not latency > 0 for n, s in self._samples.items() if n != self._base for latency in s):
            reasons.append("the timer read 0 or less: it stands still or runs backwards")
        points = _points(self._base, self._samples, self._ratios, self._protocol.confidence)
        warm, figures["cold_cache"] = trust.cold_cache(bytes_rotated, self._device.cache_bytes)
        reasons += [warm] if warm else []
        reasons += [r for r in (trust.graph_modes(modes), trust.does_not_depend(points, self._base)) if r]
        kernels: dict[int, str] = {}
        if not partial:
            checked = [
                n for n in (self._base, max((p.positions for p in points), default=self._base)) if n in self._runs
            ]
            bound, host = trust.host_bound(self._device, {n: self._runs[n] for n in dict.fromkeys(checked)})
            reasons += [bound] if bound else []
            figures |= host
            kernels, figures["profile"] = _profile(self._device, self._runs)
        return Curve(
            points=tuple(points),
            baseline_positions=self._base,
            kind="measured",
            source=self._device.title,
            kernel=kernel,
            invalid=tuple(reasons),
            unsupported=self._refused,
            partial=partial,
            counts={
                "protocol": self._protocol.name,
                "rounds": self._rounds,
                "forwards": self._forwards,
                "warmups": self._warmups,
                "positions": len(points),
                "seconds": round(self._seconds(), 2),
            },
            trust=figures,
            timer=self._device.timer,
            kernels=kernels,
            modes=modes,
            samples={n: tuple(s) for n, s in self._samples.items()} if keep_samples else {},
        )


def _points(
    base: int, samples: Mapping[int, Sequence[float]], ratios: Mapping[int, Sequence[float]], confidence: float
) -> list[Point]:
    """The points of these samples and ratios to N0, without those that a broken timer read as nothing."""
    of_base = [s for s in samples[base] if s > 0]
    if not of_base:
        return []
    points = [Point(base, median(of_base), 1.0, 1.0)]
    for n, of_n in ratios.items():
        if of_n and n != base and median(samples[n]) > 0:
            points.append(make_point(n, samples[n], of_n, confidence))
    return sorted(points, key=lambda p: p.positions)


def _profile(device: Device, runs: Mapping[int, Forward]) -> tuple[dict[int, str], str]:
    """The kernels of each N by one untimed forward, or the one reason why there are none; timing does not need them."""
    if device.kernels is None:
        return {}, "not profiled: this device has no profiler here"
    names = {}
    try:
        for n in sorted(runs)[:PROFILED]:
            names[n] = " + ".join(dict.fromkeys(device.kernels(runs[n])))
    except RuntimeError as error:
        return {}, f"not profiled: {error}".splitlines()[0][:200]
    return names, f"{len(names)} positions"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
