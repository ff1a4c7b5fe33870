"""Curves from the tables, with each trap planted in small tables of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from pytest_nfp import catalog
from pytest_nfp.cases import Backend, Case
from pytest_nfp.catalog import Model, Moe
from pytest_nfp.principle import find_boundary
from pytest_nfp.recordings import NoRecording, recorded_curve, recorded_releases, tables

VLLM = Backend("vllm", "9.0")
GEMM = Case("h200", VLLM, "dense", catalog.model("qwen3-8b"), "bf16", gemm=(12288, 4096))
MOE = Case("h200", VLLM, "moe", catalog.model("llada-2.1-mini"), "bf16", top_k=8, routing="balanced")


def write(folder: Path, op: str, rows: list[dict[str, Any]], backend: Backend = VLLM) -> None:
    path = folder / "h200_sxm" / op / backend.framework / backend.release / f"{op}_perf.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def gemm(m: int, ms: float, **changed: Any) -> dict[str, Any]:
    return {"gemm_dtype": "bfloat16", "m": m, "n": 12288, "k": 4096, "latency": ms, "kernel_source": "linear"} | changed


def moe(tokens: int, ms: float, **changed: Any) -> dict[str, Any]:
    return {
        "moe_dtype": "bfloat16",
        "num_tokens": tokens,
        "hidden_size": 2048,
        "inter_size": 512,
        "topk": 8,
        "num_experts": 256,
        "moe_tp_size": 1,
        "moe_ep_size": 1,
        "distribution": "balanced",
        "latency": ms,
        "kernel_source": "triton",
    } | changed


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tables, "_data", lambda: tmp_path)
    return tmp_path


def test_a_gemm_curve_names_source_release_and_kernel(recorded: Path) -> None:
    """Milliseconds become microseconds; other dtypes and shapes of the table stay out."""
    rows = [gemm(1, 0.030), gemm(64, 0.033), gemm(65, 0.040)]
    write(recorded, "gemm", [*rows, gemm(2, 0.001, gemm_dtype="fp8"), gemm(4, 0.001, n=64)])
    c = recorded_curve(GEMM)
    assert [(p.positions, round(p.latency_us, 6)) for p in c.points] == [(1, 30.0), (64, 33.0), (65, 40.0)]
    assert (c.kind, c.kernel) == ("recorded", "linear")
    assert c.source.startswith("aiconfigurator-core 0.12.0: h200_sxm/gemm/vllm/9.0/")
    assert find_boundary(c.points).n_max_interval == (64, 64)


def test_a_batch_takes_the_rows_that_it_divides(recorded: Path) -> None:
    """b = 4: m = 4, 8, 64 are N = 1, 2, 16; 1 and 65 are no whole N."""
    from dataclasses import replace

    write(recorded, "gemm", [gemm(m, 0.03) for m in (1, 4, 8, 64, 65)])
    assert [p.positions for p in recorded_curve(replace(GEMM, batch=4)).points] == [1, 2, 16]


def test_balanced_moe_is_held_against_the_first_grid_point_from_n0_on(recorded: Path) -> None:
    """ceil(256/8) = 32; where the grid lacks it, the next one."""
    write(recorded, "moe", [moe(t, 0.45) for t in (1, 16, 32, 64)])
    assert recorded_curve(MOE).baseline_positions == 32
    write(recorded, "moe", [moe(t, 0.45) for t in (1, 16, 48, 64)])
    assert recorded_curve(MOE).baseline_positions == 48


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([moe(32, 0.4, moe_ep_size=8)], "does not hold this shape"),
        ([moe(32, 0.4, moe_tp_size=2)], "does not hold this shape"),
        ([moe(32, 0.4, distribution="power_law_1.2")], "does not hold this shape"),
        ([moe(32, 0.1)], "implies 336% of the peak bandwidth: not all experts were read"),
        ([moe(1, 0.4), moe(16, 0.4)], "no point at or above N0 = 32"),
        ([moe(32, 0.4), moe(64, 0.4, kernel_source="cutlass")], "several kernels for this shape: cutlass, triton"),
    ],
)
def test_traps_are_kept_out_each_with_its_reason(recorded: Path, rows: list[dict[str, Any]], reason: str) -> None:
    """EP, TP, other distributions, impossible bandwidth, a grid that ends early, mixed kernels."""
    write(recorded, "moe", rows)
    with pytest.raises(NoRecording, match=reason):
        recorded_curve(MOE)


def test_group_limited_deepseek_tables_are_left_out(recorded: Path) -> None:
    """Half of the experts are active there."""
    v3 = Case(
        "h200", Backend("vllm", "0.24.0"), "moe", catalog.model("deepseek-v3"), "bf16", top_k=8, routing="balanced"
    )
    write(recorded, "moe", [moe(32, 5.0, hidden_size=7168, inter_size=2048)], v3.backend)
    with pytest.raises(NoRecording, match="group-limited routing"):
        recorded_curve(v3)


def test_small_weights_stay_in_the_cache_and_are_left_out(recorded: Path) -> None:
    """T(1) is then no memory time."""
    small = Model(name="s", hidden=512, moe=Moe(experts=16, top_k=8, width=512), source="t")
    write(recorded, "moe", [moe(t, 0.4, hidden_size=512, num_experts=16) for t in (2, 4)])
    with pytest.raises(NoRecording, match="experts of 25 MB stay in the cache"):
        recorded_curve(Case("h200", VLLM, "moe", small, "bf16", top_k=8, routing="balanced"))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"gpu": "h20"}, "no recording for h20; there are h200, h100, a100, l40s, b200"),
        ({"backend": Backend("vllm", "8.0")}, "no recording of vllm==8.0 on h200; there are vllm==9.0"),
        ({"routing": "skewed"}, "not skewed routing"),
        ({"module": "attention"}, "no attention curve"),
        ({"dtype": "fp16"}, "read for bf16, not for fp16"),
    ],
)
def test_what_no_table_holds_says_what_there_is(recorded: Path, changed: dict[str, Any], reason: str) -> None:
    """One reason each."""
    from dataclasses import replace

    write(recorded, "moe", [moe(32, 0.4)])
    with pytest.raises(NoRecording, match=reason):
        recorded_curve(replace(MOE, **changed))


def test_releases_come_in_version_order(recorded: Path) -> None:
    """0.10 after 0.9."""
    for r in ("0.10.0", "0.9.0"):
        write(recorded, "moe", [moe(32, 0.4)], Backend("vllm", r))
    assert [b.release for b in recorded_releases("h200", "moe")] == ["0.9.0", "0.10.0"]
    assert recorded_releases("h20", "moe") == []


def test_without_the_package_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named."""
    monkeypatch.setattr(tables, "_data", lambda: None)
    assert recorded_releases("h200", "moe") == []
    with pytest.raises(NoRecording, match=r"pip install 'pytest-nfp\[recorded\]'"):
        recorded_curve(MOE)


@pytest.mark.parametrize(
    ("framework", "release", "interval"), [("vllm", "0.24.0", (512, 767)), ("sglang", "0.5.14", (256, 319))]
)
def test_the_published_h200_example(framework: str, release: str, interval: tuple[int, int]) -> None:
    """E = 256, k = 8, hidden 2048, width 512 on the real tables: vLLM leaves 20% by 768, SGLang by 320."""
    from dataclasses import replace

    c = recorded_curve(replace(MOE, backend=Backend(framework, release)))
    assert find_boundary(c.points, baseline_positions=c.baseline_positions).n_max_interval == interval


def test_tables_of_another_version_are_not_read(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version that is there, the one that is read, how to get it, and what stands meanwhile."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.13.0")
    with pytest.raises(NoRecording, match=r"0\.13\.0 is installed.* as 0\.12\.0 .*recorded.*calibrations .* stand"):
        tables.table_path("h200", "vllm", "9.0", "moe")
