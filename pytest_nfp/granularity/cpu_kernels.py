"""Query split of torch's CPU flash-attention kernel, and the CPU kernels that have no tile rule.

The split is compiled into torch, so it is a recorded rule: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp,
flash_attention_kernel_impl (commit 008ec6b). A block has 32 query rows below 192 queries, 64 below 768, and 256 from
there on. The last block ends with its rows: nothing is padded.

Dense matmul and grouped_mm on a CPU, and vLLM's CPU kernels, publish no tile rule: their tile is one row.
"""

from __future__ import annotations

from pytest_nfp.granularity.maps import Granularity, Range

_SOURCE = "flash_attention_kernel_impl"
_QUERY_SPLIT = (Range(1, 191, 32, _SOURCE), Range(192, 767, 64, _SOURCE), Range(768, 4096, 256, _SOURCE))
_NO_TILE = (Range(1, 4096, 1, "no tile rule"),)


def granularity(framework: str, release: str, module: str, kernel: str, dtype: str) -> Granularity:
    """The map of a CPU kernel: torch's `sdpa` has the query split, the others have no tile."""
    is_split = (framework, module) == ("torch", "attention")
    return Granularity(
        framework=framework,
        release=release,
        module=module,
        dtype=dtype,
        device_name="cpu",
        ranges=_QUERY_SPLIT if is_split else _NO_TILE,
        kernel=kernel,
        kernel_reason="named by the case",
        artifact_file="aten/src/ATen/native/cpu/FlashAttentionKernel.cpp@008ec6b" if is_split else "",
        artifact_sha256="",
        origin="recorded rule",
    )
