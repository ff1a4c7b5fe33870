"""A catalog model as a config that engines build, and whether there is room for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_nfp import catalog, compose
from pytest_nfp.backends import Unsupported, hf_config, memory
from pytest_nfp.cases import Backend, Case
from pytest_nfp.scale import tiny

QWEN = catalog.model("qwen3-8b")
CASE = Case("cpu", Backend("transformers", "5.19.0"), "model", QWEN, "fp32", context=512)


def test_a_dense_model_is_qwen3_at_its_dimensions(tmp_path: Path) -> None:
    """Written where an engine reads it."""
    path = hf_config.write(QWEN, "bf16", tmp_path) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]) == (4096, 12288, 36)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (32, 8, 128)
    assert config["dtype"] == "bfloat16"


def test_experts_are_qwen3_moe() -> None:
    """E, k and width of the model."""
    config = hf_config.config_of(tiny(catalog.model("llada-2.1-mini")), "fp32")
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"]) == (256, 8, 512)


def test_a_config_that_was_given_is_run_as_it_is(tmp_path: Path) -> None:
    """Its architecture and all of its fields."""
    given = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512, "rope_theta": 5e5,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    assert hf_config.config_of(catalog.model(str(path)), "fp32") == given


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("llada-2.1-mini", "bf16", "has shared experts, which Qwen3-MoE has not: give its config.json"),
        ("deepseek-v3", "bf16", "its attention is not that of a decoder with KV heads"),
        ("qwen3-8b", "fp8", "no full model is built with fp8 weights"),
    ],
)
def test_what_can_not_be_built_says_why(name: str, dtype: str, reason: str) -> None:
    """Shared experts, MLA, weights with scales."""
    with pytest.raises(Unsupported, match=reason):
        hf_config.config_of(catalog.model(name), dtype)


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b", "mixtral-8x7b"])
def test_bytes_are_those_of_the_parts(name: str) -> None:
    """The same weights as the composition counts; the cache is two vectors a KV head and token."""
    model = catalog.model(name)
    on = compose.Workload("h200", Backend("vllm", "0.24.0"), None)
    parts = compose.parts(model, on)
    weights = sum(p.count * p.case.gemm[0] * p.case.gemm[1] for p in parts if p.case.gemm is not None)
    if model.moe is not None:
        weights += (
            sum(p.count for p in parts if p.name == "experts") * model.moe.experts * 3 * model.hidden * model.moe.width
        )
    assert hf_config.weight_bytes(model, "bf16") == pytest.approx(2 * weights, rel=1e-6)
    assert model.attention is not None
    assert (
        hf_config.cache_bytes(model, "bf16", 1000, 3)
        == (model.layers or 0) * 3 * 1000 * model.attention.cached_width * 2
    )


def test_a_model_that_does_not_fit_names_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it needs, and those that are free; where the system does not tell, it is tried."""
    monkeypatch.setattr(memory, "free_bytes", lambda case: 10**9)
    with pytest.raises(Unsupported, match=r"qwen3-8b needs 34\.5 GB, 1\.0 GB are free on this cpu"):
        memory.require(CASE, 30 * 10**9, "qwen3-8b")
    memory.require(CASE, 10**8, "qwen3-8b")
    monkeypatch.setattr(memory, "free_bytes", lambda case: None)
    memory.require(CASE, 10**15, "qwen3-8b")


def test_this_machine_tells_what_is_free() -> None:
    """As /proc/meminfo has it."""
    free = memory.free_bytes(CASE)
    assert free is None or free > 0
