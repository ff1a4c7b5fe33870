"""The recorded query split of torch's CPU attention, and kernels without a tile."""

from __future__ import annotations

from pytest_nfp.granularity.cpu_kernels import granularity


def test_query_split_and_no_tile() -> None:
    """32 below 192 queries, 64 below 768, then 256; a matmul maps one row to one row."""
    attention = granularity("torch", "2.13.0", "attention", "sdpa", "fp32")
    assert [attention.tile(n) for n in (1, 191, 192, 767, 768)] == [32, 32, 64, 64, 256]
    assert attention.has_tiles
    assert not granularity("vllm", "0.32.0", "attention", "", "fp32").has_tiles
    assert not granularity("torch", "2.13.0", "dense", "matmul", "fp32").has_tiles
