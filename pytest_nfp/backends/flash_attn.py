"""Attention by flash-attn 2: flash_attn_with_kvcache over pages, or over a contiguous cache (2.5.9 to 2.8).

Not run on a GPU yet: the logic is tested on the CPU with stand-ins, the call against the sources of the release.
"""

from __future__ import annotations

import torch

from pytest_nfp.backends import Prepared, Unsupported, paged_attention
from pytest_nfp.cases import Case

PAGE = 256
"""Tokens of a page: flash-attn 2 asks for a multiple of 256."""
CONTIGUOUS = "contiguous"
"""The variant without pages."""


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """Raises Unsupported on a CPU, ImportError where flash-attn is not installed."""
    if case.gpu == "cpu":
        raise Unsupported("flash-attn runs on a GPU alone")
    from flash_attn import flash_attn_with_kvcache

    def plan(positions: int, table: torch.Tensor, lengths: torch.Tensor) -> paged_attention.Compute:
        def compute(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            # num_splits 0: its own heuristic, which looks at N.
            out: torch.Tensor = flash_attn_with_kvcache(
                q, keys, values, cache_seqlens=lengths, block_table=table, causal=True, num_splits=0
            )
            return out

        def compute_contiguous(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            # The pages of a request lie one behind the other: without a table they are one cache.
            whole = [t.view(case.batch, -1, *t.shape[2:]) for t in (keys, values)]
            out: torch.Tensor = flash_attn_with_kvcache(q, *whole, cache_seqlens=lengths, causal=True, num_splits=0)
            return out

        return compute_contiguous if case.kernel == CONTIGUOUS else compute

    name = "flash_attn_with_kvcache" + (f"[{CONTIGUOUS}]" if case.kernel == CONTIGUOUS else "")
    return paged_attention.prepare(case, seed, cache_bytes, PAGE, plan, name)
