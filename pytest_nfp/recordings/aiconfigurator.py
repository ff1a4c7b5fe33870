"""NVIDIA AIConfigurator's measured kernel tables (package aiconfigurator-core 0.12.0, Apache-2.0): GEMM and fused MoE.

Parquet files systems/data/<system>/<op>/<framework>/<release>/<op>_perf.parquet, collected under CUDA graphs on locked
clocks, latency in milliseconds. What is left out, and why, is in `curve`: each trap has its own reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from pytest_nfp import catalog
from pytest_nfp.cases import Backend, Case
from pytest_nfp.measure.curve import Curve
from pytest_nfp.principle import Point
from pytest_nfp.recordings.errors import NoRecording

if TYPE_CHECKING:
    from pytest_nfp.recordings.library import RecordedCurve

SYSTEMS = {"h200": "h200_sxm", "h100": "h100_sxm", "a100": "a100_sxm", "l40s": "l40s", "b200": "b200_sxm"}
OPS = {"dense": "gemm", "moe": "moe"}
DTYPES = {"bf16": "bfloat16"}
MIN_GEMM_BYTES = 60e6
MIN_EXPERTS_BYTES = 150e6
"""Below these, weights stay in the last-level cache of a large GPU between forwards: T(1) is then no memory time."""
GROUP_LIMITED = {("vllm", "0.24.0"), ("sglang", "0.5.14")}
"""Releases whose tables ran DeepSeek shapes with group-limited routing: about half of the experts are active."""
MAX_POSITIONS = 4096
VERSION = "0.12.0"
GET_IT = "pip install 'pytest-nfp[recorded]'; the calibrations that the catalog ships stand"


@lru_cache(maxsize=1)
def _data() -> Path | None:
    # Found without being imported: the package brings a solver that the tables do not need.
    spec = util.find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations or util.find_spec("pyarrow") is None:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "systems" / "data"


def releases(gpu: str, module: str) -> list[Backend]:
    """VLLM and SGLang releases with a table for this GPU and module; empty where the package is not installed."""
    data = _data()
    if data is None or gpu not in SYSTEMS or module not in OPS:
        return []
    op = OPS[module]
    found = [
        Backend(framework, path.parent.name)
        for framework in ("vllm", "sglang")
        for path in (data / SYSTEMS[gpu] / op / framework).glob(f"*/{op}_perf.parquet")
    ]
    return sorted(found, key=lambda b: (b.framework, Version(b.release)))


def _require() -> Path:
    """The tables' folder. Raises NoRecording where they are not installed, or are those of another version."""
    data = _data()
    if data is None:
        raise NoRecording(f"recordings are not installed (aiconfigurator-core {VERSION}): {GET_IT}")
    if (installed := metadata.version("aiconfigurator-core")) != VERSION:
        raise NoRecording(
            f"aiconfigurator-core {installed} is installed, its tables are read as {VERSION} has them: {GET_IT}"
        )
    return data


def tables(gpu: str, folders: Iterable[str]) -> list[tuple[str, str, Path]]:
    """(framework, release, file) of every vLLM and SGLang table of a GPU in these folders. Raises NoRecording."""
    data = _require()
    if gpu not in SYSTEMS:
        raise NoRecording(f"no recording for {gpu}; there are {', '.join(SYSTEMS)}")
    return [
        (framework, path.parent.name, path)
        for folder in folders
        for framework in ("vllm", "sglang")
        for path in sorted((data / SYSTEMS[gpu] / folder / framework).glob("*/*_perf.parquet"))
    ]


def table_path(gpu: str, framework: str, release: str, module: str) -> Path:
    """The table of a GPU, release and module. Raises NoRecording with the one reason."""
    data = _require()
    if gpu not in SYSTEMS:
        raise NoRecording(f"no recording for {gpu}; there are {', '.join(SYSTEMS)}")
    if module not in OPS:
        raise NoRecording(f"the recordings have no {module} curve with more than one position")
    op = OPS[module]
    path = data / SYSTEMS[gpu] / op / framework / release / f"{op}_perf.parquet"
    if not path.exists():
        held = ", ".join(str(b) for b in releases(gpu, module)) or "none"
        raise NoRecording(f"no recording of {Backend(framework, release)} on {gpu}; there are {held}")
    return path


def digest(curves: Iterable[RecordedCurve]) -> str:
    """SHA-256 of the tables that curves were read from."""
    found = hashlib.sha256()
    for path in sorted({table_path(c.gpu, c.framework, c.release, c.module) for c in curves}):
        found.update(path.read_bytes())
    return found.hexdigest()


def source_of(path: Path) -> str:
    """A table as it is cited: package, release, path inside it."""
    data = _data()
    assert data is not None
    return f"aiconfigurator-core {metadata.version('aiconfigurator-core')}: {path.relative_to(data)}"


def curve(case: Case) -> Curve:
    """T(N) of a recorded GEMM (b = 1: N = m) or balanced MoE. Raises NoRecording with the one reason."""
    path = table_path(case.gpu, case.backend.framework, case.backend.release, case.module)
    if case.dtype not in DTYPES:
        raise NoRecording(f"recordings are read for bf16, not for {case.dtype}")
    rows = _gemm(path, case) if case.module == "dense" else _moe(path, case)
    if not rows:
        raise NoRecording(f"the table of {case.backend} on {case.gpu} does not hold this shape")
    kernels = sorted({kernel for _, _, kernel in rows})
    if len(kernels) > 1:
        raise NoRecording(f"the table holds several kernels for this shape: {', '.join(kernels)}")
    points = tuple(
        Point(m // case.batch, latency * 1e3)
        for m, latency, _ in sorted(rows)
        if m % case.batch == 0 and m // case.batch <= MAX_POSITIONS
    )
    base = next((p for p in points if p.positions >= case.baseline_positions), None)
    if base is None:
        raise NoRecording(f"the grid of the table has no point at or above N0 = {case.baseline_positions}")
    _check_bandwidth(case, base.latency_us)
    return Curve(
        points=points,
        baseline_positions=base.positions,
        kind="recorded",
        source=source_of(path),
        kernel=kernels[0],
        counts={"points": len(points)},
    )


def _check_bandwidth(case: Case, base_us: float) -> None:
    """A forward that reads its weights faster than the memory can deliver did not read them all."""
    gpu = catalog.gpu(case.gpu)
    if case.gemm is not None:
        weights = case.bytes_per_element * case.gemm[0] * case.gemm[1]
        smallest, what = MIN_GEMM_BYTES, "weights"
    else:
        moe = case.subject.moe
        assert moe is not None
        weights = case.bytes_per_element * moe.experts * moe.matrices * case.subject.hidden * moe.width
        smallest, what = MIN_EXPERTS_BYTES, "experts"
    if weights < smallest:
        raise NoRecording(
            f"{what} of {weights / 1e6:.0f} MB stay in the cache; curves from {smallest / 1e6:.0f} MB on are read"
        )
    share = weights / (base_us * 1e-6) / gpu.bandwidth
    if share > 1:
        raise NoRecording(
            f"T(N0) implies {share:.0%} of the peak bandwidth: not all {what} were read, so it is not comparable"
        )


def _gemm(path: Path, case: Case) -> list[tuple[int, float, str]]:
    if case.gemm is None:
        raise NoRecording("the recordings hold single GEMMs; a whole FFN is not composed of them here")
    n, k = case.gemm
    wanted = [("gemm_dtype", "==", DTYPES[case.dtype]), ("n", "==", n), ("k", "==", k)]
    return _read(path, "m", wanted)


def _moe(path: Path, case: Case) -> list[tuple[int, float, str]]:
    moe, hidden = case.subject.moe, case.subject.hidden
    assert moe is not None
    if case.routing != "balanced":
        raise NoRecording("the recordings hold balanced routing (and power laws), not skewed routing")
    is_deepseek = (hidden, moe.experts) == (7168, 256)
    if is_deepseek and (case.backend.framework, case.backend.release) in GROUP_LIMITED:
        raise NoRecording(
            "this table ran DeepSeek shapes with group-limited routing: half of the experts, not comparable"
        )
    wanted = [
        ("moe_dtype", "==", DTYPES[case.dtype]),
        ("distribution", "==", "balanced"),
        ("hidden_size", "==", hidden),
        ("inter_size", "==", moe.width),
        ("topk", "==", case.top_k),
        ("num_experts", "==", moe.experts),
        # Under expert parallelism the Triton rows of SGLang send remote tokens to expert 0: EP 1 alone is read.
        ("moe_ep_size", "==", 1),
        ("moe_tp_size", "==", 1),
    ]
    return _read(path, "num_tokens", wanted)


def _read(path: Path, rows: str, wanted: list[tuple[str, str, Any]]) -> list[tuple[int, float, str]]:
    """(rows, milliseconds, kernel): one row for each count, the quickest where the table repeats one."""
    from pyarrow import parquet

    table = parquet.read_table(path, columns=[rows, "latency", "kernel_source"], filters=wanted).to_pylist()
    best: dict[tuple[int, str], float] = {}
    for row in table:
        key = (row[rows], row["kernel_source"])
        best[key] = min(row["latency"], best.get(key, float("inf")))
    return [(m, latency, kernel) for (m, kernel), latency in best.items()]
