"""Attention by vLLM's CPU kernel; its GPU kernels are those of flash-attn and FlashInfer, which have backends of their own."""

from __future__ import annotations

from pytest_nfp.backends import Prepared, Unsupported
from pytest_nfp.cases import Case


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """Raises Unsupported on a GPU, and where this vLLM is not a CPU build."""
    if case.gpu != "cpu":
        raise Unsupported("vLLM's attention on a GPU is asked as flash-attn or flashinfer, whose kernels it runs")
    from pytest_nfp.backends import vllm_cpu_attention

    return vllm_cpu_attention.prepare(case, seed, cache_bytes)
