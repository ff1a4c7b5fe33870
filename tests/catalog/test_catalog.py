"""The catalog's data, and what its loaders say of wrong names and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_nfp import catalog
from pytest_nfp.catalog import Gpu, UnknownName
from pytest_nfp.files import FileError, read_yaml


def test_every_gpu_is_found_by_each_of_its_names() -> None:
    """Names, aliases and driver names lead to one entry, and every entry cites a source."""
    for g in catalog.gpus():
        assert {catalog.gpu(n).name for n in (g.name, *g.aliases, *g.driver_names)} == {g.name}
        assert g.source
    assert {"a800", "h800", "h20", "h20-3e", "a100", "h100", "h200", "b200", "l40s"} <= {g.name for g in catalog.gpus()}


def test_every_model_is_found_by_each_of_its_names() -> None:
    """The models of the paper and of the gate are there, with the dimensions that decide granularity."""
    for m in catalog.models():
        assert {catalog.model(n).name for n in (m.name, *m.aliases)} == {m.name}
    llada = catalog.model("inclusionAI/LLaDA2.1-mini")
    assert llada.moe is not None
    assert llada.attention is not None
    assert (llada.moe.experts, llada.moe.top_k, llada.moe.width, llada.hidden, llada.attention.group) == (
        256,
        8,
        512,
        2048,
        4,
    )


@pytest.mark.parametrize(
    ("find", "value", "near"),
    [(catalog.gpu, "h2O", "h20"), (catalog.gpu, "a8000", "a800"), (catalog.model, "lada", "llada-2.1-mini")],
)
def test_an_unknown_name_lists_near_matches_and_how_to_add_one(find: object, value: str, near: str) -> None:
    """The message alone is enough to go on."""
    with pytest.raises(UnknownName, match=f"unknown .* '{value}'; did you mean .*{near}.*To use another: ") as raised:
        find(value)  # type: ignore[operator]
    assert "catalog/" in str(raised.value)


CONFIGS = {
    "dense": ({"intermediate_size": 12288}, (12288, None, None)),
    "qwen-moe": (
        {"intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        (None, 128, 768),
    ),
    "mixtral": ({"intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}, (None, 8, 14336)),
    "deepseek": (
        {
            "intermediate_size": 18432,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
        },
        (18432, 256, 2048),
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_hugging_face_config_describes_its_model(tmp_path: Path, family: str) -> None:
    """Families name experts and widths differently; MLA is one key of latent and rotary width for all heads."""
    extra, (dense, experts, width) = CONFIGS[family]
    base = {"hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8}
    path = tmp_path / family / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(base | extra), encoding="utf-8")
    m = catalog.model(str(path))
    assert m.name == family
    assert (m.dense.width if m.dense else None, m.moe.experts if m.moe else None, m.moe.width if m.moe else None) == (
        dense,
        experts,
        width,
    )
    assert m.attention is not None
    shape = (m.attention.heads, m.attention.kv_heads, m.attention.head_dim, m.attention.values)
    assert shape == ((32, 1, 576, 512) if family == "deepseek" else (32, 8, 128, 128))


def test_a_cached_token_of_mla_is_read_once_and_meets_every_head() -> None:
    """576 elements a token, which 128 heads ask for keys and values: 241.8 query elements a cached one; of GQA the group."""
    mla = catalog.Attention(heads=128, kv_heads=1, head_dim=576, value_dim=512)
    assert (mla.cached_width, mla.values) == (576, 512)
    assert mla.reuse == pytest.approx(128 * 1088 / 576)
    gqa = catalog.Attention(heads=32, kv_heads=8, head_dim=128)
    assert (gqa.cached_width, gqa.reuse) == (2048, 4)


@pytest.mark.parametrize("wrong", [{"kv_heads": 2}, {"value_dim": 576}])
def test_a_value_width_is_mlas_alone(wrong: dict[str, int]) -> None:
    """Two KV heads, or values as wide as the keys."""
    with pytest.raises(ValueError, match="value_dim is that of MLA"):
        catalog.Attention(**({"heads": 128, "kv_heads": 1, "head_dim": 576, "value_dim": 512} | wrong))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config.json:1: broken JSON"),
        ("[]", "holds an object"),
        ('{"hidden_size": -3}', "hidden_size: must be a whole number of at least 0, got -3"),
        ('{"hidden_size": 8, "num_attention_heads": 0}', "num_attention_heads: missing or 0"),
    ],
)
def test_a_broken_config_names_file_and_field(tmp_path: Path, text: str, message: str) -> None:
    """File, line or field, and what was found."""
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FileError, match=message):
        catalog.model(str(path))


GOOD = """\
schema: 1
gpus:
- name: g
  title: G
  peak_tflops: 1
  bandwidth_tbps: 2
  compute_capability: "9.0"
  shared_memory_optin_kib: 4
  driver_names: [G]
  source: s
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("peak_tflops: 1", "peak_tflops: -1", r"gpus.yaml:5: gpus.0.peak_tflops: .*greater than 0 \(got -1\)"),
        ("title: G", "tilte: G", r"gpus.yaml:4: gpus.0.tilte: Extra inputs"),
        ("bandwidth_tbps: 2", "bandwidth_tbps: much", r"gpus.yaml:6: gpus.0.bandwidth_tbps: .*valid number"),
        ("schema: 1", "schema: 2", r"gpus.yaml:1: schema: Input should be 1"),
        ("- name: g", "- name: [g", r"gpus.yaml:\d+: broken YAML"),
        ("  source: s\n", "", r"gpus.yaml:3: gpus.0.source: Field required"),
        ("name: g", "name: !!python/object/apply:os.getcwd []", r"broken YAML"),
    ],
)
def test_a_broken_file_names_file_line_and_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    """Broken YAML, a wrong field, a negative number, a foreign tag."""
    path = tmp_path / "gpus.yaml"
    path.write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(FileError, match=message):
        read_yaml(path, catalog._Gpus)


def test_balance_is_flops_over_bytes() -> None:
    """rho = phi / beta in FLOP per byte."""
    g = Gpu.model_validate(catalog.gpu("h20").model_dump())
    assert g.balance == pytest.approx(37)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-8b", 7.57), ("llada-2.1-mini", 15.9), ("qwen3-30b-a3b", 30.2), ("mixtral-8x7b", 46.6)],
)
def test_a_models_weights_are_its_published_count_without_the_embedding(name: str, billions: float) -> None:
    """Within 1.5%; with k experts a layer, its active ones; the cache is two vectors a KV head and token."""
    model = catalog.model(name)
    assert model.weights() / 1e9 == pytest.approx(billions, rel=0.015)
    assert model.attention is not None
    assert model.cached(1000, 3) == (model.layers or 0) * 3 * 1000 * model.attention.cached_width
    if model.moe is not None:
        assert model.weights(model.moe.top_k) < 0.35 * model.weights()


def test_what_datasheet_predictions_are_off_by_is_known_of_what_is_recorded() -> None:
    """GEMMs and experts of both frameworks; a framework without recordings has the widest; attention has none."""
    for module in ("dense", "moe"):
        both = [catalog.datasheet_spread(module, framework) for framework in ("vllm", "sglang")]
        assert None not in both
        lows, highs = zip(*(b for b in both if b is not None), strict=True)
        assert all(low < high for low, high in zip(lows, highs, strict=True))
        assert catalog.datasheet_spread(module, "my-kernels") == (min(lows), max(highs))
    assert catalog.datasheet_spread("attention", "flash-attn") is None


@pytest.mark.parametrize(
    ("digits", "said"),
    [
        (12, "hidden_size: must be at most 1,000,000,000, got 9999"),
        (400, "hidden_size: must be at most"),
        (5000, "broken JSON"),
    ],
)
def test_a_dimension_that_no_model_has_is_refused(tmp_path: Path, digits: int, said: str) -> None:
    """With the file and the field, before its arithmetic leaves the floats."""
    path = tmp_path / "config.json"
    rest = '"num_hidden_layers": 2, "num_attention_heads": 32, "intermediate_size": 64'
    path.write_text(f'{{"hidden_size": {"9" * digits}, {rest}}}', encoding="utf-8")
    with pytest.raises(FileError, match=f"config.json: {said}"):
        catalog.model(str(path))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"hidden_act": "silu"}, ("silu", 3, False)),
        ({"mlp_hidden_act": "relu2", "hidden_act": "silu"}, ("relu2", 2, False)),
        ({"hidden_act": "gelu_pytorch_tanh", "mlp_bias": True}, ("gelu_tanh", 3, True)),
        ({"hidden_act": "silu", "model_type": "gpt_oss"}, ("swigluoai", 3, True)),
        ({}, ("silu", 3, False)),
    ],
)
def test_the_experts_of_a_config_have_its_activation_gate_and_bias(
    tmp_path: Path, fields: dict[str, object], expected: tuple[str, int, bool]
) -> None:
    """What a choice of kernels asks, and the class by which SGLang chooses."""
    path = tmp_path / "config.json"
    config: dict[str, object] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    config |= {"moe_intermediate_size": 32, "architectures": ["AForCausalLM"]}
    path.write_text(json.dumps(config | fields), encoding="utf-8")
    model = catalog.model(str(path))
    assert model.moe is not None
    assert (model.moe.activation, model.moe.matrices, model.moe.bias) == expected
    assert model.architecture == "AForCausalLM"
