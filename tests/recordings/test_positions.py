"""Recorded attention curves with several positions: what is a curve, and what each filter leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from pytest_nfp.recordings import NoRecording, positions, tables

GRID = (1, 4, 8, 16, 32, 512, 1024)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tables, "_data", lambda: tmp_path)
    positions.read.cache_clear()
    return tmp_path


def write(folder: Path, rows: list[dict[str, Any]], table: str = "dsv4_csa_topk_calib") -> None:
    path = folder / "h200_sxm" / "sparse_attention" / "sglang" / "9.0" / f"{table}_perf.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def curve(grid: tuple[int, ...] = GRID, ms: float = 0.02, **changed: Any) -> list[dict[str, Any]]:
    row = {"kernel_source": "flashmla", "batch_size": 1, "step": 4096, "num_heads": 64, "op_name": "x", "latency": ms}
    return [row | {"isl": n} | changed for n in grid]


def test_a_curve_is_what_shares_every_column_but_positions_and_latency(folder: Path) -> None:
    """Two head counts are two curves; positions past 512 stay out; milliseconds become microseconds."""
    write(folder, [*curve(), *curve(num_heads=128, ms=0.04)])
    a, b = positions.read("h200").curves
    assert [p.positions for p in a.points] == [1, 4, 8, 16, 32, 512]
    assert {a.points[0].latency_us, b.points[0].latency_us} == {20.0, 40.0}
    assert (a.kernel, a.batch, a.context, a.table, a.release) == ("flashmla", 1, 4096, "dsv4_csa_topk_calib", "9.0")
    assert {dict(c.setting)["num_heads"] for c in (a, b)} == {"64", "128"}
    assert a.source.endswith("sparse_attention/sglang/9.0/dsv4_csa_topk_calib_perf.parquet")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (curve(step=0), "nothing is cached: a prefill"),
        (curve((1,)), "one position"),
        (curve((1, 2, 4)), "fewer than 5 counts of positions up to 512"),
        (curve((4, 8, 16, 32, 64)), "no point at one position"),
        ([*curve(), *curve((8,), 0.03)], "two measurements of one point differ by more than 1.25x"),
        (curve(ms=0.0), "a latency of 0"),
    ],
)
def test_each_filter_counts_what_it_leaves_out(folder: Path, rows: list[dict[str, Any]], reason: str) -> None:
    """One curve, one reason."""
    write(folder, rows)
    assert positions.read("h200") == positions.Found((), {f"dsv4_csa_topk_calib: {reason}": 1})


def test_a_table_without_graphs_or_without_cached_tokens_is_left_out_whole(folder: Path) -> None:
    """Launches are in the one; the other has no column for what is cached."""
    write(folder, curve(), "dsa_context_module")
    write(folder, [{k: v for k, v in row.items() if k != "step"} for row in curve()], "kda")
    assert positions.read("h200").left_out == {
        "dsa_context_module: timed without CUDA graphs": 1,
        "kda: no positions over cached tokens": 1,
    }


def test_a_gpu_without_tables_says_which_have_them(folder: Path) -> None:
    """By name."""
    with pytest.raises(NoRecording, match="no recording for h20; there are h200, h100"):
        positions.read("h20")
