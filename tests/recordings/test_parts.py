"""Recorded times of a module at exactly its shape, and nothing where the table has none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from pytest_nfp import catalog
from pytest_nfp.cases import Case
from pytest_nfp.recordings import NoRecording, library, parts, tables

from .test_case_curves import GEMM, MOE, VLLM, gemm, moe, write

GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
ATTENTION = Case("h200", VLLM, "attention", catalog.model("qwen3-8b"), "bf16", batch=2, context=1024)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tables, "_data", lambda: tmp_path)
    library.read.cache_clear()
    parts._generation.cache_clear()
    return tmp_path


def decode(step: int, ms: float, **changed: Any) -> dict[str, Any]:
    return {
        "batch_size": 2,
        "isl": 1,
        "num_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "kv_cache_dtype": "bfloat16",
        "window_size": 0,
        "step": step,
        "latency": ms,
    } | changed


def write_decode(folder: Path, rows: list[dict[str, Any]]) -> None:
    path = folder / "h200_sxm" / "attention" / "vllm" / "9.0" / "generation_attention_perf.parquet"
    path.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def test_between_two_rows_time_is_the_line_between_them_and_beyond_there_is_none(folder: Path) -> None:
    """Exact on the grid; half-way in the middle; an error outside."""
    write(folder, "gemm", [gemm(m, 0.030 + m / 1e4) for m in GRID])
    found = parts.times(GEMM)
    assert found.at(64) == pytest.approx(36.4)
    assert found.at(96) == pytest.approx((found.at(64) + found.at(128)) / 2)
    assert found.source.endswith("gemm_perf.parquet")
    with pytest.raises(ValueError, match="8192 rows were not recorded: 1 to 4096 were"):
        found.at(8192)


def test_balanced_experts_of_the_shape_and_no_others(folder: Path) -> None:
    """Another k, and another routing, is no recording."""
    write(folder, "moe", [moe(m, 0.5 + m / 1e4) for m in GRID] + [moe(m, 0.3, topk=4) for m in GRID])
    assert parts.times(MOE).at(64) == pytest.approx(506.4)
    with pytest.raises(NoRecording, match="does not hold this shape, or it stays in the cache"):
        parts.times(replace(MOE, top_k=2))
    with pytest.raises(NoRecording, match="skewed routing were not recorded"):
        parts.times(replace(MOE, routing="skewed"))


def test_attention_at_one_position_with_what_it_takes_over_next_to_nothing(folder: Path) -> None:
    """Between two contexts the line of the logarithms; 10 us of it are there over one cached token."""
    write_decode(
        folder,
        [decode(1, 0.010), decode(512, 0.020), decode(2048, 0.080), decode(1024, 0.001, kv_cache_dtype="fp8"),
         decode(1024, 0.002, batch_size=4), decode(1024, 0.003, window_size=128)],
    )  # fmt: skip
    found = parts.attention_at_one(ATTENTION, "vllm", "9.0")
    assert found.latency_us == pytest.approx(40.0)
    assert found.fixed_us == pytest.approx(10.0)
    assert found.source.endswith("generation_attention_perf.parquet")


@pytest.mark.parametrize("changed", [{"context": 4096}, {"batch": 3}])
def test_what_was_not_recorded_of_attention_is_said(folder: Path, changed: dict[str, Any]) -> None:
    """A longer context, another batch, another release."""
    write_decode(folder, [decode(1, 0.010), decode(2048, 0.080)])
    with pytest.raises(NoRecording, match="was not recorded over"):
        parts.attention_at_one(replace(ATTENTION, **changed), "vllm", "9.0")
    with pytest.raises(NoRecording, match=r"no recording of the attention of vllm 8\.0 on h200"):
        parts.attention_at_one(ATTENTION, "vllm", "8.0")


def test_attention_has_no_times_over_positions() -> None:
    """Its tables hold one position."""
    with pytest.raises(NoRecording, match="attention is recorded at one position alone"):
        parts.times(ATTENTION)


def test_an_older_table_without_windows_is_read_and_one_without_heads_is_named(folder: Path) -> None:
    """A100's tables have no column window_size; without the heads nothing can be chosen."""
    old = [{k: v for k, v in decode(step, 0.01).items() if k != "window_size"} for step in (1, 2048)]
    write_decode(folder, old)
    assert parts.attention_at_one(ATTENTION, "vllm", "9.0").latency_us == pytest.approx(10.0)
    parts._generation.cache_clear()
    path = folder / "h200_sxm" / "attention" / "vllm" / "9.0" / "generation_attention_perf.parquet"
    parquet.write_table(
        pyarrow.Table.from_pylist([{k: v for k, v in row.items() if k != "num_heads"} for row in old]), path
    )
    with pytest.raises(NoRecording, match="has no column num_heads"):
        parts.attention_at_one(ATTENTION, "vllm", "9.0")
