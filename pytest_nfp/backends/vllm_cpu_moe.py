"""MoE experts by vLLM's CPU kernel: cpu_fused_moe on weights that it packs itself (vLLM 0.32, SwiGLU)."""

from __future__ import annotations

from itertools import cycle

import torch
from vllm import _custom_ops as ops

from pytest_nfp.backends import Forward, Prepared, Unsupported, correctness, tensors
from pytest_nfp.backends.expert_routing import expert_banks, expert_ids, prepared, starts
from pytest_nfp.cases import Case

ISA = "vec"
"""The layout that every x86 machine has; the kernel computes in tiles of up to 8 rows, and pads none."""


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """X [b*N, d], w13 [E, 2f, d], w2 [E, d, f] in the case's dtype. The first expert moves on with every forward.

    Raises Unsupported where this vLLM is not a CPU build.
    """
    moe, hidden, top_k = case.subject.moe, case.subject.hidden, case.top_k
    assert moe is not None and top_k is not None
    if not hasattr(torch.ops._C, "cpu_fused_moe"):
        raise Unsupported("this vLLM has no cpu_fused_moe: it is not a CPU build")
    dtype, generator = tensors.dtype_of(case), tensors.generator_of(case, seed)
    expert_bytes = dtype.itemsize * 3 * hidden * moe.width
    count = expert_banks(case, expert_bytes, cache_bytes)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    plain = [
        (
            drawn(moe.experts, 2 * moe.width, hidden) / hidden**0.5,
            drawn(moe.experts, hidden, moe.width) / moe.width**0.5,
        )
        for _ in range(count)
    ]
    banks = [tuple(ops.cpu_prepack_moe_weight(w, ISA) for w in bank) for bank in plain]
    # The check needs one bank as it was; the others live on packed alone.
    first = plain[0]
    del plain

    def build(positions: int) -> tuple[Forward, torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The forward, where it writes, and its input, first expert ids and their weights."""
        tokens = case.batch * positions
        x = drawn(tokens, hidden)
        weights = torch.full((tokens, top_k), 1 / top_k)
        out = torch.empty(tokens, hidden, dtype=dtype)
        ids = [expert_ids(case, positions, start, seed).to(torch.int32) for start in starts(case, positions)]
        turn = cycle([(w13, w2, route) for w13, w2 in banks for route in ids])

        def run() -> torch.Tensor:
            w13, w2, route = next(turn)
            ops.cpu_fused_moe(out, x, w13, w2, None, None, weights, route, "silu", ISA)
            return out

        return run, out, (x, ids[0], weights)

    def check(positions: int) -> str:
        run, out, (x, ids, weights) = build(positions)
        correctness.poison(out)
        return correctness.wrong(run(), correctness.experts(x, *first, ids, weights))

    return prepared(case, seed, lambda positions: build(positions)[0], check, count, expert_bytes, "vllm.cpu_fused_moe")
