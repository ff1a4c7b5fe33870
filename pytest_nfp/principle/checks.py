"""Argument checks that the formulas share: a wrong number is named where it enters."""

from __future__ import annotations

import math


def require_positive(**values: float) -> None:
    """Raise ValueError naming the first value that is not a finite number above zero."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a finite number above 0, got {value!r}")


def require_tolerance(tolerance: float) -> None:
    """Raise ValueError unless the tolerance (epsilon) is a finite number of at least 0."""
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance must be a finite number of at least 0, got {tolerance!r}")
