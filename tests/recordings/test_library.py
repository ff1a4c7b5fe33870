"""The library of recorded curves: what it holds, and what each filter leaves out with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_nfp.recordings import NoRecording, library, tables

from .test_case_curves import gemm, moe, write

GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
BIG = {"num_experts": 64, "topk": 8, "hidden_size": 2048, "inter_size": 1024}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tables, "_data", lambda: tmp_path)
    library.read.cache_clear()
    return tmp_path


def curve(ms: float = 0.3, grid: tuple[int, ...] = GRID, **changed: Any) -> list[dict[str, Any]]:
    return [moe(m, ms, **BIG | changed) for m in grid]


def read(module: library.Module = "moe", dtype: str = "bf16") -> library.Library:
    library.read.cache_clear()
    return library.read("h200", "vllm", "9.0", module, dtype)


def test_a_curve_holds_its_rank_its_base_and_its_source(folder: Path) -> None:
    """TP cuts the width; N0 is the first grid value that activates every expert; a repeated row takes the quicker one."""
    write(folder, "moe", [*curve(), *curve(0.2, (64,)), *curve(moe_tp_size=2, inter_size=2048)])
    found = read().curves
    assert {(c.width, c.tp, c.base) for c in found} == {(1024, 1, 8), (1024, 2, 8)}
    whole = next(c for c in found if c.tp == 1)
    assert {p.positions: p.latency_us for p in whole.points}[64] == pytest.approx(200)
    assert whole.source == "aiconfigurator-core 0.12.0: h200_sxm/moe/vllm/9.0/moe_perf.parquet"
    assert whole.weight_bytes == 2 * 64 * 3 * 2048 * 1024
    assert read().left_out == {}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (curve(moe_ep_size=8), "expert parallel: remote tokens are sent to expert 0"),
        (curve(num_experts=4, topk=2), "weights under 150 MB stay in the cache between forwards"),
        (curve(ms=0.1), "T(N0) implies more than the peak bandwidth: not all weights were read"),
        (curve(grid=(1, 2, 4)), "the grid ends before all experts are active"),
        (curve(grid=(8, 16, 32)), "fewer than 8 points from N0 on"),
    ],
)
def test_each_trap_has_a_filter_that_counts(folder: Path, rows: list[dict[str, Any]], reason: str) -> None:
    """One curve, left out for one reason."""
    write(folder, "moe", rows)
    assert read() == library.Library((), {reason: 1})


def test_group_limited_routing_is_left_out_where_the_tables_ran_it(folder: Path) -> None:
    """DeepSeek shapes of two releases."""
    from pytest_nfp.cases import Backend

    rows = curve(ms=9.0, grid=(*GRID, 3072, 4096), hidden_size=7168, inter_size=2048, num_experts=256)
    write(folder, "moe", rows, Backend("vllm", "0.24.0"))
    write(folder, "moe", rows)
    found = library.read("h200", "vllm", "0.24.0", "moe")
    assert found.left_out == {"group-limited routing: about half of the experts are active": 1}
    assert len(read().curves) == 1


def test_power_laws_and_dtypes_are_told_apart(folder: Path) -> None:
    """A power law begins at one token: it has no N0 at which all experts are active."""
    write(folder, "moe", [*curve(), *curve(distribution="power_law_1.2"), *curve(0.2, moe_dtype="fp8")])
    assert {(c.distribution, c.base) for c in read().curves} == {("balanced", 8), ("power_law_1.2", 1)}
    assert [c.dtype for c in read(dtype="fp8").curves] == ["fp8"]


def test_gemms_are_curves_too(folder: Path) -> None:
    """n is the width, k the hidden size."""
    write(folder, "gemm", [gemm(m, 0.030) for m in GRID])
    (found,) = read("dense").curves
    assert (found.width, found.hidden, found.base, found.experts) == (12288, 4096, 1, 1)


def test_other_columns_and_absent_tables_are_one_reason(folder: Path) -> None:
    """With the version that is known, and what there is."""
    write(folder, "moe", [{"num_tokens": 1, "latency": 1.0}])
    with pytest.raises(NoRecording, match=r"has no column moe_dtype, .*aiconfigurator-core 0.12.0 .*pip install"):
        read()
    with pytest.raises(NoRecording, match="not for nvfp4"):
        read(dtype="nvfp4")
    with pytest.raises(NoRecording, match=r"no recording of vllm==1 on h200; there are vllm==9\.0"):
        library.read("h200", "vllm", "1", "moe")


def test_the_real_tables_hold_thousands_of_curves_and_say_what_they_lack() -> None:
    """BF16 of five GPUs: every filter of the real traps has work."""
    found = library.read_all(("h100", "h200"), "moe")
    assert len(found.curves) > 800
    assert found.left_out["expert parallel: remote tokens are sent to expert 0"] > 1000
    assert all(c.base <= c.points[-1].positions for c in found.curves)
    assert {c.gpu for c in found.curves} == {"h100", "h200"}
