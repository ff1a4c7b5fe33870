"""The shipped table: the maps of the releases that the shipped baselines name, for use without an index or an
installation.

`python -m pytest_nfp.granularity.refresh` writes it from the releases' own rules. Every entry has the file and sha256
of its archive. A map from the table is marked as such (`origin`): it is no fresh reading of the release.
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
    """What the rule depends on: the dimensions of the experts, or a head dimension."""

    experts: Whole | None = None
    """Experts of the rank."""
    width: Whole | None = None
    """Width of an expert."""
    hidden: Whole | None = None
    """Width of a token."""
    top_k: tuple[Whole, ...] | None = None
    """Every k with this map."""
    head_dim: Whole | None = None
    """Width of a head."""
    architecture: tuple[str, ...] | None = None
    """Every class of models with this map, for a framework that chooses by the class. "" stands for all classes without
    a choice of their own."""


class Entry(_Strict):
    """One map, the devices that share it, and where it was read. Fields without a docstring are those of Granularity."""

    framework: str
    release: str
    module: Literal["moe", "attention"]
    dtype: str
    devices: tuple[str, ...]
    """The driver's names of the devices with this map."""
    shape: Shape
    """The shapes with this map."""
    ranges: tuple[tuple[Whole, Whole, Whole, str, int | None], ...]
    """(first, last, tile, source, key of a tuned file or None)."""
    kernel: str
    kernel_reason: str
    packed: bool = False
    artifact_file: str
    artifact_sha256: str
    parameters: tuple[tuple[Whole, Whole, str], ...] = ()
    """(first, last, other parameters of the rule)."""
    warnings: dict[str, tuple[str, ...]] = {}
    """Warnings by device name."""


class Table(_Strict):
    """The file shipped.yaml."""

    schema_: Literal[1] = Field(alias="schema")
    maps: tuple[Entry, ...]


@lru_cache(maxsize=1)
def _table() -> tuple[Entry, ...]:
    return read_yaml(TABLE, Table, is_shipped=True).maps if TABLE.exists() else ()


def shipped_releases(framework: str) -> list[str]:
    """The releases of a framework that are in the table."""
    return sorted({e.release for e in _table() if e.framework == framework})


def lookup(query: Query, module: str, shape: dict[str, int | str]) -> Granularity:
    """The table's map for a query. Raises RuleUnknown if there is none."""
    framework, release, dtype, device_name = query.framework, query.release, query.dtype, query.device.name
    for e in _table():
        if (e.framework, e.release, e.module, e.dtype) != (framework, release, module, dtype):
            continue
        if device_name not in e.devices:
            continue
        entry_shape = e.shape.model_dump(exclude_none=True)
        if all(
            v in entry_shape[n] if isinstance(entry_shape.get(n), tuple) else entry_shape.get(n) == v
            for n, v in shape.items()
        ):
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
    """The table's YAML in a stable order. Equal maps of several devices or k share one entry."""
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
