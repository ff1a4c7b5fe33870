"""A catalog model as a Hugging Face config.json: Qwen3's architecture, or Qwen3-MoE's, at the model's dimensions, dummy weights.

A model that was given as a config.json is run as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pytest_nfp.backends import Unsupported
from pytest_nfp.catalog import Model

TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MAX_POSITIONS = 65536


def config_of(model: Model, dtype: str) -> dict[str, Any]:
    """The config of a model. Raises Unsupported for dimensions that neither architecture has."""
    own = Path(model.source)
    if own.name.endswith(".json") and own.is_file():
        found: dict[str, Any] = json.loads(own.read_text(encoding="utf-8"))
        return found
    a = model.attention
    if a is None or a.value_dim is not None or model.layers is None:
        raise Unsupported(f"{model.name} can't be built: its attention is not that of a decoder with KV heads")
    moe, dense = model.moe, model.dense
    if moe is not None and moe.shared_experts:
        raise Unsupported(
            f"{model.name} has shared experts, which Qwen3-MoE has not: give its config.json, or --nfp-scale=tiny"
        )
    if dtype not in TORCH_NAMES:
        raise Unsupported(f"no full model is built with {dtype} weights; there are {', '.join(TORCH_NAMES)}")
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
        "dtype": TORCH_NAMES[dtype],
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


def write(model: Model, dtype: str, folder: Path) -> Path:
    """The folder with the model's config.json. Raises Unsupported."""
    (folder / "config.json").write_text(json.dumps(config_of(model, dtype), indent=1), encoding="utf-8")
    return folder


def weight_bytes(model: Model, dtype: str) -> int:
    """Bytes of all weights but the embedding, of which a forward reads a few rows: what one forward reads at N0 and beyond."""
    return int(_elements(model) * {"fp32": 4, "bf16": 2, "fp16": 2}.get(dtype, 2))


def cache_bytes(model: Model, dtype: str, context: int, batch: int) -> int:
    """Bytes of the KV cache that one forward reads."""
    assert model.attention is not None
    size = {"fp32": 4, "bf16": 2, "fp16": 2}.get(dtype, 2)
    return (model.layers or 0) * batch * context * model.attention.cached_width * size


def _elements(model: Model) -> int:
    a, hidden, layers = model.attention, model.hidden, model.layers or 0
    assert a is not None
    attention = hidden * a.head_dim * (2 * a.heads + 2 * a.kv_heads)
    dense = model.dense.width * hidden * 3 if model.dense is not None else 0
    if model.moe is None:
        ffn = layers * dense
    else:
        experts = model.moe.experts * model.moe.width * hidden * 3 + model.moe.experts * hidden
        ffn = model.moe.dense_layers * dense + (layers - model.moe.dense_layers) * experts
    return layers * attention + ffn + (model.vocabulary or 0) * hidden
