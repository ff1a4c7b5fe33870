"""Fused experts of a GPU framework, whatever the framework: weights in banks, routes in turn, a call that computes them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch

from pytest_nfp.backends import Forward, Prepared, correctness, tensors
from pytest_nfp.backends.expert_routing import expert_banks, expert_ids, prepared, starts
from pytest_nfp.cases import Case

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""x [T, d], w1 [E, 2f, d] (gate before up), w2 [E, d, f], weights [T, k] in FP32, ids [T, k] in int32 -> [T, d]."""


Selector = Callable[[tuple[int, ...], tuple[int, ...], int, str | None, int], dict[str, Any]]
"""Shapes of w1 and w2, k, quantisation (None: none), tokens -> the tile configuration that the framework runs."""


def prepare(case: Case, seed: int, cache_bytes: int, compute: Compute, kernel: str, selector: Selector) -> Prepared:
    """Forwards of SwiGLU experts by `compute`. selector: the framework's own.

    Raises Unsupported for a dtype without a forward, and for a routing that has no ids.
    """
    moe, hidden, top_k = case.subject.moe, case.subject.hidden, case.top_k
    assert moe is not None and top_k is not None
    device, dtype, generator = tensors.device_of(case), tensors.dtype_of(case), tensors.generator_of(case, seed)
    expert_bytes = dtype.itemsize * 3 * hidden * moe.width
    count = expert_banks(case, expert_bytes, cache_bytes)

    def weights(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.randn(moe.experts, rows, columns, generator=generator, device=device, dtype=dtype)
        return drawn / columns**0.5

    banks = [(weights(2 * moe.width, hidden), weights(hidden, moe.width)) for _ in range(count)]

    def build(positions: int) -> tuple[Forward, torch.Tensor, list[torch.Tensor], torch.Tensor]:
        tokens = case.batch * positions
        x = torch.randn(tokens, hidden, generator=generator, device=device, dtype=dtype)
        ids = [
            expert_ids(case, positions, start, seed).to(device, torch.int32).contiguous()
            for start in starts(case, positions)
        ]
        scores = torch.full((tokens, top_k), 1 / top_k, device=device)
        turn = cycle([(w1, w2, route) for w1, w2 in banks for route in ids])

        def run() -> torch.Tensor:
            w1, w2, route = next(turn)
            return compute(x, w1, w2, scores, route)

        return run, x, ids, scores

    def check(positions: int) -> str:
        run, x, ids, scores = build(positions)
        expected = correctness.experts(x, *banks[0], ids[0], scores)
        return correctness.wrong(run(), expected)

    return prepared(
        case,
        seed,
        lambda positions: build(positions)[0],
        check,
        count,
        expert_bytes,
        kernel,
        lambda positions: selector(
            (moe.experts, 2 * moe.width, hidden), (moe.experts, hidden, moe.width), top_k, None, case.batch * positions
        ),
    )
