"""The paper's deployment lookup (arXiv 2605.30851).

It compares idle compute with the principle, and gives the view over GPU generations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytest_nfp import catalog
from pytest_nfp.cases import Backend
from pytest_nfp.files import finite
from pytest_nfp.predict import whole_models
from pytest_nfp.principle import dense_term, n_idle_dense
from pytest_nfp.principle.routing import Routing

GPUS = ("h20", "a800", "h800")
"""The paper's platforms."""
BACKEND, ATTENTION = Backend("vllm", "0.9.1"), Backend("flash-attn", "2.8.3")
"""What the paper ran: experts in tiles of 16 rows up to E tokens, and FlashAttention-2's tile of 64 query rows on the
KV-cache path."""
SETUP = f"{BACKEND} and {ATTENTION}"
MODULES: tuple[tuple[str, str, Routing], ...] = (
    ("dense, b=1", "qwen3-8b", "balanced"),
    ("experts balanced, k=8", "llada-2.1-mini", "balanced"),
    ("experts skewed, k=8", "llada-2.1-mini", "skewed"),
)
BF16 = 2.0
QUERY_TILE = 64
"""The attention tile for every GPU in the view over generations: FlashAttention-2's."""


def lookup(gpus: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each GPU and module: a dense model at b = 1, and LLaDA-2.1-mini's experts, balanced and skewed.

    The prediction is that of `nfp predict` for these models with the paper's releases. over_prediction: N_idle over the
    principle's N_max, or None where idle compute does not bound N at all. Raises UnknownName, RuleUnknown.
    """
    rows = []
    for name in gpus:
        gpu = catalog.gpu(name).name
        for title, model, routing in MODULES:
            on = whole_models.Workload(gpu, BACKEND, ATTENTION, routing=routing)
            predicted = whole_models.compose(catalog.model(model), on).predict()
            assert predicted.principle is not None and predicted.n_idle is not None  # both routings are bounded
            idle, bound = finite(predicted.n_idle), predicted.principle
            rows.append(
                {
                    "gpu": gpu,
                    "module": title,
                    "n_idle": None if idle is None else round(idle, 1),
                    "n_max": bound.n_max,
                    "limiting": bound.limiting,
                    "over_prediction": None if idle is None else round(predicted.n_idle / bound.n_max, 1),
                }
            )
    return rows


def future() -> list[dict[str, Any]]:
    """Every GPU of the catalog, by balance: a dense model's idle compute against the attention tile, b = 1, BF16."""
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
