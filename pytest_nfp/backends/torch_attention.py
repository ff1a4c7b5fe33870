"""Attention core by torch's scaled_dot_product_attention over a pre-allocated KV cache of L + N tokens."""

from __future__ import annotations

from itertools import cycle

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own convention

from pytest_nfp.backends import Forward, Prepared, banks_needed, correctness, most_positions, require_room, tensors
from pytest_nfp.cases import Case


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """Q [b, H, N, D] over k, v [b, H_kv, L + N, D], on the case's device in its dtype; on a GPU torch picks the kernel.

    No causal mask: torch aligns it to the first cached token, so it would hide the cache from the queries. What a
    causal mask saves, N of L + N keys, is small where L is much longer than N.
    """
    attention, context = case.subject.attention, case.context
    assert attention is not None and context is not None
    device, dtype, generator = tensors.device_of(case), tensors.dtype_of(case), tensors.generator_of(case, seed)
    shape = (case.batch, attention.kv_heads, context + most_positions(case), attention.head_dim)
    bank_bytes = 2 * dtype.itemsize * case.batch * attention.kv_heads * context * attention.head_dim
    count, is_grouped = banks_needed(bank_bytes, cache_bytes), attention.group != 1

    def drawn(*shape: int) -> torch.Tensor:
        return tensors.drawn(generator, *shape, device=device, dtype=dtype)

    banks = [(drawn(*shape), drawn(*shape)) for _ in range(count)]

    def build(positions: int) -> tuple[Forward, torch.Tensor]:
        require_room(case, positions)
        q = drawn(case.batch, attention.heads, positions, attention.head_dim)
        turn = cycle([(k[:, :, : context + positions], v[:, :, : context + positions]) for k, v in banks])

        def run() -> torch.Tensor:
            k, v = next(turn)
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=is_grouped)

        return run, q

    def check(positions: int) -> str:
        run, q = build(positions)
        k, v = (t[:, :, : context + positions] for t in banks[0])
        return correctness.wrong(run(), correctness.attention(q, k, v, causal=False))

    return Prepared(
        lambda positions: build(positions)[0],
        bank_bytes,
        bank_bytes * count,
        "torch.scaled_dot_product_attention",
        count,
        check,
    )
