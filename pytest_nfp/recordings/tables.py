"""NVIDIA AIConfigurator's measured kernel tables (package aiconfigurator-core 0.12.0, Apache-2.0): GEMM and fused MoE.

The files are Parquet: systems/data/<system>/<op>/<framework>/<release>/<op>_perf.parquet. They were collected under
CUDA graphs on locked clocks; latencies are in milliseconds. This module finds the files, library.py reads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path
from typing import Protocol

from packaging.version import Version

from pytest_nfp.cases import Backend
from pytest_nfp.recordings.errors import NoRecording

SYSTEMS = {"h200": "h200_sxm", "h100": "h100_sxm", "a100": "a100_sxm", "l40s": "l40s", "b200": "b200_sxm"}
"""GPUs, and the folders of their tables."""
OPS = {"dense": "gemm", "moe": "moe"}
"""Modules, and the folders of their tables."""
MIN_GEMM_BYTES = 60e6
MIN_EXPERTS_BYTES = 150e6
"""Smaller weights stay in the last-level cache of a large GPU between forwards: T(1) is then no memory time."""
GROUP_LIMITED = {("vllm", "0.24.0"), ("sglang", "0.5.14")}
"""Releases whose tables ran DeepSeek shapes with group-limited routing: about half of the experts are active."""
VERSION = "0.12.0"
"""The version of aiconfigurator-core whose tables are read."""
GET_IT = "pip install 'pytest-nfp[recorded]'; the calibrations that the catalog ships stand"


@lru_cache(maxsize=1)
def _data() -> Path | None:
    # The package is found without an import: it would import a solver that the tables do not need.
    spec = util.find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations or util.find_spec("pyarrow") is None:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "systems" / "data"


def releases(gpu: str, module: str) -> list[Backend]:
    """The vLLM and SGLang releases with a table for this GPU and module. Empty if the package is not installed."""
    data = _data()
    if data is None or gpu not in SYSTEMS or module not in OPS:
        return []
    op = OPS[module]
    backends = [
        Backend(framework, path.parent.name)
        for framework in ("vllm", "sglang")
        for path in (data / SYSTEMS[gpu] / op / framework).glob(f"*/{op}_perf.parquet")
    ]
    return sorted(backends, key=lambda b: (b.framework, Version(b.release)))


def _require() -> Path:
    """The folder of the tables. Raises NoRecording if they are not installed, or are those of another version."""
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


class OfTable(Protocol):
    """Anything that names the table that it comes from."""

    @property
    def gpu(self) -> str: ...  # noqa: D102

    @property
    def framework(self) -> str: ...  # noqa: D102

    @property
    def release(self) -> str: ...  # noqa: D102

    @property
    def module(self) -> str: ...  # noqa: D102


def digest(curves: Iterable[OfTable]) -> str:
    """SHA-256 of the tables that curves were read from."""
    sha256 = hashlib.sha256()
    for path in sorted({table_path(c.gpu, c.framework, c.release, c.module) for c in curves}):
        sha256.update(path.read_bytes())
    return sha256.hexdigest()


def source_of(path: Path) -> str:
    """A table as it is cited: package, version, path inside the package's data."""
    data = _data()
    assert data is not None
    return f"aiconfigurator-core {metadata.version('aiconfigurator-core')}: {path.relative_to(data)}"
