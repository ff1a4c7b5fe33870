"""How a curve is sampled. A round visits N0 and every N that is still open, in a shuffled order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Protocol:
    """warmup: forwards at each N before timing. A sample is the median of `forwards` forwards; N0 opens every round.

    adaptive: an N is done when its interval is clear of the limit, after min_rounds; otherwise all rounds are run.
    """

    name: str
    warmup: int
    forwards: int
    min_rounds: int
    max_rounds: int
    budget_s: float
    adaptive: bool


PROTOCOLS = {
    p.name: p
    for p in (
        # arXiv 2605.30851, appendix C.1.3: 50 warm-ups, 10 rounds of 200, median of the medians.
        Protocol("paper", 50, 200, 10, 10, float("inf"), adaptive=False),
        Protocol("adaptive", 2, 3, 8, 40, 30.0, adaptive=True),
        Protocol("quick", 1, 1, 6, 12, 5.0, adaptive=True),
    )
}
