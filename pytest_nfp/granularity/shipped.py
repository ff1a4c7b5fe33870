"""The shipped table: maps of the releases that the shipped baselines name, for use without an index or an installation.

Written by `python -m pytest_nfp.granularity.refresh`, from the releases' own rules; every entry carries the archive's
file and sha256. A map from the table is marked as such (`origin`), so that nobody takes it for a fresh reading.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pytest_nfp.files import read_yaml
from pytest_nfp.granularity.maps import Granularity, Range, RuleUnknown
from pytest_nfp.granularity.query import Query

TABLE = Path(__file__).with_name("shipped.yaml")
HEADER = """\
# Piecewise maps of released granularity rules: [first, last, tile, source, key of a tuned file].
# Written by `python -m pytest_nfp.granularity.refresh`; each with the archive it was read from.
"""
Whole = Annotated[int, Field(gt=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shape(_Strict):
    """What the rule depends on: expert dims (top_k: every k with this map), or a head dimension.

    architecture: every class of models with this map, of a framework that chooses by it; "" stands for all that have no choice of their own.
    """

    experts: Whole | None = None
    width: Whole | None = None
    hidden: Whole | None = None
    top_k: tuple[Whole, ...] | None = None
    head_dim: Whole | None = None
    architecture: tuple[str, ...] | None = None


class Entry(_Strict):
    """One map, the devices that share it, and where it was read."""

    framework: str
    release: str
    module: Literal["moe", "attention"]
    dtype: str
    devices: tuple[str, ...]
    shape: Shape
    ranges: tuple[tuple[Whole, Whole, Whole, str, int | None], ...]
    kernel: str
    kernel_reason: str
    packed: bool = False
    artifact_file: str
    artifact_sha256: str
    parameters: tuple[tuple[Whole, Whole, str], ...] = ()
    warnings: dict[str, tuple[str, ...]] = {}


class Table(_Strict):
    """The file."""

    schema_: Literal[1] = Field(alias="schema")
    maps: tuple[Entry, ...]


@lru_cache(maxsize=1)
def _table() -> tuple[Entry, ...]:
    return read_yaml(TABLE, Table).maps if TABLE.exists() else ()


def shipped_releases(framework: str) -> list[str]:
    """The releases of a framework that the table holds."""
    return sorted({e.release for e in _table() if e.framework == framework})


def lookup(query: Query, module: str, shape: dict[str, int | str]) -> Granularity:
    """A map of the table. Raises RuleUnknown where it holds none."""
    framework, release, dtype, device_name = query.framework, query.release, query.dtype, query.device.name
    for e in _table():
        if (e.framework, e.release, e.module, e.dtype) != (framework, release, module, dtype):
            continue
        if device_name not in e.devices:
            continue
        mine = e.shape.model_dump(exclude_none=True)
        if all(v in mine[n] if isinstance(mine.get(n), tuple) else mine.get(n) == v for n, v in shape.items()):
            return Granularity(
                framework,
                release,
                module,
                dtype,
                device_name,
                tuple(Range(*r) for r in e.ranges),
                e.kernel,
                e.kernel_reason,
                e.artifact_file,
                e.artifact_sha256,
                "shipped table",
                e.packed,
                e.warnings.get(device_name, ()),
                e.parameters,
            )
    raise RuleUnknown(f"the shipped table holds no map of {framework} {release} for {device_name}, {shape}")


def table_text(maps: list[tuple[Granularity, dict[str, int | str]]]) -> str:
    """The table's YAML: equal maps of several devices or k in one entry, in a stable order."""
    import yaml

    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    for g, shape in maps:
        fixed = tuple(sorted((n, v) for n, v in shape.items() if n not in ("top_k", "architecture")))
        chosen = g.kernel, g.kernel_reason
        key = (g.framework, g.release, g.module, g.dtype, fixed, g.ranges, chosen, g.parameters, g.artifact_sha256)
        entry = merged.setdefault(
            key,
            {
                "granularity": g,
                "shape": dict(fixed),
                "top_k": set(),
                "architecture": set(),
                "devices": set(),
                "warnings": {},
            },
        )
        entry["devices"].add(g.device_name)
        for name in ("top_k", "architecture"):
            if name in shape:
                entry[name].add(shape[name])
        if g.warnings:
            entry["warnings"][g.device_name] = list(g.warnings)
    rows = []
    for key in sorted(merged, key=lambda k: (k[:5], str(k[5:]))):
        entry = merged[key]
        g = entry["granularity"]
        row = {
            "framework": g.framework,
            "release": g.release,
            "module": g.module,
            "dtype": g.dtype,
            "devices": sorted(entry["devices"]),
            "shape": entry["shape"] | {n: sorted(entry[n]) for n in ("top_k", "architecture") if entry[n]},
            "ranges": [[r.first, r.last, r.tile, r.source, r.key] for r in g.ranges],
            "kernel": g.kernel,
            "kernel_reason": g.kernel_reason,
            "packed": g.packed,
            "artifact_file": g.artifact_file,
            "artifact_sha256": g.artifact_sha256,
        }
        if g.parameters:
            row["parameters"] = [list(p) for p in g.parameters]
        if entry["warnings"]:
            row["warnings"] = dict(sorted(entry["warnings"].items()))
        rows.append(row)
    return HEADER + yaml.safe_dump({"schema": 1, "maps": rows}, sort_keys=False, default_flow_style=None, width=150)
