"""Signs that a measurement is not to be trusted: other processes' load, and drift of T(N0) within the run."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from pytest_nfp.devices import Device

MAX_OTHER_LOAD = 0.25
"""Share of the processors that other processes may use before ratios stop meaning anything."""
MAX_DRIFT = 0.25
"""Relative change of T(N0) from the first third of a run to its last."""


class Watch:
    """Reads the device's load when it is made and again for the verdict."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._start = device.load()

    def verdict(self, baseline_us: Sequence[float]) -> tuple[list[str], dict[str, Any]]:
        """Reasons against the measurement, and the figures that they rest on, for the record."""
        wall, busy, own = (after - before for before, after in zip(self._start, self._device.load(), strict=True))
        cores = self._device.identity.get("cores", 1)
        others = max(0.0, busy - own) / (wall * cores) if wall > 0 else 0.0
        drift = 0.0
        if len(baseline_us) >= 6:
            third = len(baseline_us) // 3
            first, last = median(baseline_us[:third]), median(baseline_us[-third:])
            drift = last / first - 1
        reasons = []
        if others > MAX_OTHER_LOAD:
            reasons.append(
                f"other processes used {others:.0%} of the processors while this was measured (at most"
                f" {MAX_OTHER_LOAD:.0%}): end them and run again"
            )
        if abs(drift) > MAX_DRIFT:
            reasons.append(f"T(N0) drifted by {drift:+.0%} within the run (at most {MAX_DRIFT:.0%})")
        return reasons, {"other_load": round(others, 3), "drift": round(drift, 3)}
