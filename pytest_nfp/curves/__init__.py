"""T(N) as points with their intervals: what is measured, recorded, or read from another tool's file."""

from pytest_nfp.curves.curve import Curve

__all__ = ["Curve"]
