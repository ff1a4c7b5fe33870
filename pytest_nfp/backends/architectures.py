"""Which engines have a model's architecture: for who asked one that has not."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from pytest_nfp import frameworks
from pytest_nfp.backends import Unsupported
from pytest_nfp.backends.hf_config import architecture_of
from pytest_nfp.cases import Case

CATALOG_ENGINES = {
    "LLaDA2MoeModelLM": ("sglang",),
    "BailingMoeV2ForCausalLM": ("vllm from 0.11", "sglang"),
}
"""Engines of the catalog's own configs, for who has none of them installed."""


def refusal(engine: str, case: Case, said: str) -> Unsupported:
    """That an engine can't run a case's model: what it said, in one line, and who has the architecture where it has not."""
    return Unsupported(f"{engine} can't run this model: {' '.join(said.split())[:300]}{elsewhere(case)}")


def elsewhere(case: Case) -> str:
    """Which of the installed engines have the architecture of a case's model, as the end of a message; empty where its own has it."""
    name = architecture_of(case)
    if name == "?":
        return f"; {case.subject.source} has no field architectures, which names the class that an engine builds"
    have = [f.name for f in frameworks.known().values() if f.architectures is not None and _has(f.architectures, name)]
    if case.backend.framework in have:
        return ""
    known = CATALOG_ENGINES.get(name, ())
    said = f"; {name} is registered by {' and '.join(have) or 'no engine that is installed here'}"
    more = [engine for engine in known if engine.split()[0] not in have]
    return said + (f", and by {' and '.join(more)}" if more else "")


def _has(place: tuple[str, str, str], architecture: str) -> bool:
    """Whether an installed engine names an architecture in its registry: read, not imported. place: as its record has it."""
    package, folder, pattern = place
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return False
    root = Path(found.submodule_search_locations[0]) / folder
    if not re.fullmatch(r"\w+", architecture):
        return False
    wanted = re.compile(pattern.format(architecture), re.DOTALL)
    files = sorted(root.glob("*.py")) if root.is_dir() else [root] if root.is_file() else []
    return any(wanted.search(path.read_text(encoding="utf-8", errors="replace")) for path in files)
