"""A catalog model as a config that engines build, and whether there is room for it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from pytest_nfp import catalog, frameworks
from pytest_nfp.backends import Unsupported, architectures, hf_config, memory, most_positions, require_room
from pytest_nfp.cases import Backend, Case, expand
from pytest_nfp.catalog.tiny import tiny
from pytest_nfp.measure.grid import positions_to_measure

QWEN = catalog.model("qwen3-8b")
CASE = Case("cpu", Backend("transformers", "5.19.0"), "model", QWEN, "fp32", context=512)


def of(name: str, dtype: str = "fp32", **more: object) -> Case:
    """A case of a catalog model, or of a config.json."""
    return replace(CASE, subject=catalog.model(name), dtype=dtype, **more)  # type: ignore[arg-type]


def test_a_dense_model_is_qwen3_at_its_dimensions(tmp_path: Path) -> None:
    """Written where an engine reads it."""
    path = hf_config.write(of("qwen3-8b", "bf16"), tmp_path) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]) == (4096, 12288, 36)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (32, 8, 128)
    assert config["dtype"] == "bfloat16"


def test_experts_are_qwen3_moe() -> None:
    """E, k and width of the model."""
    config = hf_config.config_of(replace(CASE, subject=tiny(catalog.model("llada-2.1-mini"))))
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"]) == (256, 8, 512)


@pytest.mark.parametrize("model", [m for m in catalog.models() if m.config], ids=lambda m: m.name)
def test_a_config_of_the_catalog_is_the_catalogs_model(model: catalog.Model) -> None:
    """The file's dimensions are those that the cases are made of, so that what is built is what the case says."""
    read = catalog.model_from_config(catalog.CONFIGS / str(model.config))
    same = ("layers", "hidden", "dense", "attention", "moe", "vocabulary")
    assert {f: getattr(read, f) for f in same} == {f: getattr(model, f) for f in same}
    config = hf_config.config_of(replace(CASE, subject=model, dtype="bf16"))
    assert config["num_shared_experts"] == config["first_k_dense_replace"] == 1
    assert config["torch_dtype"] == "bfloat16"


def test_every_file_of_configs_is_a_models() -> None:
    """None is left behind when its model goes."""
    assert sorted(p.name for p in catalog.CONFIGS.iterdir()) == sorted(m.config for m in catalog.models() if m.config)


def test_the_case_decides_k_and_length() -> None:
    """Another k than the model's is built, with groups enough to have k experts; cached tokens past the model's own length fit."""
    own = hf_config.config_of(of("llada-2.1-mini", context=32768, top_k=8))
    assert (own["num_experts_per_tok"], own["topk_group"]) == (8, 4)
    assert own["max_position_embeddings"] == 32768 + 1024 + 1
    assert hf_config.config_of(of("llada-2.1-mini", context=256, top_k=8))["max_position_embeddings"] == 32768
    swept = hf_config.config_of(of("llada-2.1-mini", top_k=256))
    assert (swept["num_experts_per_tok"], swept["topk_group"]) == (256, 8)
    assert hf_config.config_of(of("mixtral-8x7b", top_k=4))["num_experts_per_tok"] == 4


def test_fields_that_are_null_or_named_otherwise(tmp_path: Path) -> None:
    """k by the name that has a value, E by any of its names, no length, no group count, no architecture: as if the field were not there."""
    given = {
        "architectures": None, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "n_routed_experts": 128,
        "num_experts_per_tok": None, "moe_topk": 8, "moe_intermediate_size": 64, "n_group": 8, "topk_group": 4,
        "max_position_embeddings": None,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    assert hf_config.config_of(of(str(path), top_k=8)) == given
    assert hf_config.config_of(of(str(path), top_k=16)) == given | {"moe_topk": 16}
    assert hf_config.config_of(of(str(path), top_k=65)) == given | {"moe_topk": 65, "topk_group": 8}
    path.write_text(json.dumps(given | {"topk_group": None}), encoding="utf-8")
    assert hf_config.config_of(of(str(path), top_k=65))["topk_group"] is None
    assert hf_config.architecture_of(of(str(path))) == "?"


def test_a_text_config_that_is_null_is_none(tmp_path: Path) -> None:
    """And a model whose architecture is not named says which field is missing."""
    given = {"text_config": None, "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    assert hf_config.config_of(of(str(path))) == given
    assert "has no field architectures" in architectures.elsewhere(of(str(path)))


def test_few_experts_a_token_need_room_for_more_positions() -> None:
    """A sweep from N0 = E/k goes sixteen times as far: cache and length are made for it."""
    few = of("llada-2.1-mini", context=32768, top_k=2, routing="balanced")
    assert most_positions(few) == 16 * 128
    assert hf_config.config_of(few)["max_position_embeddings"] == 32768 + 16 * 128 + 1
    require_room(few, 16 * 128)
    with pytest.raises(Unsupported, match="made for 1024 new positions, not 1025"):
        require_room(replace(few, routing="skewed"), 1025)


@pytest.mark.parametrize("model", [m for m in catalog.models() if m.layers], ids=lambda m: m.name)
def test_what_a_sweep_asks_for_has_room(model: catalog.Model) -> None:
    """Every N of every case of a whole model fits the cache that an engine makes for it."""
    for case in expand("h200", Backend("sglang", "0.5.23"), "model", model):
        for positions in positions_to_measure(case, None):
            require_room(case, positions)


def test_a_config_that_was_given_is_run_as_it_is(tmp_path: Path) -> None:
    """Its architecture and all of its fields; one level down where its language model is."""
    given = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512, "rope_theta": 5e5,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    assert hf_config.config_of(of(str(path))) == given
    inner = given | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    path.write_text(json.dumps({"architectures": ["Odd"], "text_config": inner}), encoding="utf-8")
    asked = of(str(path), top_k=4)
    assert hf_config.config_of(asked) == {
        "architectures": ["Odd"],
        "text_config": inner | {"num_experts_per_tok": 4},
    }


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("deepseek-v3", "bf16", "its attention is not that of a decoder with KV heads"),
        ("qwen3-8b", "fp8", "no full model is built with fp8 weights"),
        ("llada-2.1-mini", "fp8", "no full model is built with fp8 weights"),
    ],
)
def test_what_can_not_be_built_says_why(name: str, dtype: str, reason: str) -> None:
    """MLA, weights with scales."""
    with pytest.raises(Unsupported, match=reason):
        hf_config.config_of(of(name, dtype))


def test_shared_experts_need_a_config_of_their_own() -> None:
    """Qwen3-MoE has none: they are not left out silently."""
    bare = catalog.model("llada-2.1-mini").model_copy(update={"config": None})
    with pytest.raises(Unsupported, match="has shared experts, which Qwen3-MoE has not"):
        hf_config.config_of(replace(CASE, subject=bare))


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    """Engines that are nothing but the file in which they name their architectures."""
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    for package, text in files.items():
        place = frameworks.known()[package].architectures
        assert place is not None
        path = folder / package / place[1]
        path = path / "llada2.py" if package == "sglang" else path
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
        (folder / package / "__init__.py").touch()
        monkeypatch.delitem(sys.modules, package, raising=False)


def test_who_has_an_architecture_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without it names those that are installed and have it, and those that the catalog knows of; one that has it, nobody."""
    asked = of("llada-2.1-mini")
    vllm = replace(asked, backend=Backend("vllm", "0.32.0"))
    installed(tmp_path / "a", monkeypatch, vllm='M = {"Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM")}')
    said = "; LLaDA2MoeModelLM is registered by no engine that is installed here, and by sglang"
    assert architectures.elsewhere(vllm) == said
    installed(
        tmp_path / "b", monkeypatch, vllm="M = {}", sglang="EntryClass = [\n    Other,\n    LLaDA2MoeModelLM,\n]\n"
    )
    assert architectures.elsewhere(vllm) == "; LLaDA2MoeModelLM is registered by sglang"
    assert architectures.elsewhere(replace(asked, backend=Backend("sglang", "0.5.23"))) == ""
    installed(tmp_path / "c", monkeypatch, vllm='M = {"Llama": 1}', sglang="EntryClass = LLaDA2MoeModelLMTwo\n")
    assert "no engine that is installed here" in architectures.elsewhere(vllm)
    classes = 'MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict(\n    [("x", "XForCausalLM")]\n)\nOTHERS = {"y": "YForPooling"}\n'
    installed(tmp_path / "d", monkeypatch, transformers=classes)
    given = tmp_path / "config.json"
    for name, is_there in (("XForCausalLM", True), ("YForPooling", False)):
        config = {"architectures": [name], "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
        given.write_text(json.dumps(config), encoding="utf-8")
        told = architectures.elsewhere(replace(vllm, subject=catalog.model(str(given))))
        assert ("is registered by transformers" in told) is is_there
    ling = replace(vllm, subject=catalog.model("ling-2.0-mini"))
    assert architectures.elsewhere(ling).endswith("and by vllm from 0.11 and sglang")


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
