"""Where a case's tensors lie, and in which dtype."""

from __future__ import annotations

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


def generator_of(case: Case, seed: int) -> torch.Generator:
    """Random numbers on the case's device."""
    return torch.Generator(device_of(case)).manual_seed(seed)
