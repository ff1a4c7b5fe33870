"""Attention by vLLM: its flash-attention over pages on a GPU (0.9.1 to 0.33, in the version that vLLM chooses), or its CPU kernel.

Not run on a GPU yet: the logic is tested on the CPU with stand-ins, the call against the sources of each release.
"""

from __future__ import annotations

from importlib import import_module

import torch

from pytest_nfp.backends import Prepared, Unsupported, paged_attention
from pytest_nfp.cases import Case

PAGE = 16
VERSIONS = ("vllm.v1.attention.backends.fa_utils", "vllm.attention.utils.fa_utils")
"""Where vLLM chooses the version: in newer releases, and before."""


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """Raises Unsupported where this vLLM is no build for the case's device, ImportError where it is not installed."""
    if case.gpu == "cpu":
        from pytest_nfp.backends import vllm_cpu_attention

        return vllm_cpu_attention.prepare(case, seed, cache_bytes)
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    version = _version()

    def plan(positions: int, table: torch.Tensor, lengths: torch.Tensor) -> paged_attention.Compute:
        starts = torch.arange(0, (case.batch + 1) * positions, positions, dtype=torch.int32, device=table.device)
        longest = int(lengths.max())

        def compute(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = flash_attn_varlen_func(
                q.flatten(0, 1),
                keys,
                values,
                max_seqlen_q=positions,
                cu_seqlens_q=starts,
                max_seqlen_k=longest,
                seqused_k=lengths,
                block_table=table,
                causal=True,
                fa_version=version,
            )
            return out.view(q.shape)

        return compute

    kernel = f"vllm.flash_attn_varlen_func[fa{version}]"
    return paged_attention.prepare(case, seed, cache_bytes, PAGE, plan, kernel)


def _version() -> int:
    """The flash-attention version that this vLLM takes on this GPU. Raises Unsupported where it takes none."""
    for place in VERSIONS:
        try:
            found: int | None = import_module(place).get_flash_attn_version()
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise
            continue
        if found is None:
            raise Unsupported("vLLM takes no flash-attention on this GPU")
        return found
    raise Unsupported(f"this vLLM chooses its flash-attention version in none of {', '.join(VERSIONS)}")
