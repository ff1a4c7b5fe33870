"""Attention by vLLM's CPU kernel over a paged KV cache: cpu_attention_with_kv_cache (vLLM 0.32, causal)."""

from __future__ import annotations

from itertools import cycle

import torch
from vllm import _custom_ops as ops

from pytest_nfp.backends import (
    Forward,
    Prepared,
    Unsupported,
    banks_needed,
    correctness,
    most_positions,
    require_room,
    tensors,
)
from pytest_nfp.cases import Case
from pytest_nfp.catalog import Attention

PAGE = 128
"""Tokens of a page: a multiple of 32, which the vector path asks for."""
ISA = "vec"


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """Q [b*N, H, D] over pages [pages, H_kv, PAGE, D] of L + N tokens a request; query i sees L + i + 1 of them.

    Raises Unsupported where this vLLM is not a CPU build.
    """
    attention, context = case.subject.attention, case.context
    assert attention is not None and context is not None
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        raise Unsupported("this vLLM has no cpu_attention_with_kv_cache: it is not a CPU build")
    heads, dim, batch = attention.heads, attention.head_dim, case.batch
    dtype, generator = tensors.dtype_of(case), tensors.generator_of(case, seed)
    bank_bytes = 2 * dtype.itemsize * batch * context * attention.kv_heads * dim
    count = banks_needed(bank_bytes, cache_bytes)
    pages = -(-(context + most_positions(case)) // PAGE)
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    banks, first = _banks(count, batch * pages, attention, dtype, generator)

    def build(positions: int) -> tuple[Forward, torch.Tensor, torch.Tensor]:
        require_room(case, positions)
        q = torch.randn((batch * positions, heads, dim), generator=generator, dtype=dtype)
        out = torch.empty_like(q)
        starts = torch.arange(0, batch * positions + 1, positions, dtype=torch.int32)
        lengths = torch.full((batch,), context + positions, dtype=torch.int32)
        # The engine makes this once a step, for all of its layers: it is no part of a layer's time.
        plan = _plan(attention, q, starts, lengths)
        turn = cycle(banks)

        def run() -> torch.Tensor:
            k, v = next(turn)
            ops.cpu_attention_with_kv_cache(
                query=q,
                key_cache=k,
                value_cache=v,
                output=out,
                query_start_loc=starts,
                seq_lens=lengths,
                scale=dim**-0.5,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=table,
                softcap=0.0,
                scheduler_metadata=plan,
                s_aux=None,
            )
            return out

        return run, out, q

    def check(positions: int) -> str:
        run, out, q = build(positions)
        correctness.poison(out)
        k, v = (t.view(batch, pages * PAGE, -1, dim)[:, : context + positions].transpose(1, 2) for t in first)
        expected = correctness.attention(q.view(batch, positions, heads, dim).transpose(1, 2), k, v, causal=True)
        return correctness.wrong(run(), expected.transpose(1, 2).reshape(out.shape))

    kernel = "vllm.cpu_attention_with_kv_cache"
    return Prepared(lambda positions: build(positions)[0], bank_bytes, bank_bytes * count, kernel, count, check)


def _banks(
    count: int, pages: int, attention: Attention, dtype: torch.dtype, generator: torch.Generator
) -> tuple[list[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """Caches of keys and values [pages, H_kv, PAGE, D], and the first one's in the order of its tokens, for the check."""
    kv_heads, dim = attention.kv_heads, attention.head_dim
    # A page of every request is as long as it was measured with: its tokens lie in the order of their slots.
    slots = torch.arange(pages * PAGE, dtype=torch.int64)
    banks: list[tuple[torch.Tensor, ...]] = []
    first: tuple[torch.Tensor, ...] = ()
    for _ in range(count):
        keys, values = (torch.randn((pages * PAGE, kv_heads, dim), generator=generator, dtype=dtype) for _ in range(2))
        cache = tuple(torch.zeros(pages, kv_heads, PAGE, dim, dtype=dtype) for _ in range(2))
        ops.cpu_attn_reshape_and_cache(keys, values, *cache, slots, ISA)
        banks.append(cache)
        first = first or (keys, values)
    return banks, first


def _plan(attention: Attention, q: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """How the kernel divides its work over the processors, for requests of these queries and lengths."""
    plan: torch.Tensor = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lengths),
        num_heads=attention.heads,
        num_kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        seq_lens=lengths,
        dtype=q.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=ISA,
        enable_kv_split=True,
    )
    return plan
