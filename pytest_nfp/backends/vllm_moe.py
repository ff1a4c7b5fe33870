"""MoE experts by vLLM: its fused experts on a GPU (0.9.1 to 0.33, by the five arguments that all of them take), or its CPU kernel.

Not run on a GPU yet: the logic is tested on the CPU with stand-ins, the call against the sources of each release.
"""

from __future__ import annotations

from pytest_nfp.backends import Prepared, fused_experts
from pytest_nfp.cases import Case


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """Raises Unsupported where this vLLM is no build for the case's device, ImportError where it is not installed."""
    if case.gpu == "cpu":
        from pytest_nfp.backends import vllm_cpu_moe

        return vllm_cpu_moe.prepare(case, seed, cache_bytes)
    from vllm.model_executor.layers.fused_moe import fused_moe

    compute, selector = fused_moe.fused_experts, fused_moe.try_get_optimal_moe_config
    return fused_experts.prepare(case, seed, cache_bytes, compute, "vllm.fused_experts", selector)
