"""A tiny model keeps what decides granularity and fits a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_nfp import catalog
from pytest_nfp.backends import Unsupported, hf_config
from pytest_nfp.cases import Backend, Case
from pytest_nfp.catalog.tiny import tiny

TRANSFORMERS = Backend("transformers", "5.19.0")

MODELS = [
    m for m in catalog.models() if m.layers is not None and m.attention is not None and m.attention.value_dim is None
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_the_ratios_that_decide_granularity_stay(model: catalog.Model) -> None:
    """Head dimension, group, experts, k, expert width, and the dense width over the hidden size; its name says so."""
    small = tiny(model)
    assert small.name == f"{model.name}~tiny"
    assert model.attention is not None and small.attention is not None
    assert (small.attention.head_dim, small.attention.group) == (model.attention.head_dim, model.attention.group)
    if model.moe is None:
        assert model.dense is not None and small.dense is not None
        assert small.dense.width / small.hidden == pytest.approx(model.dense.width / model.hidden, rel=0.01)
    else:
        assert small.moe is not None
        assert (small.moe.experts, small.moe.top_k, small.moe.width) == (
            model.moe.experts,
            model.moe.top_k,
            model.moe.width,
        )
    assert (small.layers or 0) <= 6


@pytest.mark.parametrize("name", ["qwen3-8b", "llada-2.1-mini"])
def test_what_a_cpu_runs_by_default_fits_it_and_no_cache(name: str) -> None:
    """More than 150 MB of weights in FP32, so that no cache holds them, and less than 2 GB."""
    small = tiny(catalog.model(name))
    assert 150e6 < 4 * small.weights() < 3e9
    if small.moe is not None:
        assert 4 * small.weights(small.moe.top_k) > 2 * 32e6
    assert all(context <= 4096 for context in small.context)


@pytest.mark.parametrize("name", ["qwen3-8b", "llada-2.1-mini"])
@pytest.mark.parametrize("cache_mib", [1, 32, 240])
def test_layers_are_added_until_no_cache_holds_a_forward(name: str, cache_mib: int) -> None:
    """Two caches' worth of weights with k experts a layer, by no more than a layer; where that is there anyway nothing changes."""
    cold = 2 * cache_mib * 2**20
    small, plain = tiny(catalog.model(name), cold), tiny(catalog.model(name))
    k = small.moe.top_k if small.moe is not None else None
    assert 4 * small.weights(k) >= cold
    assert small.layers is not None and plain.layers is not None
    if small.layers == plain.layers:
        assert small == plain
    else:
        fewer = small.model_copy(update={"layers": small.layers - 1})
        assert 4 * fewer.weights(k) < cold


def test_a_config_that_was_given_is_scaled_field_by_field(tmp_path: Path) -> None:
    """Its own architecture, at the dimensions of the scaled model: what is built is what the case says."""
    given = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "rope_theta": 5e5,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    small = tiny(catalog.model(str(path)))
    config = hf_config.config_of(Case("cpu", TRANSFORMERS, "model", small, "fp32"))
    assert (config["architectures"], config["rope_theta"]) == (["LlamaForCausalLM"], 5e5)
    assert (config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]) == (1024, 4, 3584)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 1, 128)
    assert config["vocab_size"] == small.vocabulary
    path.write_text(json.dumps(given | {"layer_types": ["full_attention"] * 32}), encoding="utf-8")
    alike = hf_config.config_of(Case("cpu", TRANSFORMERS, "model", tiny(catalog.model(str(path))), "fp32"))
    assert alike["layer_types"] == ["full_attention"] * 4
    path.write_text(json.dumps(given | {"layer_types": ["full_attention", "sliding_attention"] * 16}), encoding="utf-8")
    with pytest.raises(Unsupported, match="can't be scaled down field by field"):
        hf_config.config_of(Case("cpu", TRANSFORMERS, "model", tiny(catalog.model(str(path))), "fp32"))


def test_a_module_shape_has_no_tiny_model() -> None:
    """No layers, no attention."""
    with pytest.raises(ValueError, match="is a module shape, not a model"):
        tiny(catalog.model("dense-ffn-4096x9216"))
