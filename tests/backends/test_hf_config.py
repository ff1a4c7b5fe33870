"""A catalog model as a config that engines build, and whether there is room for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_nfp import catalog
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


def test_a_model_that_does_not_fit_names_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, embedding and cache in FP32, and those that are free; where the system does not tell, it is tried."""
    monkeypatch.setattr(memory, "free_bytes", lambda case: 10**9)
    with pytest.raises(Unsupported, match=r"qwen3-8b needs 37\.8 GB, 1\.0 GB are free on this cpu"):
        memory.require(CASE)
    monkeypatch.setattr(memory, "free_bytes", lambda case: 40 * 10**9)
    memory.require(CASE)
    with pytest.raises(Unsupported, match=r"needs 49\.3 GB"):
        memory.require(CASE, 10 * 10**9)
    monkeypatch.setattr(memory, "free_bytes", lambda case: None)
    memory.require(CASE, 10**15)


def test_a_cpu_has_less_free_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc/meminfo has it, in bytes."""
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: "MemTotal: 9 kB\nMemAvailable:   1234 kB\n")
    assert memory.free_bytes(CASE) == 1234 * 1024
