"""Executed work: what vLLM's and SGLang's own Triton kernels compute, product by product, under Triton's interpreter.

Needs no GPU. Run in an environment that has the framework, or name one in NFP_VLLM_PYTHON and NFP_SGLANG_PYTHON. Evidence of
granularity, never a latency.
"""

import os
import sys
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import pytest

from pytest_nfp import interpreted
from pytest_nfp.granularity import DeviceFacts, ExpertShape, Query, read
from pytest_nfp.plugin import Nfp
from pytest_nfp.principle import baseline_positions

PYTHON = {name: os.environ.get(f"NFP_{name.upper()}_PYTHON", sys.executable) for name in ("vllm", "sglang")}
"""An interpreter that has the framework: this one, or the one that the variable names."""
POSITIONS = (1, 2, 4, 8, 16, 17, 32, 33, 48, 64, 65)
E, K, D, F = 8, 2, 64, 64
SIXTEEN = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1, "SPLIT_K": 1, "num_warps": 4}
CONTEXT = 40
"""With up to 24 new tokens the cached ones end in the same block of keys: a step is one of queries alone."""
QUERIES = (1, 2, 3, 4, 8, 9, 16, 17, 24)
ROWS = 16
"""Rows of the query tile where a KV head has up to 16 query heads (vLLM's kernel_unified_attention)."""


ERROR = {"vllm": 1e-5, "sglang": 2e-3}
"""Of FP32, and of FP16, which SGLang's kernel writes."""
Framework = Literal["vllm", "sglang"]
Routing = Literal["balanced", "skewed"]
frameworks = pytest.mark.parametrize("framework", ["vllm", "sglang"])
routings = pytest.mark.parametrize("routing", ["balanced", "skewed"])


def interpreter(framework: Framework) -> str:
    """The interpreter that has the framework, or a skip that says how to name one."""
    if PYTHON[framework] == sys.executable and find_spec(framework) is None:
        variable = f"NFP_{framework.upper()}_PYTHON"
        pytest.skip(f"{framework} is not installed: name an interpreter that has it in {variable}")
    return PYTHON[framework]


@lru_cache
def experts(framework: Framework, routing: Routing, rule: str) -> interpreted.Executed:
    """The kernel's answer by the release's own rule or by sixteen rows throughout, or a skip with the reason."""
    setting = SIXTEEN if rule == "sixteen-rows" else None
    try:
        return interpreted.experts(POSITIONS, E, K, D, F, routing, setting, interpreter(framework), framework)
    except interpreted.NotExecuted as reason:
        pytest.skip(str(reason))


@frameworks
@routings
@pytest.mark.parametrize("rule", ["sixteen-rows", "own-rule"])
def test_experts(nfp: Nfp, framework: Framework, routing: Routing, rule: str) -> None:
    """Every product of the fused experts, at every N, is one that the map predicts; and the result is right."""
    found = experts(framework, routing, rule)
    predicted = {n: interpreted.predicted_experts_flops(routing, n, E, K, D, F, found.settings[n]) for n in POSITIONS}
    nfp.note_executed(found, predicted, "moe")
    assert found.flops == predicted
    assert found.error < ERROR[framework]


@frameworks
@routings
def test_the_step_is_at_the_tiles_edge(framework: Framework, routing: Routing) -> None:
    """With tiles of 16 rows an expert: the first step after N0 is at the principle's N_max + 1."""
    found = experts(framework, routing, "sixteen-rows")
    base = baseline_positions(routing, E, K)
    edge = 16 * E // K if routing == "balanced" else 16
    assert {found.flops[n] for n in POSITIONS if base <= n <= edge} == {found.flops[base]}
    assert found.flops[edge + 1] > found.flops[edge]


@frameworks
def test_the_map_is_what_the_kernel_was_given(framework: Framework) -> None:
    """The tile that the release's own selector returned while it ran is the one that the lifted rule gives."""
    found = experts(framework, "balanced", "own-rule")
    rule = read(Query(framework, found.release, DeviceFacts("cpu"), ExpertShape(E, F, D, K)))
    assert {n: s["BLOCK_SIZE_M"] for n, s in found.settings.items()} == {n: rule.tile(n) for n in POSITIONS}


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (8, 1)], ids=["group-1", "group-4", "group-8"])
def test_attention(nfp: Nfp, heads: int, kv_heads: int) -> None:
    """A tile packs the query heads of a KV head: it holds 16 / group positions, and the next one begins another."""
    try:
        found = interpreted.attention(QUERIES, heads, kv_heads, 32, CONTEXT, interpreter("vllm"))
    except interpreted.NotExecuted as reason:
        pytest.skip(str(reason))
    one = found.flops[1] / interpreted.query_tiles(1, heads, kv_heads, ROWS)
    predicted = {n: one * interpreted.query_tiles(n, heads, kv_heads, ROWS) for n in QUERIES}
    nfp.note_executed(found, predicted, "attention")
    assert found.flops == predicted
    assert found.error < 1e-5
