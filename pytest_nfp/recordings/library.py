"""Every usable recorded curve as one table, and what was left out with the reason.

A curve is T over token rows (MoE, EP 1) or GEMM rows (dense) of one shape, kernel and dtype of one release on one GPU. What can't be
compared is left out by a named filter; the counts of a reading say how much and why.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pytest_nfp import catalog
from pytest_nfp.catalog import Gpu
from pytest_nfp.principle import Point
from pytest_nfp.principle.routing import POWER_LAW
from pytest_nfp.recordings import tables
from pytest_nfp.recordings.errors import NoRecording

Module = Literal["dense", "moe"]
"""What recorded tables hold."""
DTYPES = {"bf16": "bfloat16", "fp8": "fp8", "fp8-block": "fp8_block", "int4": "int4_wo", "mxfp4": "w4a16_mxfp4"}
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp8-block": 1.0, "int4": 0.5, "mxfp4": 0.5}
KERNELS = {
    "triton": (
        "sglang_fused_moe_triton",
        "vllm_fused_moe",
        "vllm_unquantizedfusedmoe_triton_tritonexperts",
        "vllm_fp8moe_triton_tritonexperts",
        "vllm_modeloptfp8moe_triton_tritonexperts",
    ),
    "flashinfer-cutlass": (
        "sglang_flashinfer_cutlass_moe",
        "vllm_unquantizedfusedmoe_flashinfer_cutlass_flashinferexperts",
        "vllm_modeloptfp8moe_flashinfer_cutlass_flashinferexperts",
    ),
    "flashinfer-trtllm": (
        "sglang_flashinfer_trtllm_moe",
        "vllm_unquantizedfusedmoe_flashinfer_trtllm_trtllmbf16experts",
        "vllm_fp8moe_flashinfer_trtllm_trtllmfp8expertsmodular",
        "vllm_fp8moe_flashinfer_trtllm_trtllmfp8expertsmonolithic",
        "vllm_modeloptfp8moe_flashinfer_trtllm_trtllmfp8expertsmonolithic",
    ),
    "marlin": (
        "sglang_marlin_moe",
        "vllm_marlin_int4_moe",
        "vllm_compressedtensorswna16marlinmoe_marlin_marlinexperts",
    ),
}
"""Fused-MoE kernels by the names that the tables give them. The tile rule describes the Triton one."""
MIN_POINTS = 8
"""Fewer leave a boundary that is all interval."""


@dataclass(frozen=True, slots=True)
class RecordedCurve:
    """One curve: T in microseconds over rows M (tokens, rows of the GEMM, or query rows of a request).

    MoE: experts, width and hidden of one rank, top_k, and `distribution` (balanced, power_law_1.01, ...); tp: ranks that
    an expert is cut over. dense: width = n, hidden = k, experts = top_k = 1. attention: experts = heads, width = head
    dimension, `context` cached tokens. base: the smallest measured M at which all experts are active under balanced
    routing, else 1.
    """

    gpu: str
    framework: str
    release: str
    module: Module | Literal["attention"]
    dtype: str
    kernel: str
    experts: int
    top_k: int
    hidden: int
    width: int
    tp: int
    distribution: str
    base: int
    points: tuple[Point, ...]
    source: str
    context: int = 0

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights of the rank: three matrices of an expert, one of a GEMM."""
        matrices = 3 if self.module == "moe" else 1
        return WEIGHT_BYTES[self.dtype] * self.experts * matrices * self.hidden * self.width

    @property
    def family(self) -> str:
        """What is calibrated together: gemm, triton, flashinfer-cutlass, ...; any other kernel, and each of a CPU, by its own name."""
        if self.gpu == "cpu":
            return self.kernel
        if self.module == "dense":
            return "gemm"
        return next((name for name, sources in KERNELS.items() if self.kernel in sources), self.kernel)

    @property
    def routing(self) -> str:
        """The distribution by the name that the principle has for it."""
        return self.distribution.replace("power_law_", POWER_LAW)

    @property
    def shape(self) -> tuple[int, ...]:
        """What makes two curves of one kernel different: held out together."""
        found = self.experts, self.top_k, self.hidden, self.width * self.tp, self.tp
        return (*found, self.context) if self.context else found


@dataclass(frozen=True, slots=True)
class Library:
    """Curves, and how many were left out for which reason."""

    curves: tuple[RecordedCurve, ...]
    left_out: Mapping[str, int]


@lru_cache(maxsize=64)
def read(
    gpu: str, framework: str, release: str, module: Module, dtype: str = "bf16", in_cache: bool = False
) -> Library:
    """The library of one table; in_cache: also the curves whose weights stay in the cache between forwards.

    Raises NoRecording where it is not there, or has other columns than are known.
    """
    path = tables.table_path(gpu, framework, release, module)
    if dtype not in DTYPES:
        raise NoRecording(f"recordings are read for {', '.join(DTYPES)}, not for {dtype}")
    table = latencies(path, dtype)
    left_out: Counter[str] = Counter()
    left_out["expert parallel: remote tokens are sent to expert 0"] = table.remote
    device = catalog.gpu(gpu)
    found = []
    for key, us in sorted(table.by_key.items(), key=lambda item: str(tuple(item[0]))):
        curve = _curve(gpu, framework, release, module, dtype, key, us, path)
        if reason := _unusable(curve) or ("" if in_cache else _cached(curve, device)):
            left_out[reason] += 1
        else:
            found.append(curve)
    return Library(tuple(found), {reason: n for reason, n in sorted(left_out.items()) if n})


def read_all(gpus: Iterable[str], module: Module, dtype: str = "bf16", in_cache: bool = False) -> Library:
    """The library of every vLLM and SGLang table of these GPUs."""
    curves: list[RecordedCurve] = []
    left_out: Counter[str] = Counter()
    for gpu in gpus:
        for backend in tables.releases(gpu, module):
            one = read(gpu, backend.framework, backend.release, module, dtype, in_cache)
            curves += one.curves
            left_out.update(one.left_out)
    return Library(tuple(curves), dict(sorted(left_out.items())))


COLUMNS: dict[Module, tuple[str, ...]] = {
    "dense": ("gemm_dtype", "m", "n", "k", "latency", "kernel_source"),
    "moe": (
        "moe_dtype",
        "num_tokens",
        "hidden_size",
        "inter_size",
        "topk",
        "num_experts",
        "moe_tp_size",
        "moe_ep_size",
        "distribution",
        "latency",
        "kernel_source",
    ),
}


class Key(NamedTuple):
    """A curve of a table. Of a GEMM, experts = k = 1, hidden is its inner dimension and width its columns."""

    experts: int
    top_k: int
    hidden: int
    width: int
    """Whole, before it is cut over the ranks of tensor parallelism."""
    tp: int
    distribution: str
    kernel: str


class Latencies(NamedTuple):
    """A table in one dtype."""

    by_key: Mapping[Key, Mapping[int, float]]
    """Curve -> rows -> microseconds."""
    remote: int
    """Curves of expert parallelism, which are left out."""


def latencies(path: Path, dtype: str) -> Latencies:
    """What a table holds, read once. Raises NoRecording where it has other columns than are known."""
    return _latencies(path, dtype, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _latencies(path: Path, dtype: str, changed_ns: int) -> Latencies:
    from pyarrow import parquet

    module: Module = "dense" if path.name.startswith(tables.OPS["dense"]) else "moe"
    columns = COLUMNS[module]
    have = set(parquet.read_schema(path).names)
    if missing := [c for c in columns if c not in have]:
        raise NoRecording(
            f"{path.name} has no column {', '.join(missing)}: these tables are read as aiconfigurator-core"
            f" {tables.VERSION} has them: {tables.GET_IT}"
        )
    grouped: dict[Key, dict[int, float]] = defaultdict(dict)
    remote = set()
    for row in parquet.read_table(path, columns=list(columns), filters=[(columns[0], "==", DTYPES[dtype])]).to_pylist():
        key, m = _key(row, module)
        if module == "moe" and row["moe_ep_size"] != 1:
            # Under expert parallelism the Triton rows of SGLang send remote tokens to expert 0.
            remote.add((key, row["moe_ep_size"]))
            continue
        # A table may repeat a measurement: the quicker one met less of what is not the kernel's.
        grouped[key][m] = min(row["latency"] * 1e3, grouped[key].get(m, float("inf")))
    return Latencies(grouped, len(remote))


def _key(row: Mapping[str, Any], module: Module) -> tuple[Key, int]:
    """The curve of a row, and its token or GEMM rows."""
    if module == "dense":
        return Key(1, 1, row["k"], row["n"], 1, "", row["kernel_source"]), row["m"]
    shape = (row["num_experts"], row["topk"], row["hidden_size"], row["inter_size"], row["moe_tp_size"])
    return Key(*shape, row["distribution"], row["kernel_source"]), row["num_tokens"]


def _curve(
    gpu: str,
    framework: str,
    release: str,
    module: Module,
    dtype: str,
    key: Key,
    latencies: Mapping[int, float],
    path: Path,
) -> RecordedCurve:
    experts, top_k, hidden, width, tp, distribution, kernel = key
    grid = sorted(latencies)
    all_active = -(-experts // top_k) if distribution == "balanced" else 1
    base = next((m for m in grid if m >= all_active), 0)
    return RecordedCurve(
        gpu,
        framework,
        release,
        module,
        dtype,
        kernel,
        experts,
        top_k,
        hidden,
        width // tp,
        tp,
        distribution,
        base,
        tuple(Point(m, latencies[m]) for m in grid),
        tables.source_of(path),
    )


def _unusable(c: RecordedCurve) -> str:
    """Why a curve can't be compared with a model of its kernel; empty if it can."""
    if (c.hidden, c.experts) == (7168, 256) and (c.framework, c.release) in tables.GROUP_LIMITED:
        return "group-limited routing: about half of the experts are active"
    if not c.base:
        return "the grid ends before all experts are active"
    if sum(p.positions >= c.base for p in c.points) < MIN_POINTS:
        return f"fewer than {MIN_POINTS} points from N0 on"
    return ""


def _cached(c: RecordedCurve, gpu: Gpu) -> str:
    """Why the weights were not all read from memory in each forward; empty if they were."""
    smallest = tables.MIN_EXPERTS_BYTES if c.module == "moe" else tables.MIN_GEMM_BYTES
    if c.weight_bytes < smallest:
        return f"weights under {smallest / 1e6:.0f} MB stay in the cache between forwards"
    first = next(p.latency_us for p in c.points if p.positions == c.base)
    read = c.weight_bytes if c.distribution in ("", "balanced") else c.weight_bytes * min(1, c.top_k / c.experts)
    if read / (first * 1e-6) > gpu.bandwidth:
        return "T(N0) implies more than the peak bandwidth: not all weights were read"
    return ""
