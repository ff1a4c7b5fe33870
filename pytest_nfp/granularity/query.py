"""What a granularity rule is asked: release, device, dtype, shape and workload, without a Case around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["eager", "graph"]
MAX_COUNT = 4096
"""Counts that a map covers by default: token rows (MoE) or query rows (attention)."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a rule may ask of a device: the driver's name; capability and opt-in shared memory in bytes where known."""

    name: str
    compute_capability: tuple[int, int] | None = None
    shared_memory_optin: int | None = None


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """E experts of hidden x width on this rank, k per token."""

    experts: int
    width: int
    hidden: int
    top_k: int


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Query heads, KV heads, head dimension."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Query:
    """One question to one release. dtype: bf16, fp16, fp8 (per tensor) or fp8-block (128 x 128 scales)."""

    framework: str
    release: str
    device: DeviceFacts
    shape: ExpertShape | HeadShape
    dtype: str = "bf16"
    mode: Mode = "eager"
    batch: int = 1
    max_count: int = MAX_COUNT
