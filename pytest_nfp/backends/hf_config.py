"""A catalog model as a Hugging Face config.json: Qwen3's architecture, or Qwen3-MoE's, at the model's dimensions, dummy weights.

A model that was given as a config.json keeps its own architecture and fields; scaled down, its dimensions are the scaled ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pytest_nfp.backends import Unsupported
from pytest_nfp.backends.places import DTYPES
from pytest_nfp.catalog import Model
from pytest_nfp.scale import SUFFIX

MAX_POSITIONS = 65536


def torch_name(dtype: str) -> str:
    """A dtype as a config.json names it. Raises Unsupported for one that no full model is built with."""
    if dtype not in DTYPES:
        raise Unsupported(f"no full model is built with {dtype} weights; there are {', '.join(DTYPES)}")
    return str(DTYPES[dtype]).removeprefix("torch.")


def config_of(model: Model, dtype: str) -> dict[str, Any]:
    """The config of a model. Raises Unsupported for dimensions that neither architecture has."""
    own = Path(model.source)
    if own.name.endswith(".json") and own.is_file():
        found: dict[str, Any] = json.loads(own.read_text(encoding="utf-8"))
        return _scaled(found, model) if model.name.endswith(SUFFIX) else found
    a = model.attention
    if a is None or a.value_dim is not None or model.layers is None:
        raise Unsupported(f"{model.name} can't be built: its attention is not that of a decoder with KV heads")
    moe, dense = model.moe, model.dense
    if moe is not None and moe.shared_experts:
        raise Unsupported(
            f"{model.name} has shared experts, which Qwen3-MoE has not: give its config.json, or --nfp-scale=tiny"
        )
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
        "max_position_embeddings": MAX_POSITIONS,
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
    if a is None or "text_config" in config or "layer_types" in config:
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
    if moe is not None:
        # Layers without experts, and shared ones, are not in a scaled model.
        found |= {
            name: 0 for name in ("first_k_dense_replace", "n_shared_experts", "num_shared_experts") if name in config
        }
    return found


def write(model: Model, dtype: str, folder: Path) -> Path:
    """The folder with the model's config.json. Raises Unsupported."""
    (folder / "config.json").write_text(json.dumps(config_of(model, dtype), indent=1), encoding="utf-8")
    return folder
