"""A tiny model keeps what decides granularity and fits a CPU."""

from __future__ import annotations

import pytest

from pytest_nfp import catalog
from pytest_nfp.backends import hf_config
from pytest_nfp.scale import tiny

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
    assert (small.layers or 0) <= 4


@pytest.mark.parametrize("name", ["qwen3-8b", "llada-2.1-mini"])
def test_what_a_cpu_runs_by_default_fits_it_and_no_cache(name: str) -> None:
    """More than 150 MB of weights in FP32, so that no cache holds them, and less than 2 GB."""
    small = tiny(catalog.model(name))
    assert 150e6 < hf_config.weight_bytes(small, "fp32") < 2e9
    assert all(context <= 4096 for context in small.context)


def test_a_module_shape_has_no_tiny_model() -> None:
    """No layers, no attention."""
    with pytest.raises(ValueError, match="is a module shape, not a model"):
        tiny(catalog.model("dense-ffn-4096x9216"))
