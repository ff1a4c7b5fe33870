"""The paper's deployment lookup: idle compute against the principle, and the view over GPU generations (arXiv 2605.30851)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pytest_nfp import catalog
from pytest_nfp.principle import attention_term, closed_form, dense_term, moe_term, n_idle_dense, n_idle_moe

GPUS = ("h20", "a800", "h800")
"""The paper's platforms."""
QUERY_TILE = 64
"""FlashAttention-2's rows on the KV-cache path, for every head dimension."""
BLOCK_M = 16
"""Rows of vLLM 0.9.1's and SGLang 0.5.9's fused MoE up to E tokens, without a tuned file."""
TOP_K = (8,)
BF16 = 2.0
HIDDEN, WIDTH, EXPERTS = 2048, 512, 256
"""LLaDA-2.1-mini's experts."""


def lookup(gpus: Sequence[str]) -> list[dict[str, Any]]:
    """A row a GPU and module: dense at b = 1, and LLaDA-2.1-mini's experts, balanced and skewed. Raises UnknownName.

    over_prediction: N_idle over the principle's N_max; None where idle compute does not bound it at all.
    """
    rows = []
    for name in gpus:
        gpu = catalog.gpu(name)
        attention = attention_term(QUERY_TILE, 1)
        bound = closed_form(dense=dense_term(gpu.balance, BF16, 1), attention=attention)
        rows.append(_row(gpu.name, "dense, b=1", n_idle_dense(gpu.balance, BF16), bound.n_max, bound.limiting))
        for top_k in TOP_K:
            for kind, active in (("balanced", EXPERTS), ("skewed", top_k)):
                idle = n_idle_moe(gpu.balance, BF16, HIDDEN, WIDTH, top_k, active)
                term = moe_term(kind, BLOCK_M, EXPERTS, top_k, 1)
                bound = closed_form(moe=term, attention=attention, branch=EXPERTS)
                rows.append(_row(gpu.name, f"experts {kind}, k={top_k}", idle, bound.n_max, bound.limiting))
    return rows


def _row(gpu: str, module: str, idle: float, n_max: int, limiting: str) -> dict[str, Any]:
    is_bounded = math.isfinite(idle)
    return {
        "gpu": gpu,
        "module": module,
        "n_idle": round(idle, 1) if is_bounded else None,
        "n_max": n_max,
        "limiting": limiting,
        "over_prediction": round(idle / n_max, 1) if is_bounded else None,
    }


def future() -> list[dict[str, Any]]:
    """Every GPU of the catalog by its balance: idle compute of a dense model against the attention tile, b = 1, BF16."""
    rows = []
    for gpu in sorted(catalog.gpus(), key=lambda g: g.balance):
        idle = n_idle_dense(gpu.balance, BF16)
        rows.append(
            {
                "gpu": gpu.name,
                "balance": round(gpu.balance, 1),
                "n_idle": round(idle, 1),
                "attention": QUERY_TILE,
                "n_max": min(dense_term(gpu.balance, BF16, 1), QUERY_TILE),
                "limiting": "dense" if idle < QUERY_TILE else "attention",
            }
        )
    return rows
