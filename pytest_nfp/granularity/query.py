"""What a granularity rule is asked: release, device, dtype, shape and workload, without a Case around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["eager", "graph"]
MAX_COUNT = 4096
"""Counts that a map covers by default: token rows (MoE) or query rows (attention)."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a rule may ask of a device: the driver's name; capability and opt-in shared memory in bytes where known.

    architecture: of another maker's device, such as gfx942; "" for NVIDIA's.
    """

    name: str
    compute_capability: tuple[int, int] | None = None
    shared_memory_optin: int | None = None
    architecture: str = ""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """E experts of hidden x width on this rank, k per token; `expert_parallel` ranks share all experts.

    Under expert parallelism `experts` are the local ones: rules see the weights of their rank. activation, gated (up and gate,
    or up alone) and bias are what a choice of kernels asks.
    """

    experts: int
    width: int
    hidden: int
    top_k: int
    expert_parallel: int = 1
    activation: str = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Query heads, KV heads, head dimension of queries and keys, and that of values where it differs (MLA).

    MLA's decode form has one KV head: queries and keys of the latent and rotary width, values of the latent width. Kernels
    that take the two apart name the rotary width alone as head_dim (64, with values of 512).
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None

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
    """One question to one release. dtype: bf16, fp16, fp8 (per tensor) or fp8-block (128 x 128 scales).

    architecture: the model's class, such as Qwen3MoeForCausalLM, which SGLang chooses its runner by; "" for one without its own choice.
    """

    framework: str
    release: str
    device: DeviceFacts
    shape: ExpertShape | HeadShape
    dtype: str = "bf16"
    mode: Mode = "eager"
    batch: int = 1
    max_count: int = MAX_COUNT
    architecture: str = ""
