"""GPUs and models as data. The loaders report what is wrong with a name or a file."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pytest_nfp.escaping import Shown
from pytest_nfp.files import FileError, parse_json, read_yaml

Positive = Annotated[int, Field(gt=0)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FOLDER = Path(__file__).parent
CALIBRATIONS = FOLDER / "calibrations.yaml"
DATASHEET_ERRORS = FOLDER / "datasheet_errors.yaml"
CONFIGS = FOLDER / "configs"
"""The folder with config.json files of catalog models, as their engines read them."""


class UnknownName(Shown):
    """A GPU, model, backend or release is not known. The message lists near matches and how to add one."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Gpu(_Strict):
    """Datasheet figures of a GPU."""

    name: str
    """Catalog name, such as h20."""
    title: str
    """Name for readers."""
    aliases: tuple[str, ...] = ()
    """Other names that users write."""
    peak_tflops: PositiveNumber
    """Dense BF16 peak, TFLOP/s."""
    bandwidth_tbps: PositiveNumber
    """Memory bandwidth, TB/s."""
    compute_capability: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    """Compute capability, such as 9.0."""
    shared_memory_optin_kib: Positive
    """Shared memory that a block can opt in to, KiB."""
    multiprocessors: Positive | None = None
    """Number of multiprocessors, given where something is calibrated."""
    driver_names: tuple[str, ...]
    """Names as the driver reports them."""
    source: str
    """Where the figures were read."""

    @property
    def peak_flops(self) -> float:
        """phi, FLOP/s."""
        return self.peak_tflops * 1e12

    def peak_flops_of(self, dtype: str) -> float:
        """Phi of a dtype, FLOP/s: doubled for FP8 on GPUs that compute in it. INT4 weights are computed in BF16."""
        return self.peak_flops * (2 if dtype.startswith("fp8") and self.capability >= (8, 9) else 1)

    @property
    def bandwidth(self) -> float:
        """beta, bytes/s."""
        return self.bandwidth_tbps * 1e12

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, (major, minor)."""
        major, minor = (int(part) for part in self.compute_capability.split("."))
        return major, minor

    @property
    def balance(self) -> float:
        """Rho = phi / beta, FLOP per byte."""
        return self.peak_flops / self.bandwidth


class Dense(_Strict):
    """A dense FFN: `matrices` GEMMs of hidden x width (3 with a gate)."""

    width: Positive
    matrices: Literal[2, 3] = 2


class Attention(_Strict):
    """An attention core."""

    heads: Positive
    """Query heads."""
    kv_heads: Positive
    """KV heads."""
    head_dim: Positive
    """Dimensions of a head's key."""
    value_dim: Positive | None = None
    """For MLA in its decode form: the values are this many of a key's dimensions (512 of 576). All heads share one key.

    None: keys and values are separate and have the same width.
    """

    @model_validator(mode="after")
    def _latent_is_inside_the_key(self) -> Attention:
        if self.value_dim is not None and (self.kv_heads != 1 or self.value_dim >= self.head_dim):
            raise ValueError("value_dim is that of MLA: one KV head, and less than head_dim")
        return self

    @property
    def group(self) -> int:
        """Query heads per KV head (1 is MHA)."""
        return self.heads // self.kv_heads

    @property
    def values(self) -> int:
        """Width of a value, in elements."""
        return self.value_dim or self.head_dim

    @property
    def cached_width(self) -> int:
        """Cached elements of one token: keys and values of all KV heads. For MLA: the latent and the rotary key."""
        return self.head_dim if self.value_dim else 2 * self.kv_heads * self.head_dim

    @property
    def reuse(self) -> float:
        """How many query elements use one cached element: the group, or more where the values lie inside the keys."""
        return self.heads * (self.head_dim + self.values) / self.cached_width


class Moe(_Strict):
    """Routed experts of hidden x width."""

    experts: Positive
    """E, experts of a layer."""
    top_k: Positive
    """k, experts per token."""
    width: Positive
    """Intermediate width of an expert."""
    matrices: Literal[2, 3] = 3
    """Matrices of an expert: 3 with a gate, 2 without."""
    shared_experts: Annotated[int, Field(ge=0)] = 0
    """Shared experts of a layer."""
    dense_layers: Annotated[int, Field(ge=0)] = 0
    """Layers of the model that have a dense FFN in place of experts."""
    expert_parallel: Positive = 1
    """Ranks that the experts are spread over."""
    activation: str = "silu"
    """Activation by its name in a config.json. The choice of kernels depends on it."""
    bias: bool = False
    """Whether the experts have a bias. The choice of kernels depends on it."""

    @property
    def local_experts(self) -> int:
        """Experts on one rank, which is the number that a rule sees."""
        return self.experts // self.expert_parallel


class Model(_Strict):
    """A model, or one module shape, and the grid on which it is tested by default."""

    name: str
    """Catalog name."""
    aliases: tuple[str, ...] = ()
    """Other names that users write."""
    layers: Positive | None = None
    """Layers; None for a module shape."""
    hidden: Positive
    """Hidden size."""
    dense: Dense | None = None
    """Its dense FFN, where it has one."""
    attention: Attention | None = None
    """Its attention core, where it has one."""
    moe: Moe | None = None
    """Its routed experts, where it has them."""
    vocabulary: Positive | None = None
    """Size of the vocabulary."""
    batch: tuple[Positive, ...] = (1,)
    """b of the grid, requests in a forward."""
    context: tuple[Positive, ...] = ()
    """L of the grid, cached tokens of a request."""
    top_k: tuple[Positive, ...] = ()
    """k of the grid, experts per token."""
    sweep_top_k: tuple[Positive, ...] = ()
    """Further k of the whole model, at its shortest context."""
    gate: bool = False
    """Whether it is tested where neither --nfp-model nor the baselines name a subject."""
    device: Literal["gpu", "cpu"] = "gpu"
    """The device that it is tested on."""
    config: str | None = None
    """Its own config.json under `configs/`, for a model that is neither Qwen3 nor Qwen3-MoE."""
    architecture: str = ""
    """The class that an engine builds, by which SGLang chooses kernels."""
    source: str
    """Where the dimensions were read."""

    @property
    def is_latent(self) -> bool:
        """Whether its attention is MLA."""
        return self.attention is not None and self.attention.value_dim is not None

    def weights(self, experts: float | None = None) -> float:
        """Number of weights that one forward of the whole model reads.

        experts: how many experts of each layer it reads (None: all). A part that the model lacks counts 0.
        The head counts. The embedding does not, as a forward reads only a few of its rows.
        """
        a, layers, hidden, moe = self.attention, self.layers or 0, self.hidden, self.moe
        attention = hidden * a.head_dim * (2 * a.heads + 2 * a.kv_heads) if a is not None else 0
        dense = self.dense.width * hidden * self.dense.matrices if self.dense is not None else 0
        ffn: float = layers * dense
        if moe is not None:
            read = moe.experts if experts is None else experts
            expert = 3 * moe.width * hidden
            ffn = moe.dense_layers * dense + (layers - moe.dense_layers) * (
                (read + moe.shared_experts) * expert + moe.experts * hidden
            )
        return layers * attention + ffn + (self.vocabulary or 0) * hidden

    def cached(self, context: int, batch: int = 1) -> int:
        """Elements of the KV cache that one forward reads over `context` tokens of each request."""
        return (self.layers or 0) * batch * context * (self.attention.cached_width if self.attention is not None else 0)


class Method(_Strict):
    """A parallel-decoding method."""

    name: str
    """Name of the method."""
    kind: str
    """Kind of the method."""
    positions: Positive | None
    """N, positions of one forward; None where its source states none."""
    stated: str
    """What the source states. It may be the number of tokens that a step commits, which is never N."""
    source: str
    """Where it is stated."""


class _Methods(_Strict):
    schema_: Literal[1] = Field(alias="schema")
    methods: tuple[Method, ...]


class _Gpus(_Strict):
    schema_: Literal[1] = Field(alias="schema")
    gpus: tuple[Gpu, ...]


class _Models(_Strict):
    schema_: Literal[1] = Field(alias="schema")
    models: tuple[Model, ...]


@lru_cache(maxsize=1)
def gpus() -> tuple[Gpu, ...]:
    """Every GPU of the catalog, in its order."""
    return read_yaml(FOLDER / "gpus.yaml", _Gpus, is_shipped=True).gpus


@lru_cache(maxsize=1)
def models() -> tuple[Model, ...]:
    """Every model and module shape of the catalog, in its order."""
    return read_yaml(FOLDER / "models.yaml", _Models, is_shipped=True).models


class _DatasheetError(_Strict):
    """The range that holds 95% of the recorded N_max of a module and framework, as shares of the principle's N_max."""

    module: Literal["dense", "moe"]
    framework: str
    low: PositiveNumber
    high: PositiveNumber
    curves: Positive


class _DatasheetErrors(_Strict):
    schema_: Literal[1] = Field(alias="schema")
    source: str
    errors: tuple[_DatasheetError, ...]


@lru_cache(maxsize=1)
def _datasheet_errors() -> tuple[_DatasheetError, ...]:
    return read_yaml(DATASHEET_ERRORS, _DatasheetErrors, is_shipped=True).errors


def datasheet_spread(module: str, framework: str) -> tuple[float, float] | None:
    """Recorded N_max over the N_max that the principle predicts from datasheet figures: the range that holds 95%.

    A framework without recordings gets the widest range of the module. None for a module without recordings.
    """
    known = [e for e in _datasheet_errors() if e.module == module]
    errors = [e for e in known if e.framework == framework] or known
    return (min(e.low for e in errors), max(e.high for e in errors)) if errors else None


@lru_cache(maxsize=1)
def methods() -> tuple[Method, ...]:
    """Every parallel-decoding method of the catalog, in its order."""
    return read_yaml(FOLDER / "methods.yaml", _Methods, is_shipped=True).methods


def method(name: str) -> Method:
    """A method by its name. Raises UnknownName with the near matches."""
    for m in methods():
        if m.name == name.lower():
            return m
    raise UnknownName(unknown("method", name, [m.name for m in methods()], "give its positions with --positions"))


def gpu(name: str) -> Gpu:
    """A GPU by catalog name, alias or driver name. Raises UnknownName with the near matches."""
    for g in gpus():
        if name.lower() in {n.lower() for n in (g.name, *g.aliases, *g.driver_names)}:
            return g
    raise UnknownName(unknown("GPU", name, [g.name for g in gpus()], "add it to pytest_nfp/catalog/gpus.yaml"))


def model(name: str) -> Model:
    """A model by catalog name, alias, or path of a Hugging Face config.json.

    Raises UnknownName with the near matches, FileError for a config.json that can't be used.
    """
    if name.endswith(".json"):
        return model_from_config(Path(name))
    for m in models():
        if name.lower() in {n.lower() for n in (m.name, *m.aliases)}:
            return m
    how = "give the path of its Hugging Face config.json, or add it to pytest_nfp/catalog/models.yaml"
    raise UnknownName(unknown("model", name, [m.name for m in models()], how))


def unknown(what: str, value: str, known: Iterable[str], how_to_add: str) -> str:
    """The message for every unknown name: the value, near matches, the known names, and how to add one."""
    names = sorted(set(known), key=str.lower)
    # A short value can be near the family of a long name: lada for llada-2.1-mini.
    families: dict[str, list[str]] = {}
    for n in names:
        families.setdefault(n.lower(), []).append(n)
        families.setdefault(re.split(r"[-./]", n.lower())[0], []).append(n)
    near = difflib.get_close_matches(value.lower(), families, n=4, cutoff=0.6)
    shown = list(dict.fromkeys(n for family in near for n in families[family]))[:4]
    text = f"unknown {what} {value!r}"
    if shown:
        text += f"; did you mean {', '.join(shown)}?"
    text += f" Known: {', '.join(names)}. To use another: {how_to_add}."
    return text


LARGEST = 10**9
"""The largest dimension of a model. A larger one means a broken file, and its arithmetic would exceed the floats."""
UNGATED = ("relu2",)
"""Activations whose experts have no gate: Nemotron's squared ReLU (`mlp_hidden_act`)."""
ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
"""Name of an activation in a config.json -> its name in the frameworks' choices of kernels."""


def _activation(config: dict[str, object], path: Path) -> dict[str, object]:
    """Activation, gating and bias of the experts, from the fields that the model families use. Raises FileError."""
    for name in ("mlp_hidden_act", "hidden_act", "hidden_activation"):
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise FileError(f"{path}: {name}: must be the name of an activation, got {value!r}")
        activation = ACTIVATIONS.get(value, value)
        break
    else:
        activation = "silu"
    if config.get("model_type") == "gpt_oss":
        # Its swiglu with a clamp and a bias is a separate kernel. `hidden_act` does not tell it apart.
        return {"activation": "swigluoai", "bias": True}
    bias = config.get("mlp_bias") is True
    return {"activation": activation, "matrices": 2 if activation in UNGATED else 3, "bias": bias}


def model_from_config(path: Path) -> Model:
    """A model from a Hugging Face config.json, by the field names that the model families use.

    Raises FileError naming the file and the field.
    """
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: can't be read: {error}") from error
    except json.JSONDecodeError as error:
        raise FileError(f"{path}:{error.lineno}: broken JSON: {error.msg}") from error
    except (
        ValueError
    ) as error:  # A number of thousands of digits, lists nested too deeply, or a name that occurs twice.
        raise FileError(f"{path}: broken JSON: {error}") from error
    if not isinstance(config, dict):
        raise FileError(f"{path}:1: a config.json holds an object, this one a {type(config).__name__}")
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    # Multimodal configs keep the language model's dimensions one level down.
    config = config.get("text_config") or config

    def first(*names: str) -> int | None:
        for name in names:
            value = config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise FileError(f"{path}: {name}: must be a whole number of at least 0, got {value!r}")
            if value > LARGEST:
                raise FileError(f"{path}: {name}: must be at most {LARGEST:,}, got {str(value)[:40]}")
            return value
        return None

    def needed(*names: str) -> int:
        value = first(*names)
        if not value:
            raise FileError(f"{path}: {names[0]}: missing or 0, and without it the model can't be described")
        return value

    hidden, heads = needed("hidden_size"), needed("num_attention_heads")
    experts = first("num_experts", "n_routed_experts", "num_local_experts")
    layers = needed("num_hidden_layers")
    width = first("intermediate_size")
    moe = None
    dense_layers = 0
    if experts:
        dense_layers = first("first_k_dense_replace") or 0
        moe = {
            "experts": experts,
            "top_k": needed("num_experts_per_tok", "moe_topk"),
            "width": first("moe_intermediate_size") or needed("intermediate_size"),
            "shared_experts": first("n_shared_experts", "num_shared_experts") or 0,
            "dense_layers": dense_layers,
            **_activation(config, path),
        }
    attention = {
        "heads": heads,
        "kv_heads": first("num_key_value_heads") or heads,
        "head_dim": first("head_dim") or hidden // heads,
    }
    if latent := first("kv_lora_rank"):
        # MLA in its decode form: all heads share one latent key, which has a rotary part beside it.
        attention = {
            "heads": heads,
            "kv_heads": 1,
            "head_dim": latent + needed("qk_rope_head_dim"),
            "value_dim": latent,
        }
    try:
        return Model.model_validate(
            {
                "name": path.parent.name if path.name == "config.json" and path.parent.name else path.stem,
                "layers": layers,
                "hidden": hidden,
                "dense": {"width": width, "matrices": 3} if width and (not moe or dense_layers) else None,
                "attention": attention,
                "vocabulary": first("vocab_size") or None,
                "moe": moe,
                "context": (256, 4096),
                "architecture": architecture,
                "source": str(path),
            }
        )
    except ValidationError as error:
        e = error.errors(include_url=False)[0]
        raise FileError(f"{path}: {'.'.join(str(p) for p in e['loc'])}: {e['msg']}") from error
