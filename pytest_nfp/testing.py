"""A simulated forward: a curve, a noise model and a virtual clock, so that a thousand experiments take seconds.

    machine = Simulated(staircase(tile=16), Noise(jitter=0.02), seed=1)
    curve = sweep(machine.forward, [1, 16, 17, 64], machine.device(), PROTOCOLS["adaptive"])

For tests of this package and of whoever builds on it. Nothing waits: time passes on the virtual clock alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_nfp.devices import Device, Forward, Reading

Latency = Callable[[int], float]
"""N -> microseconds, without noise."""


@dataclass(frozen=True, slots=True)
class Noise:
    """What a real machine adds. Every figure is a share unless it says otherwise.

    jitter: spread (sigma of the logarithm) of each forward. spikes: how many forwards take `spike` times as long.
    drift: growth of all latencies for each second of the run. slow_mode: factor of the slower of two states, one of which
    a run is in from its beginning (a bimodal machine). cold: extra of the first forwards, which halves every `cold_forwards`.
    throttle: growth of all latencies once the device has been busy for `throttle_after_s` without resting as long.
    """

    jitter: float = 0.0
    spikes: float = 0.0
    spike: float = 5.0
    drift: float = 0.0
    slow_mode: float = 1.0
    cold: float = 0.0
    cold_forwards: int = 3
    throttle: float = 0.0
    throttle_after_s: float = 0.05


@dataclass
class Simulated:
    """One machine with one kernel. `calls` counts every forward, warm-ups too; `seconds` is the virtual clock.

    refuses: N -> why the kernel raises there. reading: figures of the Readings beside the clock, such as others=(4711,).
    """

    latency: Latency
    noise: Noise = Noise()
    seed: int = 0
    clock_mhz: float = 1980.0
    refuses: Mapping[int, str] | None = None
    reading: Mapping[str, Any] | None = None
    prepare: Callable[[Any, int, int], Any] | None = None
    """(case, seed, cache bytes) -> Prepared: the forwards of cases, for a test that asks a session or a calibration."""
    calls: int = 0
    seconds: float = 0.0
    _busy: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311  # noise, not a secret
        self._mode = self.noise.slow_mode if self._random.random() < 0.5 else 1.0

    def forward(self, positions: int) -> Forward:
        """What `sweep` asks for. Raises RuntimeError where the kernel refuses."""
        if self.refuses and positions in self.refuses:
            raise RuntimeError(self.refuses[positions])
        return lambda: self.latency(positions)

    def device(self, **changed: Any) -> Device:
        """The machine as a Device; keyword arguments replace its parts."""
        parts: dict[str, Any] = {
            "gpu": "cpu",
            "title": "simulated",
            "identity": {"cores": 2},
            "time_us": self._time_us,
            "cache_bytes": 1,
            "torch_release": "2.13.0",
            "timer": "simulated",
            "read": self._read,
            "known_length": lambda us: lambda: us,
            "now": lambda: self.seconds,
            "rest": self._rest,
            "prepare": self.prepare,
        }
        return Device(**parts | changed)

    @property
    def _throttled(self) -> bool:
        return bool(self.noise.throttle) and self._busy > self.noise.throttle_after_s

    def _time_us(self, run: Forward) -> float:
        exact = run()
        assert isinstance(exact, float)
        n, r = self.noise, self._random
        factor = self._mode * (1 + n.drift * self.seconds)
        if n.jitter:
            factor *= r.lognormvariate(0, n.jitter)
        if n.spikes and r.random() < n.spikes:
            factor *= n.spike
        if n.cold:
            factor *= 1 + n.cold * 0.5 ** (self.calls / n.cold_forwards)
        if self._throttled:
            factor *= 1 + n.throttle
        self.calls += 1
        self.seconds += exact * factor / 1e6
        self._busy += exact * factor / 1e6
        return exact * factor

    def _rest(self, seconds: float) -> None:
        self.seconds += seconds
        self._busy = max(0.0, self._busy - seconds)

    def _read(self) -> Reading:
        clock = self.clock_mhz / (1 + self.noise.throttle) if self._throttled else self.clock_mhz
        return Reading(**{"wall_s": self.seconds, "clock_mhz": clock} | dict(self.reading or {}))


def staircase(tile: int = 16, height: float = 0.5, base_us: float = 100.0) -> Latency:
    """`height` more for every further tile of positions."""
    return lambda n: base_us * (1 + height * ((n - 1) // tile))


def roofline(balance: float = 64.0, overlap: float = 8.0, base_us: float = 100.0) -> Latency:
    """Memory time is constant, compute time reaches it at `balance` positions; a large `overlap` makes a sharp knee."""
    return lambda n: base_us * (1 + (n / balance) ** overlap) ** (1 / overlap)


def with_hole(latency: Latency, first: int, last: int, factor: float = 1.0) -> Latency:
    """Another kernel from first to last: T(1) times `factor` there."""
    return lambda n: latency(1) * factor if first <= n <= last else latency(n)
