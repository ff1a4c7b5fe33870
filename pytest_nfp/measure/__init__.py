"""From a forward to a curve: protocols, sampling, intervals, and whether the measurement can be trusted."""

from pytest_nfp.measure.protocol import PROTOCOLS, Protocol
from pytest_nfp.measure.sweep import sweep

__all__ = ["PROTOCOLS", "Protocol", "sweep"]
