"""Attention by FlashInfer: its prefill kernels over pages at every N, the backend named (0.5.3 and later).

Verification runs these kernels at every N; an engine's step of one position may take the decode kernel instead: the variant
`decode-at-1` does, so that its N = 1 is what the further positions are held to. Not run on a GPU yet: the logic is tested on the CPU with stand-ins, the calls against the sources of the release.
"""

from __future__ import annotations

import torch

from pytest_nfp import catalog
from pytest_nfp.backends import Prepared, Unsupported, paged_attention, tensors
from pytest_nfp.cases import Case

PAGE = 16
WORKSPACE_BYTES = 128 * 2**20
DECODE_AT_1 = "decode-at-1"
"""The variant whose single position takes the decode kernel."""


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """Raises Unsupported on a CPU, ImportError where FlashInfer is not installed."""
    if case.gpu == "cpu":
        raise Unsupported("FlashInfer runs on a GPU alone")
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

    attention = case.subject.attention
    assert attention is not None
    # `auto` would take the same, and not say so: FA3 on Hopper, FA2 elsewhere.
    backend = "fa3" if catalog.gpu(case.gpu).capability[0] == 9 else "fa2"
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=tensors.device_of(case))

    def plan(positions: int, table: torch.Tensor, lengths: torch.Tensor) -> paged_attention.Compute:
        batch, device = case.batch, table.device
        used = -(-lengths // PAGE)
        # Where each request's pages begin, and which they are.
        begin = torch.nn.functional.pad(used.cumsum(0), (1, 0)).to(torch.int32)
        pages = torch.cat([row[:n] for row, n in zip(table, used.tolist(), strict=True)])
        queries = torch.arange(0, (batch + 1) * positions, positions, dtype=torch.int32, device=device)
        if attention.value_dim is not None:
            return _mla(case, workspace, backend, queries, begin, pages, lengths)
        filled = (lengths - 1) % PAGE + 1
        if case.kernel == DECODE_AT_1 and positions == 1:
            wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)  # as vLLM makes it
            wrapper.plan(
                begin,
                pages,
                filled,
                attention.heads,
                attention.kv_heads,
                attention.head_dim,
                PAGE,
                q_data_type=tensors.dtype_of(case),
                kv_data_type=tensors.dtype_of(case),
            )
        else:
            wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
            wrapper.plan(
                qo_indptr=queries,
                paged_kv_indptr=begin,
                paged_kv_indices=pages,
                paged_kv_last_page_len=filled,
                num_qo_heads=attention.heads,
                num_kv_heads=attention.kv_heads,
                head_dim_qk=attention.head_dim,
                page_size=PAGE,
                causal=True,
                q_data_type=tensors.dtype_of(case),
            )

        def compute(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = wrapper.run(q.flatten(0, 1), (keys, values))
            return out.view(q.shape)

        return compute

    name = f"flashinfer.{'prefill' if attention.value_dim is None else 'mla'}[{backend}]"
    name += ", decode at N=1" if case.kernel == DECODE_AT_1 else ""
    return paged_attention.prepare(case, seed, cache_bytes, PAGE, plan, name)


def _mla(
    case: Case,
    workspace: torch.Tensor,
    backend: str,
    queries: torch.Tensor,
    begin: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
) -> paged_attention.Compute:
    """MLA's decode form: every head asks one latent key and the rotary key beside it, at every N by the same kernel."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    attention, dtype = case.subject.attention, tensors.dtype_of(case)
    assert attention is not None and attention.value_dim is not None
    latent = attention.value_dim
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=backend)
    wrapper.plan(
        queries,
        begin,
        pages,
        lengths,
        attention.heads,
        latent,
        attention.head_dim - latent,
        PAGE,
        True,  # causal
        attention.head_dim**-0.5,
        dtype,
        dtype,
    )

    def compute(q: torch.Tensor, latents: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        flat = q.flatten(0, 1)
        out: torch.Tensor = wrapper.run(flat[..., :latent], flat[..., latent:], latents.squeeze(2), rotary.squeeze(2))
        return out.view(*q.shape[:-1], latent)

    return compute
