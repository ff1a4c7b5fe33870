"""Recorded attention curves: T over query positions on top of cached tokens.

They come from the vLLM and SGLang tables for sparse attention, MLA, attention and linear attention. Most tables hold
one position for each request (decode) or no cached tokens (prefill). Those give no curve, and the counts name the
reason.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_nfp.principle import Point
from pytest_nfp.recordings import tables

FOLDERS = ("attention", "mla", "sparse_attention", "msa", "kda", "linear_attention")
"""Folders of the tables that are read."""
MIN_POSITIONS = 5
"""Fewest counts of positions of a curve."""
MAX_POSITIONS = 512
"""Most positions of a point."""
SAME = 1.25
"""A point is no point if two measurements of it differ by more than this factor."""
EAGER = ("dsa_context_module", "msa_context_module")
"""Tables that were timed without CUDA graphs: their times include launches."""


@dataclass(frozen=True, slots=True)
class AttentionCurve:
    """T in microseconds over N query positions of each request."""

    gpu: str
    """Catalog name of the GPU."""
    framework: str
    """Name of the framework."""
    release: str
    """Version of the framework."""
    table: str
    """What was timed, such as dsv4_csa_topk_calib."""
    kernel: str
    """Kernel, by the name that the table gives it."""
    batch: int
    """Requests."""
    context: int
    """Cached tokens of each request."""
    setting: tuple[tuple[str, str], ...]
    """(column, value) of the other columns that tell curves apart, such as heads, tensor parallelism and dtypes."""
    points: tuple[Point, ...]
    """T over N."""
    source: str
    """The table that holds the curve."""


@dataclass(frozen=True, slots=True)
class Found:
    """Curves, and by reason the number of tables and curves that were left out."""

    curves: tuple[AttentionCurve, ...]
    left_out: dict[str, int]


@lru_cache(maxsize=16)
def read(gpu: str) -> Found:
    """Every curve of a GPU. Raises NoRecording if no tables are installed or none is of this GPU."""
    curves: list[AttentionCurve] = []
    left_out: Counter[str] = Counter()
    for framework, release, path in tables.tables(gpu, FOLDERS):
        name = path.name.removesuffix("_perf.parquet")
        if name in EAGER:
            left_out[f"{name}: timed without CUDA graphs"] += 1
            continue
        curves += _curves(gpu, framework, release, name, path, left_out)
    return Found(tuple(curves), dict(sorted(left_out.items())))


def _curves(
    gpu: str, framework: str, release: str, name: str, path: Path, left_out: Counter[str]
) -> list[AttentionCurve]:
    from pyarrow import parquet

    columns = parquet.read_schema(path).names
    if not {"isl", "step", "latency", "batch_size", "kernel_source"} <= set(columns):
        left_out[f"{name}: no positions over cached tokens"] += 1
        return []
    axes = ("isl", "step", "latency", "batch_size", "kernel_source", "framework", "version", "device", "op_name")
    others = [c for c in columns if c not in axes]
    grouped: dict[tuple[Any, ...], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in parquet.read_table(path).to_pylist():
        key = (row["kernel_source"], row["batch_size"], row["step"], tuple((c, str(row[c])) for c in others))
        grouped[key][row["isl"]].append(row["latency"] * 1e3)
    curves = []
    for key, latencies in sorted(grouped.items(), key=lambda item: str(item[0])):
        kernel, batch, context, setting = key
        if reason := _unusable(context, latencies):
            left_out[f"{name}: {reason}"] += 1
            continue
        points = tuple(Point(n, min(us)) for n, us in sorted(latencies.items()) if n <= MAX_POSITIONS)
        source = tables.source_of(path)
        curves.append(AttentionCurve(gpu, framework, release, name, kernel, batch, context, setting, points, source))
    return curves


def _unusable(context: int, latencies: dict[int, list[float]]) -> str:
    """Why a curve has no boundary; "" if it has one."""
    positions = [n for n in latencies if n <= MAX_POSITIONS]
    if context == 0:
        return "nothing is cached: a prefill"
    if len(positions) == 1:
        return "one position"
    if len(positions) < MIN_POSITIONS:
        return f"fewer than {MIN_POSITIONS} counts of positions up to {MAX_POSITIONS}"
    if 1 not in positions:
        return "no point at one position"
    if any(min(us) <= 0 for us in latencies.values()):
        return "a latency of 0"
    if any(max(us) > SAME * min(us) for n, us in latencies.items() if n <= MAX_POSITIONS):
        return f"two measurements of one point differ by more than {SAME}x"
    return ""
