"""Where a case's tensors lie, and in which dtype."""

from __future__ import annotations

import math

import torch

from pytest_nfp.backends import Unsupported
from pytest_nfp.cases import Case

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def device_of(case: Case) -> str:
    """The torch device of a case: cpu, or the GPU that this process sees first."""
    return "cpu" if case.gpu == "cpu" else "cuda"


def dtype_of(case: Case) -> torch.dtype:
    """The torch dtype of weights and activations. Raises Unsupported for one that needs scales."""
    if case.dtype not in DTYPES:
        raise Unsupported(f"no forward is built for {case.dtype} weights; there are {', '.join(DTYPES)}")
    return DTYPES[case.dtype]


BLOCK = 4_000_037
"""Values that are drawn; what is larger repeats them. No row length divides it, so that no two rows are alike."""


def drawn(generator: torch.Generator, *shape: int, device: str, dtype: torch.dtype, std: float = 1.0) -> torch.Tensor:
    """Normal values of this deviation. Weights are gigabytes where a cache is large: drawing all of them would take minutes."""
    count = math.prod(shape)
    if count <= BLOCK:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(std)
    block = torch.randn(BLOCK, generator=generator, device=device, dtype=dtype).mul_(std)
    found = torch.empty(count, device=device, dtype=dtype)
    whole = count // BLOCK * BLOCK
    found[:whole].view(-1, BLOCK).copy_(block.expand(whole // BLOCK, BLOCK))
    found[whole:] = block[: count - whole]
    return found.view(shape)


def generator_of(case: Case, seed: int) -> torch.Generator:
    """Random numbers on the case's device."""
    return torch.Generator(device_of(case)).manual_seed(seed)
