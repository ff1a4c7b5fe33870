"""The config.json of a model that an engine builds with dummy weights.

A model that was given as a config.json keeps its own architecture and fields, and so does one whose config.json is part of the
catalog (`catalog/configs`); every other model is Qwen3 or Qwen3-MoE at its dimensions. Scaled down, a given config has the scaled
dimensions, and a catalog model is Qwen3 or Qwen3-MoE.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pytest_nfp import catalog
from pytest_nfp.backends import Unsupported, most_positions
from pytest_nfp.backends.tensors import DTYPES
from pytest_nfp.cases import Case
from pytest_nfp.catalog import Model
from pytest_nfp.catalog.tiny import SUFFIX

LONGEST = 65536
"""Positions that a catalog model's rotary embedding is made for."""
TOP_K = ("num_experts_per_tok", "moe_topk")
"""What a config.json calls k."""


def torch_name(dtype: str) -> str:
    """A dtype as a config.json names it. Raises Unsupported for one that no full model is built with."""
    if dtype not in DTYPES:
        raise Unsupported(f"no full model is built with {dtype} weights; there are {', '.join(DTYPES)}")
    return str(DTYPES[dtype]).removeprefix("torch.")


def config_of(case: Case) -> dict[str, Any]:
    """The config of a case's model, with the case's k, and with room for its cached tokens and new positions.

    Raises Unsupported for dimensions that neither architecture has.
    """
    model = case.subject
    given = Path(model.source)
    if given.suffix == ".json" and given.is_file():
        found: dict[str, Any] = json.loads(given.read_text(encoding="utf-8"))
        return _for(case, _scaled(found, model) if model.name.endswith(SUFFIX) else found)
    if model.config is not None:
        own = json.loads((catalog.CONFIGS / model.config).read_text(encoding="utf-8"))
        return _for(case, own | {"dtype": torch_name(case.dtype), "torch_dtype": torch_name(case.dtype)})
    return _for(case, _qwen3(model, case.dtype))


def _for(case: Case, config: dict[str, Any]) -> dict[str, Any]:
    """With the case's k, and not too short for it: dummy weights know no length."""
    inner = config.get("text_config") or config
    changed: dict[str, Any] = {}
    name = next((name for name in TOP_K if inner.get(name) is not None), None)
    if case.top_k is not None and case.subject.moe is not None and name is not None:
        changed[name] = case.top_k
        groups, experts = inner.get("n_group"), case.subject.moe.experts
        if groups and case.top_k > experts * (inner.get("topk_group") or groups) // groups:
            changed["topk_group"] = groups  # So few groups of experts have not k of them.
    needed = (case.context or 0) + most_positions(case) + 1
    if (inner.get("max_position_embeddings") or needed) < needed:
        changed["max_position_embeddings"] = needed
    if config.get("text_config"):
        changed = {"text_config": inner | changed}
    return config | changed


def _qwen3(model: Model, dtype: str) -> dict[str, Any]:
    """Qwen3, or Qwen3-MoE, at the model's dimensions."""
    a = model.attention
    if a is None or a.value_dim is not None or model.layers is None:
        raise Unsupported(f"{model.name} can't be built: its attention is not that of a decoder with KV heads")
    moe, dense = model.moe, model.dense
    if moe is not None and moe.shared_experts:
        raise Unsupported(f"{model.name} has shared experts, which Qwen3-MoE has not: give its config.json")
    width = dense.width if dense is not None else 4 * model.hidden
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": model.hidden,
        "intermediate_size": width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "vocab_size": model.vocabulary or 1024,
        "max_position_embeddings": LONGEST,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": torch_name(dtype),
    }
    if moe is not None:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.width,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(moe.dense_layers)),
        }
    return config


def _scaled(config: dict[str, Any], model: Model) -> dict[str, Any]:
    """A given config at the dimensions of its scaled model. Raises Unsupported for one whose fields are not known here."""
    a, moe, dense = model.attention, model.moe, model.dense
    kinds = config.get("layer_types") or []
    if a is None or config.get("text_config") or set(kinds) - {"full_attention"}:
        raise Unsupported(f"{model.name}: this config can't be scaled down field by field: give --nfp-scale=full")
    sizes: dict[str, int | None] = {
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "vocab_size": model.vocabulary,
        "intermediate_size": dense.width if dense is not None else None,
    }
    found = config | {name: value for name, value in sizes.items() if value is not None}
    if kinds:
        found["layer_types"] = kinds[:1] * (model.layers or 0)  # all are of one kind
    if moe is not None:
        # Layers without experts, and shared ones, are not in a scaled model.
        found |= {
            name: 0 for name in ("first_k_dense_replace", "n_shared_experts", "num_shared_experts") if name in config
        }
    return found


def write(case: Case, folder: Path) -> Path:
    """The folder with the config.json of the case's model, whose type transformers then knows. Raises Unsupported."""
    config = config_of(case)
    if case.backend.framework != "transformers":  # It has none of the architectures whose type it does not know.
        make_known(config)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def make_known(config: dict[str, Any]) -> None:
    """Let transformers read a config of a type that comes with code of its own: an engine has the architecture, not the type."""
    name = config.get("model_type")
    try:
        from transformers import AutoConfig, PretrainedConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        return  # The engine says what it lacks.
    if not isinstance(name, str) or name in CONFIG_MAPPING or config.get("text_config"):
        return  # What holds a language model beside others is read by a class of its own.

    class Fields(PretrainedConfig):  # type: ignore[misc]
        """The fields as they are, and rotary parameters as newer engines read them."""

        model_type = name

        def __init__(self, **fields: Any) -> None:
            for field in ("max_position_embeddings", "rope_theta"):  # Read where rotary parameters are checked.
                if field in fields:
                    setattr(self, field, fields[field])
            super().__init__(**fields)
            plain = not fields.get("rope_scaling") and "rope_theta" in fields
            if plain and not getattr(self, "rope_parameters", None):
                self.rope_parameters = {"rope_type": "default", "rope_theta": fields["rope_theta"]}

    AutoConfig.register(name, Fields)


def architecture_of(case: Case) -> str:
    """The class that an engine builds."""
    return str((config_of(case).get("architectures") or ["?"])[0])
