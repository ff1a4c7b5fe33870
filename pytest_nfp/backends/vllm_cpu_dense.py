"""GEMMs by vLLM's CPU build: the kernel that its own dispatch picks for a layer of this shape."""

from __future__ import annotations

from itertools import cycle

import torch

from pytest_nfp.backends import Forward, Prepared, Unsupported, banks_needed, correctness, places
from pytest_nfp.cases import Case


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """X [b*N, k] through the GEMMs of the case. Raises Unsupported on a GPU, ImportError where vLLM is not installed."""
    if case.gpu != "cpu":
        raise Unsupported("vLLM's GEMMs on a GPU are the vendor's: they are asked as torch")
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dtype, generator = places.dtype_of(case), places.generator_of(case, seed)
    shapes = case.gemms
    bank_bytes = dtype.itemsize * sum(n * k for n, k in shapes)
    total = banks_needed(bank_bytes, cache_bytes)

    def layer(n: int, k: int) -> torch.nn.Module:
        made = torch.nn.Module()
        weight = torch.randn(n, k, generator=generator, dtype=dtype) / k**0.5
        made.weight = torch.nn.Parameter(weight, requires_grad=False)
        dispatch_cpu_unquantized_gemm(made, remove_weight=False)
        return made

    banks = [[layer(n, k) for n, k in shapes] for _ in range(total)]

    def linear(x: torch.Tensor, made: torch.nn.Module) -> torch.Tensor:
        out: torch.Tensor = made.cpu_linear(x, made.weight, None)
        return out

    def build(positions: int) -> tuple[Forward, torch.Tensor]:
        x = torch.randn(case.batch * positions, shapes[0][1], generator=generator, dtype=dtype)
        turn = cycle(banks)

        def run() -> torch.Tensor:
            *ups, down = next(turn)
            h = linear(x, ups[0]) if ups else x
            for gate in ups[1:]:
                h = h * linear(x, gate)
            return linear(h, down)

        return run, x

    def check(positions: int) -> str:
        run, x = build(positions)
        return correctness.wrong(run(), correctness.ffn(x, [made.weight for made in banks[0]]))

    return Prepared(
        lambda positions: build(positions)[0], bank_bytes, bank_bytes * total, "vllm.cpu_linear", total, check
    )
