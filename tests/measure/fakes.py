"""A device whose clock is a formula: what a sweep makes of it is known beforehand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count

from pytest_nfp.devices import Device


class FakeDevice:
    """time_us returns the forward's own value, times noise, times drift."""

    def __init__(self, noise: float = 0.0, drift: float = 0.0, other_load: float = 0.0, seed: int = 0) -> None:
        self.noise, self.drift, self.other_load = noise, drift, other_load
        self.calls = 0
        self._random = random.Random(seed)
        self._clock: Iterator[int] = count()

    def time_us(self, forward: Callable[[], object]) -> float:
        self.calls += 1
        value = forward()
        assert isinstance(value, float)
        return value * (1 + self.drift * self.calls) * self._random.lognormvariate(0, self.noise)

    def load(self) -> tuple[float, float, float]:
        seconds = next(self._clock)
        return float(seconds), seconds * 2 * self.other_load, 0.0

    def device(self) -> Device:
        return Device("cpu", "fake", {"cores": 2}, self.time_us, 1, self.load, "2.13.0")


def staircase(width: int = 16, height: float = 0.5) -> Callable[[int], Callable[[], object]]:
    """T(N) = 100 us, and `height` more for every further tile."""
    return lambda n: lambda: 100.0 * (1 + height * ((n - 1) // width))
