"""What one rank holds under tensor and expert parallelism."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp import catalog
from pytest_nfp.catalog import UnknownName
from pytest_nfp.catalog.parallel import Parallel, on_rank, parse_parallel

QWEN = catalog.model("qwen3-30b-a3b")


@pytest.mark.parametrize(("text", "kind", "ranks"), [("tp1", "tp", 1), ("TP8", "tp", 8), (" ep16 ", "ep", 16)])
def test_parallelism_is_written_as_kind_and_ranks(text: str, kind: str, ranks: int) -> None:
    """In any case of letters."""
    assert (parse_parallel(text).kind, parse_parallel(text).ranks) == (kind, ranks)


@pytest.mark.parametrize("text", ["", "8", "tp0", "tp", "dp8", "tp8..ep8", "tp-1"])
def test_anything_else_is_named(text: str) -> None:
    """With how to write it."""
    with pytest.raises(UnknownName, match="write tp8"):
        parse_parallel(text)


def test_tensor_parallelism_cuts_widths_and_expert_parallelism_experts() -> None:
    """Heads are cut by both; KV heads are copied where there are fewer than ranks."""
    assert QWEN.moe is not None and QWEN.attention is not None
    tp, ep = on_rank(QWEN, parse_parallel("tp8")), on_rank(QWEN, parse_parallel("ep8"))
    assert tp.moe is not None and ep.moe is not None and tp.attention is not None and ep.attention is not None
    assert (tp.moe.local_experts, tp.moe.width) == (QWEN.moe.experts, QWEN.moe.width // 8)
    assert (ep.moe.local_experts, ep.moe.width) == (QWEN.moe.experts // 8, QWEN.moe.width)
    assert ep.moe.experts == QWEN.moe.experts
    assert tp.attention == ep.attention
    assert (tp.attention.heads, tp.attention.kv_heads) == (QWEN.attention.heads // 8, 1)
    assert (tp.name, ep.name) == ("qwen3-30b-a3b@tp8", "qwen3-30b-a3b@ep8")


@given(value=st.integers(1, 10**6), ranks=st.integers(1, 64))
def test_a_share_times_the_ranks_is_the_whole_or_it_is_refused(value: int, ranks: int) -> None:
    """No dimension is rounded."""
    parallel = Parallel("tp", ranks)
    if value % ranks:
        with pytest.raises(UnknownName, match="can't be cut"):
            parallel.share(value, "width")
    else:
        assert parallel.share(value, "width") * ranks == value
