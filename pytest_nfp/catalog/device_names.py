"""Facts from the name of a GPU that the catalog lacks: its compute capability (NVIDIA) or architecture (AMD)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pytest_nfp.files import read_yaml

NAMES = Path(__file__).with_name("device_names.yaml")


class _Names(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: Literal[1] = Field(alias="schema")
    shared_memory_optin_kib: dict[str, Annotated[int, Field(gt=0)]]
    nvidia: dict[str, tuple[str, ...]]
    amd: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class NamedDevice:
    """Facts from the name of a device."""

    compute_capability: tuple[int, int] | None = None
    """(major, minor) of an NVIDIA GPU."""
    shared_memory_optin: int | None = None
    """Shared memory that a block can opt in to, bytes."""
    architecture: str = ""
    """Architecture of an AMD GPU, such as gfx942; "" for NVIDIA's."""


@lru_cache(maxsize=1)
def _entries() -> list[tuple[list[str], NamedDevice]]:
    """(words of an entry, its device), the longest entry first."""
    names = read_yaml(NAMES, _Names, is_shipped=True)
    devices = []
    for text, entries in names.nvidia.items():
        major, _, minor = text.partition(".")
        kib = names.shared_memory_optin_kib.get(text)
        device = NamedDevice((int(major), int(minor)), kib and kib * 1024)
        devices += [(_words(entry), device) for entry in entries]
    for architecture, entries in names.amd.items():
        devices += [(_words(entry), NamedDevice(architecture=architecture)) for entry in entries]
    return sorted(devices, key=lambda entry: -len(" ".join(entry[0])))


def _words(name: str) -> list[str]:
    """ "NVIDIA A100-SXM4-80GB" as [a100, sxm4, 80gb]: without the maker, and brands that drivers later dropped."""
    words = re.split(r"[\s_-]+", name.strip().lower())
    return [w for w in words if w not in ("nvidia", "amd", "tesla", "grid", "(tm)", "")]


def device_by_name(name: str) -> NamedDevice | None:
    """The device of a name as the driver reports it; None where the name begins with no entry."""
    words = _words(name)
    for entry, device in _entries():
        last = len(entry) - 1
        # An entry can be a family of GeForce GPUs: "GeForce RTX 40" begins "GeForce RTX 4090".
        is_family = entry[0] == "geforce" and len(words) > last and words[last].startswith(entry[last])
        if words[: len(entry)] == entry or (is_family and words[:last] == entry[:last]):
            return device
    return None
