"""GEMMs by vLLM's CPU build: the kernel that its own dispatch picks for a layer of this shape."""

from __future__ import annotations

import torch

from pytest_nfp.backends import Prepared, Unsupported, torch_dense
from pytest_nfp.cases import Case


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """X [b*N, k] through the GEMMs of the case. Raises Unsupported on a GPU, ImportError where vLLM is not installed."""
    if case.gpu != "cpu":
        raise Unsupported("vLLM's GEMMs on a GPU are the vendor's: they are asked as torch")
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    def layer(weight: torch.Tensor) -> torch.nn.Module:
        made = torch.nn.Module()
        made.weight = torch.nn.Parameter(weight, requires_grad=False)
        dispatch_cpu_unquantized_gemm(made, remove_weight=False)
        return made

    def compute(x: torch.Tensor, made: torch.nn.Module) -> torch.Tensor:
        out: torch.Tensor = made.cpu_linear(x, made.weight, None)
        return out

    return torch_dense.chain(case, seed, cache_bytes, torch_dense.Linear("vllm.cpu_linear", layer, compute))
