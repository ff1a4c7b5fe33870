"""How many rows each expert gets: balanced, skewed and random routing (arXiv 2605.30851, appendix C.3.1)."""

from __future__ import annotations

from typing import Literal

from pytest_nfp.principle.checks import require_positive

Routing = Literal["balanced", "skewed"]


def baseline_positions(routing: Routing | None, experts: int = 1, top_k: int = 1, batch: int = 1) -> int:
    """N0: 1, except for balanced MoE, where it is the smallest N that activates every expert, ceil(E / (b*k))."""
    require_positive(experts=experts, top_k=top_k, batch=batch)
    if routing == "balanced":
        return -(-experts // (batch * top_k))
    return 1


def active_experts(routing: Routing, tokens: int, experts: int, top_k: int) -> int:
    """Experts touched by `tokens` rows: min(E, tokens*k) balanced, k skewed."""
    require_positive(tokens=tokens, experts=experts, top_k=top_k)
    return min(experts, tokens * top_k) if routing == "balanced" else min(top_k, experts)


def rows_per_expert(routing: Routing, tokens: int, experts: int, top_k: int) -> list[tuple[int, int]]:
    """(experts, rows) groups of the active experts; rows over all experts add up to tokens*k.

    Balanced rows differ by one at most; skewed sends every token to the same k experts.
    """
    active = active_experts(routing, tokens, experts, top_k)
    if routing == "skewed":
        return [(active, tokens * top_k // active)]
    rows, more = divmod(tokens * top_k, active)
    return [group for group in ((more, rows + 1), (active - more, rows)) if group[0]]


def expected_active_experts(tokens: int, experts: int, top_k: int) -> float:
    """Expected experts touched by `tokens` independent uniform top-k draws: E * (1 - (1 - k/E)**n)."""
    require_positive(tokens=tokens, experts=experts, top_k=top_k)
    if top_k > experts:
        raise ValueError(f"top_k must be at most experts ({experts}), got {top_k}")
    return experts * (1 - (1 - top_k / experts) ** tokens)
