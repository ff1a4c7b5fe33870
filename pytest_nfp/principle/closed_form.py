"""The Near-Free Parallelism principle: each module has a boundary, and the module with the smallest one limits.

Source: arXiv 2605.30851, section 4. Every term is a whole number of positions, rounded down and at least 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pytest_nfp.principle.checks import require_positive
from pytest_nfp.principle.idle_compute import n_idle_dense
from pytest_nfp.principle.routing import Routing

Limit = Literal["dense", "moe", "attention", "branch"]


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """The terms of the principle in positions. A term is None where the model has no such module."""

    dense: int | None
    moe: int | None
    attention: int | None
    branch: int | None
    bound: int
    """The smallest term."""
    limiting: str
    """Name of the smallest term (a Limit)."""
    baseline_positions: int = 1
    """N0. N_max is not defined below it."""

    @property
    def n_max(self) -> int:
        """The bound, or N0 if the bound lies below it.

        N_max is the largest N >= N0 within tolerance of T(N0).
        """
        return max(self.bound, self.baseline_positions)

    @property
    def is_near_free(self) -> bool:
        """Whether any position past N0 is near-free. A bound below N0 means that not even N0 is."""
        return self.bound >= self.baseline_positions


def whole_positions(value: float) -> int:
    """Round a boundary down to a whole number of positions, at least 1. The value must be finite."""
    # A product such as 37 * 2 / 2 may come out an ulp too low: it is raised a little before the floor.
    return max(1, math.floor(value * (1 + 1e-12)))


def dense_term(balance: float, bytes_per_element: float, batch: int = 1) -> int:
    """Dense FFN: balance * s / (2b)."""
    return whole_positions(n_idle_dense(balance, bytes_per_element, batch))


def moe_term(routing: Routing, block_m: int, experts: int, top_k: int, batch: int = 1) -> int:
    """MoE FFN: E * M_moe / (k*b) balanced (upper bound), M_moe / b skewed (lower bound).

    Raises ValueError for any other routing: the closed form has no term for it.
    """
    if routing not in ("balanced", "skewed"):
        raise ValueError(f"the closed form knows balanced and skewed routing, not {routing}")
    require_positive(block_m=block_m, experts=experts, top_k=top_k, batch=batch)
    if routing == "balanced":
        return whole_positions(experts * block_m / (top_k * batch))
    return whole_positions(block_m / batch)


def branch_term(branch_limit: int, batch: int = 1) -> int:
    """Branch of the rule: tau / b. Past tau tokens the backend picks another tile, and M_moe no longer holds."""
    require_positive(branch_limit=branch_limit, batch=batch)
    return whole_positions(branch_limit / batch)


def attention_term(query_tile: int, packed_group: int = 1) -> int:
    """M_attn query positions per request; a tile that packs GQA heads holds query_tile / group of them."""
    require_positive(query_tile=query_tile, packed_group=packed_group)
    return whole_positions(query_tile / packed_group)


def closed_form(
    *,
    dense: int | None = None,
    moe: int | None = None,
    attention: int | None = None,
    branch: int | None = None,
    baseline_positions: int = 1,
) -> ClosedForm:
    """Combine the terms that apply: min(dense, attention) for dense models, min(moe, branch, attention) for MoE.

    baseline_positions: N0, which is that of the experts where there are any. On a tie the module comes before the
    branch that caps it. Raises ValueError if no term is given.
    """
    terms: dict[Limit, int] = {}
    for name, value in (("dense", dense), ("moe", moe), ("attention", attention), ("branch", branch)):
        if value is not None:
            require_positive(**{name: value})
            terms[name] = value  # type: ignore[index]  # the literal names above are Limit's own
    if not terms:
        raise ValueError("the closed form needs at least one of the terms dense, moe, attention, branch")
    limiting = min(terms, key=lambda name: terms[name])
    return ClosedForm(dense, moe, attention, branch, terms[limiting], limiting, baseline_positions)
