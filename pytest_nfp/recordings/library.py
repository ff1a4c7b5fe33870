"""Every usable recorded curve as one table, and by reason the number of curves that were left out.

A curve is T over token rows (MoE, EP 1) or GEMM rows (dense). It has one shape, kernel and dtype of one release on one
GPU. A named filter leaves out each curve that can't be compared.
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
"""Modules that the recorded tables hold."""
DTYPES = {"bf16": "bfloat16", "fp8": "fp8", "fp8-block": "fp8_block", "int4": "int4_wo", "mxfp4": "w4a16_mxfp4"}
"""Dtypes, and what the tables call them."""
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp8-block": 1.0, "int4": 0.5, "mxfp4": 0.5}
"""Bytes of one weight."""
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
"""Fused-MoE kernels, and the names that the tables give them. The tile rule describes the Triton kernel."""
MIN_POINTS = 8
"""Fewest points of a curve from N0 on. With fewer the boundary is all interval."""


@dataclass(frozen=True, slots=True)
class RecordedCurve:
    """One curve: T in microseconds over rows M. Rows are tokens, rows of the GEMM, or query rows of a request."""

    gpu: str
    """Catalog name of the GPU, or cpu."""
    framework: str
    """Name of the framework."""
    release: str
    """Version of the framework."""
    module: Module | Literal["attention"]
    """dense, moe or attention."""
    dtype: str
    """Number format, such as bf16."""
    kernel: str
    """Kernel, by the name that the table gives it."""
    experts: int
    """Experts of one rank. dense: 1. attention: heads."""
    top_k: int
    """Experts per token. dense: 1."""
    hidden: int
    """Hidden width of one rank's experts. dense: k."""
    width: int
    """Width of one rank's experts. dense: n. attention: head dimension."""
    tp: int
    """Ranks that an expert is cut over."""
    distribution: str
    """Routing of the tokens: balanced, power_law_1.01, ... Empty without experts."""
    base: int
    """N0: the smallest measured M at which all experts are active under balanced routing, else 1."""
    points: tuple[Point, ...]
    """The points, ascending in M."""
    source: str
    """Where the curve comes from."""
    context: int = 0
    """attention: cached tokens."""

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights of the rank: three matrices for an expert, one for a GEMM."""
        matrices = 3 if self.module == "moe" else 1
        return WEIGHT_BYTES[self.dtype] * self.experts * matrices * self.hidden * self.width

    @property
    def family(self) -> str:
        """The name of what is calibrated together: gemm, triton, flashinfer-cutlass, ...

        Any other kernel, and each kernel of a CPU, is calibrated by its own name.
        """
        if self.gpu == "cpu":
            return self.kernel
        if self.module == "dense":
            return "gemm"
        return next((name for name, sources in KERNELS.items() if self.kernel in sources), self.kernel)

    @property
    def routing(self) -> str:
        """The principle's name of the distribution."""
        return self.distribution.replace("power_law_", POWER_LAW)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape by which curves are held out together: curves of one kernel with one shape are on one side."""
        dimensions = self.experts, self.top_k, self.hidden, self.width * self.tp, self.tp
        return (*dimensions, self.context) if self.context else dimensions


@dataclass(frozen=True, slots=True)
class Library:
    """Curves, and by reason the number of curves that were left out."""

    curves: tuple[RecordedCurve, ...]
    left_out: Mapping[str, int]


@lru_cache(maxsize=64)
def read(
    gpu: str, framework: str, release: str, module: Module, dtype: str = "bf16", in_cache: bool = False
) -> Library:
    """The library of one table.

    in_cache: also take the curves whose weights stay in the cache between forwards. Raises NoRecording if the table is
    not there, or has other columns than are known.
    """
    path = tables.table_path(gpu, framework, release, module)
    if dtype not in DTYPES:
        raise NoRecording(f"recordings are read for {', '.join(DTYPES)}, not for {dtype}")
    table = latencies(path, dtype)
    left_out: Counter[str] = Counter()
    left_out["expert parallel: remote tokens are sent to expert 0"] = table.remote
    device = catalog.gpu(gpu)
    curves = []
    for key, us in sorted(table.by_key.items(), key=lambda item: str(tuple(item[0]))):
        curve = _curve(gpu, framework, release, module, dtype, key, us, path)
        if reason := _unusable(curve) or ("" if in_cache else _cached(curve, device)):
            left_out[reason] += 1
        else:
            curves.append(curve)
    return Library(tuple(curves), {reason: n for reason, n in sorted(left_out.items()) if n})


def read_all(gpus: Iterable[str], module: Module, dtype: str = "bf16", in_cache: bool = False) -> Library:
    """The library of every vLLM and SGLang table of these GPUs."""
    curves: list[RecordedCurve] = []
    left_out: Counter[str] = Counter()
    for gpu in gpus:
        for backend in tables.releases(gpu, module):
            table = read(gpu, backend.framework, backend.release, module, dtype, in_cache)
            curves += table.curves
            left_out.update(table.left_out)
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
"""Columns of a table that are read, by module. The first one holds the dtype."""


class Key(NamedTuple):
    """What tells the curves of one table apart."""

    experts: int
    """Experts of a rank. Of a GEMM: 1."""
    top_k: int
    """Experts per token. Of a GEMM: 1."""
    hidden: int
    """Width of a token. Of a GEMM: its inner dimension."""
    width: int
    """Whole width of an expert, before it is cut over the ranks of tensor parallelism. Of a GEMM: its columns."""
    tp: int
    """Ranks that an expert is cut over."""
    distribution: str
    """Routing of the tokens, as the table calls it. "" for a GEMM."""
    kernel: str
    """Kernel, as the table calls it."""


class Latencies(NamedTuple):
    """The content of a table in one dtype."""

    by_key: Mapping[Key, Mapping[int, float]]
    """By curve and rows: microseconds."""
    remote: int
    """Number of curves under expert parallelism, which are left out."""


def latencies(path: Path, dtype: str) -> Latencies:
    """The latencies in a table, read once. Raises NoRecording if it has other columns than are known."""
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
        # A table may repeat a measurement. The quicker one has less time that is not the kernel's.
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
    """Why a curve can't be compared with a model of its kernel; "" if it can."""
    if (c.hidden, c.experts) == (7168, 256) and (c.framework, c.release) in tables.GROUP_LIMITED:
        return "group-limited routing: about half of the experts are active"
    if not c.base:
        return "the grid ends before all experts are active"
    if sum(p.positions >= c.base for p in c.points) < MIN_POINTS:
        return f"fewer than {MIN_POINTS} points from N0 on"
    return ""


def _cached(c: RecordedCurve, gpu: Gpu) -> str:
    """Why not all weights were read from memory in each forward; "" if they were."""
    smallest = tables.MIN_EXPERTS_BYTES if c.module == "moe" else tables.MIN_GEMM_BYTES
    if c.weight_bytes < smallest:
        return f"weights under {smallest / 1e6:.0f} MB stay in the cache between forwards"
    first = next(p.latency_us for p in c.points if p.positions == c.base)
    bytes_read = c.weight_bytes if c.distribution in ("", "balanced") else c.weight_bytes * min(1, c.top_k / c.experts)
    if bytes_read / (first * 1e-6) > gpu.bandwidth:
        return "T(N0) implies more than the peak bandwidth: not all weights were read"
    return ""
