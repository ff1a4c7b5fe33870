"""A model that is small enough for a CPU and keeps the ratios that decide granularity."""

from __future__ import annotations

import math

from pytest_nfp.catalog import Attention, Dense, Model, Moe

HIDDEN = {"dense": 1024, "moe": 256}
LAYERS = {"dense": 4, "moe": 6}
"""Enough layers that one forward, with k experts a layer, reads more than two common last-level caches hold."""
CPU_BYTES = 4
"""Bytes of a weight. Cases on a CPU are in FP32."""
VOCABULARY = 1024
LONGEST = 4096
SUFFIX = "~tiny"


def tiny(model: Model, cold_bytes: int = 0) -> Model:
    """The model with fewer and narrower layers, named model~tiny.

    Kept: head dimension, query heads per KV head, experts, k, expert width, the dense width over the hidden size.
    Changed: one KV head, no shared experts, no dense layers before the experts.
    cold_bytes: the bytes that a forward must read at the least, in FP32 and with k experts a layer, so that its weights
    have left the cache when they are read again. Layers are added until it does.
    Raises ValueError for a model without attention or FFN.
    """
    if model.attention is None or (model.dense is None and model.moe is None):
        raise ValueError(f"{model.name} is a module shape, not a model")
    kind = "moe" if model.moe is not None else "dense"
    hidden = min(model.hidden, HIDDEN[kind])
    a = model.attention
    dense, moe = model.dense, None
    if model.moe is not None:
        dense = None
        moe = Moe(experts=model.moe.experts, top_k=model.moe.top_k, width=model.moe.width)
    elif dense is not None:
        dense = Dense(width=max(1, dense.width * hidden // model.hidden), matrices=dense.matrices)
    small = model.model_copy(
        update={
            "name": model.name + SUFFIX,
            "hidden": hidden,
            "layers": min(model.layers or LAYERS[kind], LAYERS[kind]),
            "dense": dense,
            "moe": moe,
            "attention": Attention(heads=a.group, kv_heads=1, head_dim=a.head_dim, value_dim=a.value_dim),
            "vocabulary": min(model.vocabulary or VOCABULARY, VOCABULARY),
            "batch": (1,),
            "sweep_top_k": (),
            "config": None,
            # The shortest context, and the longest that a CPU can hold.
            "context": tuple(
                sorted({min(model.context, default=512), max((c for c in model.context if c <= LONGEST), default=512)})
            ),
        }
    )
    layers = small.layers
    assert layers is not None
    one_layer, two_layers = (_read(small.model_copy(update={"layers": n})) for n in (1, 2))
    missing = cold_bytes - _read(small)
    return (
        small
        if missing <= 0
        else small.model_copy(update={"layers": layers + math.ceil(missing / (two_layers - one_layer))})
    )


def _read(model: Model) -> float:
    """Bytes of the weights that a forward reads at the least: with k experts a layer."""
    return CPU_BYTES * model.weights(model.moe.top_k if model.moe is not None else None)
