"""The question to a granularity rule: release, device, dtype, shape and workload, without a Case around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["eager", "graph"]
MAX_COUNT = 4096
"""Counts that a map covers by default: token rows (MoE) or query rows (attention)."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The facts about a device that a rule may ask for."""

    name: str
    """The driver's name of the device."""
    compute_capability: tuple[int, int] | None = None
    """(major, minor). None where it is not known."""
    shared_memory_optin: int | None = None
    """Opt-in shared memory in bytes. None where it is not known."""
    architecture: str = ""
    """Architecture of another maker's device, such as gfx942. "" for NVIDIA's devices."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of one rank. activation, gated and bias are what a choice of kernels asks for."""

    experts: int
    """E of this rank. Under expert parallelism these are the local experts: a rule sees the weights of its rank."""
    width: int
    """Inner width of an expert."""
    hidden: int
    """Width of a token."""
    top_k: int
    """Experts per token."""
    expert_parallel: int = 1
    """Number of ranks that share all experts."""
    activation: str = "silu"
    """Name of the activation function."""
    gated: bool = True
    """Whether an expert has up and gate matrices, or up alone."""
    bias: bool = False
    """Whether the experts have biases."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of an attention layer.

    The decode form of MLA has one KV head: queries and keys have the latent and the rotary width, values the latent
    width. Kernels that take the two apart name the rotary width alone as head_dim (64, with values of 512).
    """

    heads: int
    """Query heads."""
    kv_heads: int
    """KV heads."""
    head_dim: int
    """Width of a query and of a key."""
    value_dim: int | None = None
    """Width of a value where it differs from head_dim (MLA), else None."""

    @property
    def values(self) -> int:
        """Width of a value."""
        return self.value_dim or self.head_dim

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Query:
    """One question to one release."""

    framework: str
    """Name of the framework."""
    release: str
    """Version of the framework."""
    device: DeviceFacts
    """The device that the kernel runs on."""
    shape: ExpertShape | HeadShape
    """The experts or the heads that the rule is asked about."""
    dtype: str = "bf16"
    """bf16, fp16, fp8 (per tensor) or fp8-block (128 x 128 scales)."""
    mode: Mode = "eager"
    """eager, or graph for CUDA graphs."""
    batch: int = 1
    """Requests."""
    max_count: int = MAX_COUNT
    """The map covers counts from 1 to this one."""
    architecture: str = ""
    """The model's class, such as Qwen3MoeForCausalLM, by which SGLang chooses its runner. "" for a class without a
    choice of its own."""
