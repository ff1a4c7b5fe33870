"""Which package builds the forwards of a framework's module: entry points of the group pytest_nfp.backends.

An entry point `framework.module` names a Python module with `prepare(case, seed, cache_bytes) -> Prepared`. A package of
your own adds one in its pyproject.toml; nothing of it is imported before a forward is built.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

GROUP = "pytest_nfp.backends"
MODULES = ("dense", "moe", "attention", "model")


@lru_cache(maxsize=1)
def registered() -> dict[tuple[str, str], EntryPoint]:
    """(framework, module) -> entry point. What is registered twice is the last one's; other names are left alone."""
    found = {}
    for point in entry_points(group=GROUP):
        framework, _, module = point.name.rpartition(".")
        if framework and module in MODULES:
            found[framework, module] = point
    return found


def frameworks(module: str) -> list[str]:
    """The frameworks with a forward for a module, in the order of their names."""
    return sorted(framework for framework, m in registered() if m == module)


def release(framework: str) -> str | None:
    """The release of the package that registers a framework: what a case of it is named by. None for an unknown one."""
    for (name, _), point in registered().items():
        if name == framework and point.dist is not None:
            return point.dist.version
    return None
