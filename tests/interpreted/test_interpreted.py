"""Executed work: what the map predicts of it, and why it can't be had."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp import interpreted
from pytest_nfp.principle import moe_work
from tests.granularity.test_live import live_python

SETTING = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32}


@given(st.sampled_from(["balanced", "skewed"]), st.integers(1, 200), st.sampled_from([16, 32, 64]))
def test_whole_blocks_are_the_tile_rooflines_flops(routing: str, tokens: int, tile: int) -> None:
    """Where columns and depth are whole blocks, the padded work is that of gated experts in the tile roofline."""
    predicted = interpreted.predicted_experts_flops(routing, tokens, 8, 2, 64, 96, SETTING | {"BLOCK_SIZE_M": tile})
    work = moe_work(tokens, 1, routing, 8, 2, 64, 96, 2, lambda rows: tile, matrices=3)
    assert predicted == work.flops


def test_columns_and_depth_are_padded_too() -> None:
    """Blocks of 128 over 64 columns and 64 deep: four times the work of the first GEMM's half, and of the second."""
    small, large = ({**SETTING, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": n} for n in (64, 128))
    one, padded = (interpreted.predicted_experts_flops("skewed", 1, 8, 2, 64, 32, s) for s in (small, large))
    assert one == 2 * 2 * 16 * (64 * 64 + 64 * 64)
    assert padded == 2 * 2 * 16 * (128 * 128 + 128 * 128)


def test_a_query_tile_packs_the_heads_of_a_group() -> None:
    """16 rows are 16 positions of one head, or two of eight."""
    assert [interpreted.query_tiles(n, 4, 4, 16) for n in (1, 16, 17)] == [4, 4, 8]
    assert [interpreted.query_tiles(n, 8, 1, 16) for n in (1, 2, 3)] == [1, 1, 2]


def stand_in(tmp_path: Path, code: str) -> str:
    """An interpreter that runs this code instead of the worker."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\n{code}\n")
    path.chmod(0o755)
    return str(path)


def test_the_workers_answer_is_read_behind_its_mark(tmp_path: Path) -> None:
    """Whatever a framework prints before; N become numbers again."""
    answer: dict[str, Any] = {
        "release": "0.32.0",
        "kernel": "k",
        "flops": {"1": 10},
        "settings": {"1": SETTING},
        "error": 1e-7,
    }
    python = stand_in(tmp_path, f"print('INFO ...'); print('EXECUTED' + {json.dumps(json.dumps(answer))})")
    found = interpreted.experts([1], 8, 2, 64, 64, python=python)
    assert found.framework == "vllm"
    assert interpreted.experts([1], 8, 2, 64, 64, python=python, framework="sglang").framework == "sglang"
    assert (found.release, found.flops, found.settings, found.error) == ("0.32.0", {1: 10}, {1: SETTING}, 1e-7)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit('Segmentation fault')", "the kernel was not run: Segmentation fault"),
        ("pass", "the kernel was not run: no output"),
        ("""print('EXECUTED{"reason": "vLLM 1 does without Triton here"}')""", "vLLM 1 does without Triton here"),
    ],
)
def test_what_was_not_executed_says_why(tmp_path: Path, code: str, reason: str) -> None:
    """The last line of what went wrong."""
    with pytest.raises(interpreted.NotExecuted, match=reason):
        interpreted.attention([1], 4, 4, 32, 40, stand_in(tmp_path, code))


def test_no_interpreter_and_no_framework_are_reasons(tmp_path: Path) -> None:
    """A path that there is not; this environment, which has no Triton."""
    with pytest.raises(interpreted.NotExecuted, match="No such file"):
        interpreted.experts([1], 8, 2, 64, 64, python=str(tmp_path / "none"))
    with pytest.raises(interpreted.NotExecuted, match="No module named 'triton'"):
        interpreted.experts([1], 8, 2, 64, 64)
    with pytest.raises(interpreted.NotExecuted, match="No module named 'triton'"):
        interpreted.experts([1], 8, 2, 64, 64, framework="sglang")


@pytest.mark.vllm
@pytest.mark.parametrize("framework", ["vllm", "sglang"])
def test_both_frameworks_kernels_run_where_they_are_installed(framework: Literal["vllm", "sglang"]) -> None:
    """Not skipped for a module that is missing: the interpreter that has them runs both, product by product as predicted."""
    python, release = live_python()
    if not release:
        pytest.skip("vLLM is not installed: name an interpreter that has it in NFP_VLLM_PYTHON")
    found = interpreted.experts([1, 17], 8, 2, 64, 64, "skewed", SETTING | {"GROUP_SIZE_M": 1}, python, framework)
    assert found.flops == {
        n: interpreted.predicted_experts_flops("skewed", n, 8, 2, 64, 64, found.settings[n]) for n in (1, 17)
    }
