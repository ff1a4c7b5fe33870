"""Idle-compute (roofline) baseline: N_idle solves AI(N_idle) = balance, per module.

Source: arXiv 2605.30851, sections 2.3 and 3.x, derivations in appendix B. The dense formula is printed there. The MoE
and attention formulas follow from the FLOPs and bytes in their docstrings. Infinity means unbounded: no N makes the
module compute bound.
"""

from __future__ import annotations

import math

from pytest_nfp.principle.checks import require_positive

ACTIVATION_TERMS = 4
"""c of the MoE formula: activation elements of (d + f) moved per routed token, for two GEMMs, read and written."""


def n_idle_dense(balance: float, bytes_per_element: float, batch: int = 1) -> float:
    """Dense FFN (two GEMMs, weights dominate): balance * s / (2 * b).

    balance: FLOP per byte; bytes_per_element: s of the weights; batch: requests b. Returns positions per request.
    """
    require_positive(balance=balance, bytes_per_element=bytes_per_element, batch=batch)
    return balance * bytes_per_element / (2 * batch)


def n_idle_attention(balance: float, bytes_per_element: float, context: int, group: float = 1) -> float:
    """Attention core over `context` cached tokens; `group` = query heads per KV head (1 for MHA).

    FLOPs = 4*b*N*L*d, bytes = s*b*(2*L*d_kv + 2*N*d), so N = (balance*s*L/group) / (2L - balance*s);
    math.inf when 2L <= balance*s. The batch cancels.
    """
    require_positive(balance=balance, bytes_per_element=bytes_per_element, context=context, group=group)
    free = balance * bytes_per_element
    if 2 * context <= free:
        return math.inf
    return (free * context / group) / (2 * context - free)


def n_idle_moe(
    balance: float,
    bytes_per_element: float,
    hidden: int,
    expert_width: int,
    top_k: int,
    active_experts: int,
    batch: int = 1,
) -> float:
    """MoE FFN, two GEMMs per expert of shape hidden x expert_width, `active_experts` of them read.

    FLOPs = 4*b*N*k*d*f, bytes = s*(2*E_act*d*f + c*b*N*k*(d + f)) with c = 4, so
    b*N*k = 2*balance*s*E_act*d*f / (4*d*f - c*balance*s*(d + f)); math.inf when the denominator is not positive.
    E_act is E under balanced routing (past N0) and k under skewed routing.
    """
    require_positive(
        balance=balance,
        bytes_per_element=bytes_per_element,
        hidden=hidden,
        expert_width=expert_width,
        top_k=top_k,
        active_experts=active_experts,
        batch=batch,
    )
    weights = hidden * expert_width
    free = balance * bytes_per_element
    denominator = 4 * weights - ACTIVATION_TERMS * free * (hidden + expert_width)
    if denominator <= 0:
        return math.inf
    return 2 * free * active_experts * weights / denominator / (batch * top_k)
