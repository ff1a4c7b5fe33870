"""How a curve is sampled: warm-up, rounds, when an N is decided, what the search may spend."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_nfp.curves.statistics import CONFIDENCE

PAPER_FORWARDS = 50 + 10 * 200
"""Forwards that the reference protocol spends at each N."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """One protocol.

    warmup: forwards at each N before timing; None: until the timings settle. forwards: timed forwards a sample, which is
    their median. A round samples every open N once. adaptive: an N is closed when the interval of its ratio, at
    `confidence`, is clear of the limit, after min_rounds; without it all rounds are run on the grid as it is given.
    refine: N are added until the crossing is known to the position. fill: then the other N of the range are looked at
    too, for holes, if there are no more than this. share: forwards that may be spent, as a share of what the reference
    protocol spends on every N of the range.
    """

    name: str
    warmup: int | None
    forwards: int
    min_rounds: int
    max_rounds: int
    budget_s: float
    adaptive: bool
    confidence: float = CONFIDENCE
    refine: bool = False
    fill: int = 0
    share: float = math.inf


PROTOCOLS = {
    p.name: p
    for p in (
        # arXiv 2605.30851, appendix C.1.3: 50 warm-ups, 10 rounds of 200, median of the medians.
        Protocol("paper", 50, 200, 10, 10, math.inf, adaptive=False),
        # Eleven rounds are the fewest whose extremes cover a median with 99.9%, which leaves room for looking often.
        Protocol("adaptive", None, 1, 11, 10**5, 40.0, True, 0.999, refine=True, fill=192, share=1 / 21),
        Protocol("quick", None, 1, 6, 24, 5.0, adaptive=True, refine=True, share=1 / 100),
    )
}
CALIBRATION = Protocol("calibration", None, 3, 10, 10, math.inf, adaptive=False)
"""Every N of a fixed grid: what a fit is made from."""
CPU_CALIBRATION = Protocol("cpu-calibration", 0, 1, 5, 9, 0.8, adaptive=False)
"""The same on a CPU, where a forward takes milliseconds and each N has run before: rounds for as long as a curve may take, five at least."""
