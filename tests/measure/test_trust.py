"""Each sign against a measurement, planted."""

from __future__ import annotations

import pytest

from pytest_nfp.measure import PROTOCOLS, sweep

from .fakes import FakeDevice, staircase


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (FakeDevice(other_load=0.4), "other processes used 40% of the processors"),
        (FakeDevice(drift=0.004), r"T\(N0\) drifted by \+\d+% within the run"),
        (FakeDevice(drift=-0.002), r"T\(N0\) drifted by -\d+% within the run"),
    ],
)
def test_a_planted_fault_makes_the_curve_invalid(device: FakeDevice, reason: str) -> None:
    """Load and drift, both ways."""
    curve = sweep(staircase(), [1, 2, 4, 8, 16, 17], device.device(), PROTOCOLS["adaptive"])
    assert len(curve.invalid) == 1
    import re

    assert re.match(reason, curve.invalid[0])


def test_a_quiet_machine_is_trusted() -> None:
    """Little load and noise leave nothing against the measurement, and the record holds the figures."""
    curve = sweep(staircase(), [1, 17], FakeDevice(0.02, other_load=0.05).device(), PROTOCOLS["adaptive"])
    assert curve.invalid == ()
    assert curve.trust["other_load"] == 0.05
