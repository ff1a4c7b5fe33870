"""Dense FFN by torch: two GEMMs, no activation (arXiv 2605.30851, appendix C.2); plain matmul, or oneDNN-packed weights on a CPU.

FP8 weights take torch._scaled_mm, whose inputs are cast to FP8 as part of the forward. On a GPU the vendor's library computes
them; not run on one yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from pytest_nfp import catalog
from pytest_nfp.backends import Forward, Prepared, Unsupported, banks_needed, correctness, tensors
from pytest_nfp.cases import Case

PACKED_ROWS = 16
"""Rows that the packed layout is chosen for: packing for one row does not pack."""
FP8_SCALE = 16.0
"""What unit normal values are multiplied by before they are cast to FP8 (E4M3), whose largest value is 448."""
FP8_CAPABILITY = (8, 9)
FP8_MULTIPLE = 16
"""Of n and k, which torch._scaled_mm asks for."""


@dataclass(frozen=True, slots=True)
class Linear:
    """How one GEMM is computed. pack: a weight [n, k] as the kernel takes it; compute: x [rows, k], packed -> [rows, n].

    exact: x, the weight before it was packed -> [rows, n] in FP64, of the values that the kernel computes with.
    """

    name: str
    pack: Callable[[torch.Tensor], Any]
    compute: Callable[[torch.Tensor, Any], torch.Tensor]
    exact: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = correctness.product


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """X [b*N, d] -> x @ W1.T @ W2.T with W1 [f, d], W2 [d, f], or one GEMM, on the case's device in its dtype."""
    return chain(case, seed, cache_bytes, _linear(case))


def chain(case: Case, seed: int, cache_bytes: int, linear: Linear) -> Prepared:
    """The GEMMs of a dense case by any library's linear. Raises Unsupported for a dtype without a forward."""
    device, generator = tensors.device_of(case), tensors.generator_of(case, seed)
    drawn_as = torch.bfloat16 if case.dtype == "fp8" else tensors.dtype_of(case)
    shapes = case.gemms
    bank_bytes = int(case.bytes_per_element * sum(n * k for n, k in shapes))
    count = banks_needed(bank_bytes, cache_bytes)

    def drawn(*shape: int, std: float = 1.0) -> torch.Tensor:
        return tensors.drawn(generator, *shape, device=device, dtype=drawn_as, std=std)

    first = [drawn(n, k, std=k**-0.5) for n, k in shapes]
    banks = [[linear.pack(w) for w in first]]
    banks += [[linear.pack(drawn(n, k, std=k**-0.5)) for n, k in shapes] for _ in range(count - 1)]

    def build(positions: int) -> tuple[Forward, torch.Tensor]:
        x = drawn(case.batch * positions, shapes[0][1])
        turn = cycle(banks)

        def run() -> torch.Tensor:
            *ups, down = next(turn)
            h = linear.compute(x, ups[0]) if ups else x
            for gate in ups[1:]:
                h = h * linear.compute(x, gate)
            return linear.compute(h, down)

        return run, x

    def check(positions: int) -> str:
        run, x = build(positions)
        return correctness.wrong(run(), correctness.ffn(x, first, linear.exact))

    return Prepared(lambda positions: build(positions)[0], bank_bytes, bank_bytes * count, linear.name, count, check)


def _linear(case: Case) -> Linear:
    """The GEMM of the case's kernel and dtype. Raises Unsupported."""
    if case.dtype == "fp8":
        return _scaled_mm(case)
    kernel = case.kernel or "matmul"
    if kernel == "matmul":
        return Linear("torch.matmul", lambda w: w, lambda x, w: torch.matmul(x, w.T))
    if kernel != "onednn-packed" or case.gpu != "cpu":
        raise Unsupported(f"torch has no dense kernel named {case.kernel!r}; there are matmul and onednn-packed")
    if not torch.backends.mkldnn.is_available():
        raise Unsupported("this torch build has no oneDNN, so weights can't be packed")

    def pack(weight: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        return packed

    def compute(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return out

    return Linear("torch.onednn-packed", pack, compute)


def _scaled_mm(case: Case) -> Linear:
    """FP8 with one scale a tensor, BF16 out."""
    if case.kernel == "onednn-packed":
        raise Unsupported("oneDNN packs no FP8 weights")
    if case.gpu != "cpu" and catalog.gpu(case.gpu).capability < FP8_CAPABILITY:
        raise Unsupported(f"{case.gpu} has no FP8 GEMMs: they need compute capability 8.9")
    if bad := [f"{n}x{k}" for n, k in case.gemms if n % FP8_MULTIPLE or k % FP8_MULTIPLE]:
        raise Unsupported(f"FP8 GEMMs need dimensions in multiples of {FP8_MULTIPLE}, not {', '.join(bad)}")

    scale = torch.full((), 1 / FP8_SCALE, device=tensors.device_of(case))
    scales = {k: scale / k**0.5 for _, k in case.gemms}

    def cast(t: torch.Tensor) -> torch.Tensor:
        return (t * FP8_SCALE).to(torch.float8_e4m3fn)

    def pack(weight: torch.Tensor) -> torch.Tensor:
        # Weights are of size 1/sqrt(k): as unit normals they use the range of FP8, and their scale undoes it.
        return cast(weight * weight.shape[1] ** 0.5)

    def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        b = scales[weight.shape[1]]
        out: torch.Tensor = torch._scaled_mm(cast(x), weight.T, scale_a=scale, scale_b=b, out_dtype=torch.bfloat16)
        return out

    def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return correctness.product(cast(x), pack(weight)) / FP8_SCALE**2 / weight.shape[1] ** 0.5

    return Linear("torch._scaled_mm", pack, compute, exact)
