"""How many rows each expert gets.

balanced: rows differ by one at most. skewed: every token takes the same k experts. Both are those of arXiv 2605.30851,
appendix C.3.1. uniform: every token draws k experts independently. power-law-A: expected loads follow the density
x**-A, as AIConfigurator's collector draws them. A replay has the experts of recorded tokens.

The groups of uniform, power-law and replayed routing are expectations: their numbers of experts need not be whole.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pytest_nfp.principle.checks import require_positive

POWER_LAW = "power-law-"
NEGLIGIBLE = 1e-9
"""Expected numbers of experts up to this one are left out."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The expert ids of recorded tokens, in their order."""

    tokens: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("a replayed routing needs at least one token")

    def __str__(self) -> str:
        """A name that no other trace has."""
        return f"trace-{hashlib.sha256(repr(self.tokens).encode()).hexdigest()[:8]}"

    def check(self, experts: int, top_k: int) -> None:
        """Raise ValueError if a token has fewer than k experts, or an expert that the model does not have."""
        if (fewest := min(map(len, self.tokens))) < top_k:
            raise ValueError(f"the trace has {fewest} experts a token, the model takes {top_k}")
        if (largest := max(map(max, self.tokens))) >= experts:
            raise ValueError(f"the trace routes to expert {largest}: the model has {experts}")


Routing = str | Replay
"""balanced, skewed, uniform, power-law-A with an exponent A, or a Replay."""


def check_routing(name: str) -> str:
    """The name of a routing, with hyphens. Raises ValueError for any other name."""
    name = name.replace("_", "-")
    if name in ("balanced", "skewed", "uniform"):
        return name
    if name.startswith(POWER_LAW):
        try:
            exponent = float(name.removeprefix(POWER_LAW))
        except ValueError:
            exponent = math.nan
        if math.isfinite(exponent) and exponent > 1:
            return name
        raise ValueError(f"{name}: write power-law-A with an exponent A above 1, such as power-law-1.2")
    raise ValueError(f"unknown routing {name!r}: one of balanced, skewed, uniform, power-law-A (such as power-law-1.2)")


def baseline_positions(routing: Routing | None, experts: int = 1, top_k: int = 1, batch: int = 1) -> int:
    """N0: the smallest N that activates every expert, ceil(E / (b*k)), for balanced MoE; otherwise 1."""
    require_positive(experts=experts, top_k=top_k, batch=batch)
    if routing == "balanced":
        return -(-experts // (batch * top_k))
    return 1


def active_experts(routing: Routing, tokens: int, experts: int, top_k: int) -> float:
    """(Expected) number of experts that `tokens` rows touch: min(E, tokens*k) balanced, k skewed."""
    require_positive(tokens=tokens, experts=experts, top_k=top_k)
    if routing == "balanced":
        return min(experts, tokens * top_k)
    if routing == "skewed":
        return min(top_k, experts)
    return sum(count for count, _ in rows_per_expert(routing, tokens, experts, top_k))


@lru_cache(maxsize=16384)
def rows_per_expert(routing: Routing, tokens: int, experts: int, top_k: int) -> Sequence[tuple[float, int]]:
    """Groups (experts, rows) of the active experts.

    The rows of all experts add up to tokens*k, for some routings in expectation only. Raises ValueError for an unknown
    routing, and for more tokens than a replay has.
    """
    require_positive(tokens=tokens, experts=experts, top_k=top_k)
    if isinstance(routing, Replay):
        return _replayed(routing, tokens, experts, top_k)
    if routing == "skewed":
        active = min(top_k, experts)
        return [(active, tokens * top_k // active)]
    if routing == "balanced":
        active = min(experts, tokens * top_k)
        rows, remainder = divmod(tokens * top_k, active)
        return [group for group in ((remainder, rows + 1), (active - remainder, rows)) if group[0]]
    if routing == "uniform":
        return _uniform(tokens, experts, top_k)
    return _power_law(float(check_routing(routing).removeprefix(POWER_LAW)), tokens, experts, top_k)


def _uniform(tokens: int, experts: int, top_k: int) -> list[tuple[float, int]]:
    """An expert's rows are binomial: a token takes it with probability k/E."""
    if top_k > experts:
        raise ValueError(f"top_k must be at most experts ({experts}), got {top_k}")
    share = top_k / experts
    if share == 1:
        return [(experts, tokens)]
    log_hit, log_miss = math.log(share), math.log1p(-share)
    groups = []
    for rows in range(1, tokens + 1):
        ways = math.lgamma(tokens + 1) - math.lgamma(rows + 1) - math.lgamma(tokens - rows + 1)
        count = experts * math.exp(ways + rows * log_hit + (tokens - rows) * log_miss)
        if count > NEGLIGIBLE:
            groups.append((count, rows))
        elif rows > tokens * share:
            break
    return groups


def _power_law(exponent: float, tokens: int, experts: int, top_k: int) -> list[tuple[float, int]]:
    """Loads at the quantiles (i + 1/2)/E of the density x**-A, scaled to tokens*k and rounded.

    The range of the density is AIConfigurator's (collector/helper.py): 1 to 0.8 tokens, but 0.01 to 2 while tokens*k is
    at most E. An expert has at most one row of each token.
    """
    total = tokens * top_k
    low, high = (1.0, max(1.0, 0.8 * tokens)) if total > experts else (0.01, 2.0)
    a, b = low ** (1 - exponent), high ** (1 - exponent)
    loads = [(a + (b - a) * (i + 0.5) / experts) ** (1 / (1 - exponent)) for i in range(experts)]
    scale = total / sum(loads)
    rows = [min(tokens, round(load * scale)) for load in loads]
    # Rounding and the cap leave a few rows too many or too few. The smallest loads take one more, the largest give one.
    while (short := total - sum(rows)) != 0:
        order = sorted(range(experts), key=lambda i: rows[i], reverse=short < 0)
        for i in order[: abs(short)]:
            if short > 0 and rows[i] < tokens:
                rows[i] += 1
            elif short < 0 and rows[i]:
                rows[i] -= 1
    return _groups(rows)


def _replayed(replay: Replay, tokens: int, experts: int, top_k: int) -> list[tuple[float, int]]:
    """The mean over consecutive windows of `tokens` tokens."""
    replay.check(experts, top_k)
    windows = len(replay.tokens) // tokens
    if not windows:
        raise ValueError(f"the trace has {len(replay.tokens)} tokens: it can't say how {tokens} are routed")
    total: Counter[int] = Counter()
    for i in range(windows):
        loads = Counter(expert for token in replay.tokens[i * tokens : (i + 1) * tokens] for expert in token[:top_k])
        total.update(loads.values())
    return [(count / windows, rows) for rows, count in sorted(total.items(), reverse=True)]


def _groups(rows: Iterable[int]) -> list[tuple[float, int]]:
    return [(count, r) for r, count in sorted(Counter(rows).items(), reverse=True) if r]
