"""Which package builds the forwards of a framework's module: entry points of the group pytest_nfp.backends.

An entry point `framework.module` names a Python module with `prepare(case, seed, cache_bytes) -> Prepared`. A package of
your own adds one in its pyproject.toml; nothing of it is imported before a forward is built.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

GROUP = "pytest_nfp.backends"
MODULES = ("dense", "moe", "attention", "model")


_PACKAGE = "pytest_nfp"
MOVED = {
    "backends.apart": "backends.engine_client",
    "backends.engine_process": "backends.engine_server",
    "backends.places": "backends.tensors",
    "backends.routes": "backends.expert_routing",
    "calibrated": "predict.calibrations",
    "compose": "predict.whole_models",
    "devices.visible": "devices.visible_devices",
    "executed": "interpreted",
    "granularity.ranges": "granularity.remote_zip",
    "journal": "records.journal",
    "judge": "compare.one_curve",
    "lookup": "predict.lookup",
    "measure.Curve": "curves.Curve",
    "measure.calibrate": "calibration.own_cpu",
    "measure.curve": "curves.curve",
    "measure.device_curves": "calibration.device_curves",
    "measure.formats": "curves.formats",
    "measure.statistics": "curves.statistics",
    "parallel": "catalog.parallel",
    "recordings.aiconfigurator": "recordings.case_curves",
    "recordings.fit": "calibration.fit",
    "recordings.residuals": "predict.residuals",
    "report.changes": "compare.changes",
    "report.shown": "records.shown",
    "report.words": "report.formatting",
    "scale": "catalog.tiny",
    "session": "run.session",
    "traces": "routing_traces",
    "upgrade": "compare.upgrades",
    "upkeep": "baselines.prune",
}
"""Where a name of 0.1.0 stands now, both inside pytest_nfp: for packages that still import the old one."""


def moved(error: ImportError) -> str:
    """What to import in place of a name that this package had before; "" for an import that failed for another reason."""
    taken = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
    old = f"{taken[2]}.{taken[1]}" if taken else error.name or ""
    new = MOVED.get(old.removeprefix(f"{_PACKAGE}."))
    return f"{old} is {_PACKAGE}.{new} now: import that" if new else ""


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
