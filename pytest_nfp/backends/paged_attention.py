"""Attention of a GPU framework over a paged KV cache: pages in banks, queries, a call that computes them, causal."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch

from pytest_nfp.backends import Forward, Prepared, banks_needed, correctness, most_positions, require_room, tensors
from pytest_nfp.cases import Case

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q [b, N, H, D], keys and values in pages [pages, page, H_kv, D] -> [b, N, H, D].

MLA: the latent [pages, page, 1, D_v] and the rotary key [pages, page, 1, D - D_v] in their place -> [b, N, H, D_v].
"""
Plan = Callable[[int, torch.Tensor, torch.Tensor], Compute]
"""positions, page table [b, pages a request] in int32, tokens of each request [b] in int32 -> the call, planned once."""


def prepare(case: Case, seed: int, cache_bytes: int, page: int, plan: Plan, kernel: str) -> Prepared:
    """Forwards over `context` cached and N new tokens a request; query i sees context + i + 1 of them.

    What an engine plans once a step for all of its layers is planned outside the timing. Raises Unsupported for a dtype
    without a forward.
    """
    attention, context = case.subject.attention, case.context
    assert attention is not None and context is not None
    device, dtype, generator = tensors.device_of(case), tensors.dtype_of(case), tensors.generator_of(case, seed)
    kv_heads, dim, batch = attention.kv_heads, attention.head_dim, case.batch
    pages = -(-(context + most_positions(case)) // page)
    bank_bytes = dtype.itemsize * batch * context * attention.cached_width
    count = banks_needed(bank_bytes, cache_bytes)
    latent = attention.value_dim
    widths = (dim, dim) if latent is None else (latent, dim - latent)

    def cache(width: int) -> torch.Tensor:
        shape = (batch * pages, page, kv_heads, width)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    banks = [(cache(widths[0]), cache(widths[1])) for _ in range(count)]
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)

    def build(positions: int) -> tuple[Forward, torch.Tensor]:
        require_room(case, positions)
        drawn = (batch, positions, attention.heads, dim)
        q = torch.randn(drawn, generator=generator, device=device, dtype=dtype)
        compute = plan(positions, table, torch.full((batch,), context + positions, dtype=torch.int32, device=device))
        turn = cycle(banks)

        def run() -> torch.Tensor:
            return compute(q, *next(turn))

        return run, q

    def check(positions: int) -> str:
        run, q = build(positions)
        k, v = (t.view(batch, pages * page, kv_heads, -1)[:, : context + positions].transpose(1, 2) for t in banks[0])
        if latent is not None:
            k, v = torch.cat((k, v), -1), k
        expected = correctness.attention(q.transpose(1, 2), k, v, causal=True)
        return correctness.wrong(run(), expected.transpose(1, 2))

    return Prepared(lambda positions: build(positions)[0], bank_bytes, bank_bytes * count, kernel, count, check)
