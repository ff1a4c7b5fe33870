"""MoE experts by vLLM: its fused experts on a GPU (0.9.1 to 0.33, by the five arguments that all of them take), or its CPU kernel.

Not run on a GPU yet: the logic is tested on the CPU with stand-ins, the call against the sources of each release.
"""

from __future__ import annotations

from typing import Any

from pytest_nfp.backends import Prepared, fused_experts
from pytest_nfp.cases import Case


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """Raises Unsupported where this vLLM is no build for the case's device, ImportError where it is not installed."""
    if case.gpu == "cpu":
        from pytest_nfp.backends import vllm_cpu_moe

        return vllm_cpu_moe.prepare(case, seed, cache_bytes)
    from vllm.model_executor.layers.fused_moe import fused_moe

    def setting(tokens: int) -> dict[str, Any]:
        moe, hidden = case.subject.moe, case.subject.hidden
        assert moe is not None
        w1, w2 = (moe.experts, 2 * moe.width, hidden), (moe.experts, hidden, moe.width)
        found: dict[str, Any] = fused_moe.try_get_optimal_moe_config(w1, w2, case.top_k, None, tokens)
        return found

    return fused_experts.prepare(
        case,
        seed,
        cache_bytes,
        fused_moe.fused_experts,
        "vllm.fused_experts",
        setting,
    )
