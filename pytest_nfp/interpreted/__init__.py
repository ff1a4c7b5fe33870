"""Executed work without a GPU: what a framework's own Triton kernels compute, counted under Triton's interpreter.

Evidence of granularity, never a latency: the FLOPs of every matrix product that the kernel executes, tile by tile, held to what
the map predicts. The kernels run in a process of their own (worker.py), in the interpreter that has the framework.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pytest_nfp.principle.routing import Routing, rows_per_expert

WORKER = Path(__file__).with_name("worker.py")
TIMEOUT_S = 900.0


class NotExecuted(Exception):
    """The kernel could not be run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Executed:
    """flops: N -> FLOPs of the matrix products of one forward at N positions. settings: N -> the configuration that the
    framework's own selector gave (empty for attention). error: largest relative error against an FP64 reference.
    """

    framework: str
    release: str
    kernel: str
    flops: Mapping[int, int]
    settings: Mapping[int, Mapping[str, int]]
    error: float


def experts(
    positions: Sequence[int],
    experts: int,
    top_k: int,
    hidden: int,
    width: int,
    routing: Literal["balanced", "skewed"] = "balanced",
    setting: Mapping[str, int] | None = None,
    python: str = sys.executable,
    framework: Literal["vllm", "sglang"] = "vllm",
) -> Executed:
    """A framework's fused experts at small dimensions. setting: a tile configuration that is forced, else its own rule.

    Raises NotExecuted where the interpreter has no such framework with its Triton kernels, or the kernel fails.
    """
    question = {
        "framework": framework,
        "module": "moe",
        "positions": list(positions),
        "experts": experts,
        "top_k": top_k,
        "hidden": hidden,
        "width": width,
        "routing": routing,
        "setting": dict(setting) if setting else None,
    }
    return _ask(question, python)


def attention(
    positions: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    python: str = sys.executable,
) -> Executed:
    """VLLM's unified attention over a paged cache of `context` tokens, causal. Raises NotExecuted."""
    question = {
        "framework": "vllm",
        "module": "attention",
        "positions": list(positions),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "context": context,
    }
    return _ask(question, python)


def predicted_experts_flops(
    routing: Routing, tokens: int, experts: int, top_k: int, hidden: int, width: int, setting: Mapping[str, int]
) -> float:
    """FLOPs of both GEMMs by the map: every expert's rows in tiles, and columns and depth in whole blocks too."""
    tile, columns, depth = (setting[f"BLOCK_SIZE_{axis}"] for axis in "MNK")
    tiles = sum(count * -(-rows // tile) for count, rows in rows_per_expert(routing, tokens, experts, top_k))
    first = _up(2 * width, columns) * _up(hidden, depth)
    second = _up(hidden, columns) * _up(width, depth)
    return 2.0 * tiles * tile * (first + second)


def query_tiles(positions: int, heads: int, kv_heads: int, rows: int) -> int:
    """Query tiles of one request where a tile of `rows` packs the query heads of a KV head."""
    group = heads // kv_heads
    return kv_heads * -(-positions // (rows // group))


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _ask(question: Mapping[str, Any], python: str) -> Executed:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    try:
        done = subprocess.run(
            [python, str(WORKER)],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotExecuted(f"the kernel was not run: {error}") from error
    line = next((line for line in done.stdout.splitlines() if line.startswith("EXECUTED")), None)
    if line is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise NotExecuted(f"the kernel was not run: {last[:300]}")
    answer = json.loads(line.removeprefix("EXECUTED"))
    if "reason" in answer:
        raise NotExecuted(answer["reason"])
    return Executed(
        question["framework"],
        answer["release"],
        answer["kernel"],
        {int(n): flops for n, flops in answer["flops"].items()},
        {int(n): setting for n, setting in answer["settings"].items()},
        answer["error"],
    )
