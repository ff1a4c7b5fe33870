"""Dense FFN by torch: two GEMMs, no activation (arXiv 2605.30851, appendix C.2); plain matmul, or oneDNN-packed weights on a CPU.

On a GPU the vendor's library computes them; not run on one yet.
"""

from __future__ import annotations

from itertools import cycle

import torch

from pytest_nfp.backends import Forward, Prepared, Unsupported, banks_needed, correctness, places
from pytest_nfp.cases import Case

PACKED_ROWS = 16
"""Rows that the packed layout is chosen for: packing for one row does not pack."""


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """X [b*N, d] -> x @ W1.T @ W2.T with W1 [f, d], W2 [d, f], or one GEMM, on the case's device in its dtype."""
    device, dtype, generator = places.device_of(case), places.dtype_of(case), places.generator_of(case, seed)
    shapes = case.gemms
    bank_bytes = dtype.itemsize * sum(n * k for n, k in shapes)
    count = banks_needed(bank_bytes, cache_bytes)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    banks = [[drawn(n, k) / k**0.5 for n, k in shapes] for _ in range(count)]
    first = banks[0]
    kernel = case.kernel or "matmul"
    if kernel == "onednn-packed" and case.gpu == "cpu":
        if not torch.backends.mkldnn.is_available():
            raise Unsupported("this torch build has no oneDNN, so weights can't be packed")
        banks = [[torch.ops.mkldnn._reorder_linear_weight(w, PACKED_ROWS) for w in bank] for bank in banks]

        def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    elif kernel == "matmul":

        def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.matmul(x, weight.T)
    else:
        raise Unsupported(f"torch has no dense kernel named {case.kernel!r}; there are matmul and onednn-packed")

    def build(positions: int) -> tuple[Forward, torch.Tensor]:
        x = drawn(case.batch * positions, shapes[0][1])
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
        return correctness.wrong(run(), correctness.ffn(x, first))

    return Prepared(
        lambda positions: build(positions)[0], bank_bytes, bank_bytes * count, f"torch.{kernel}", count, check
    )
