"""Which tile runs at which token count: the rules of released backends as piecewise maps.

The first of these sources that has a rule gives it: the installed framework, an archive, the package index, the shipped
table. A rule that can't be read or evaluated is unknown. The reason is given, and nothing is guessed.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from packaging.version import Version

from pytest_nfp import catalog, frameworks
from pytest_nfp.cases import Case
from pytest_nfp.catalog import Gpu, UnknownName
from pytest_nfp.granularity import artifacts, attention, cpu_kernels, shipped
from pytest_nfp.granularity.maps import (
    UNKNOWN,
    Granularity,
    Range,
    RuleUnknown,
    changed_parameters,
    changed_ranges,
    tiles_in_words,
)
from pytest_nfp.granularity.query import MAX_COUNT, DeviceFacts, ExpertShape, HeadShape, Query

__all__ = [
    "UNKNOWN",
    "DeviceFacts",
    "ExpertShape",
    "Granularity",
    "HeadShape",
    "Query",
    "Range",
    "RuleUnknown",
    "changed_parameters",
    "changed_ranges",
    "tiles_in_words",
    "check_release",
    "device_facts",
    "granularity_of",
    "query_of",
    "read",
    "read_many",
    "read_or_shipped",
    "require_path",
    "shape_of",
]


class Reader(Protocol):
    """A module that reads the rule of a framework's releases."""

    def granularities(self, queries: Sequence[Query], archives: Path | None) -> list[Granularity | RuleUnknown]:
        """A map for each query, or the reason why it is unknown."""


def device_facts(gpu: Gpu) -> DeviceFacts:
    """The facts about a catalog GPU that a rule may ask for."""
    return DeviceFacts(gpu.driver_names[0], gpu.capability, gpu.shared_memory_optin_kib * 1024)


def check_release(framework: str, release: str, archives: Path | None = None) -> str:
    """The release as the package index writes it: 0.24 is 0.24.0.

    The index is not asked if archives are given, if the framework is installed, or if the release was read before or is
    in the shipped table. If the index is out of reach, the release is returned as it is: reading the rule then gives
    the reason. Raises UnknownName, with the nearest releases, for a release that the index does not have.
    """
    if archives is not None:
        return artifacts.archived_release(framework, release, archives) or release
    if artifacts.installed_release(framework) is not None:
        return release
    if release in shipped.shipped_releases(framework) or artifacts.is_cached(framework, release):
        return release
    try:
        releases = artifacts.known_releases(framework)
    except RuleUnknown:
        return release
    if written := next((r for r in releases if Version(r) == Version(release)), None):
        return written
    near = ", ".join(artifacts.nearest(release, releases))
    raise UnknownName(
        f"unknown release {release!r} of {framework}; the nearest are {near}."
        " To use one that is on no index, give the folder of its wheel or source archive (--nfp-artifacts of pytest,"
        " --artifacts of nfp)."
    )


def require_path(query: Query) -> None:
    """Raise RuleUnknown if the framework has no kernels for the device, or none in the dtype.

    A device is judged by its architecture and compute capability. One without a known capability passes.
    """
    device, framework = query.device, query.framework
    if device.architecture:
        raise RuleUnknown(
            f"{device.name} is AMD's {device.architecture}: the kernels that {framework} runs there are others, and are not"
            " read here. Choose an NVIDIA GPU."
        )
    capability = device.compute_capability
    if capability is None:
        return
    known = frameworks.get(framework)
    least, source = (known.capability if known is not None else None) or ((0, 0), "")
    if capability < least:
        raise RuleUnknown(
            f"{framework} has no kernels for {device.name} of compute capability {capability[0]}.{capability[1]}: it needs"
            f" {least[0]}.{least[1]} or more ({source})"
        )
    if query.dtype == "bf16" and capability < (8, 0):
        raise RuleUnknown(
            f"{device.name} of compute capability {capability[0]}.{capability[1]} does not compute in bf16, which needs 8.0:"
            " ask for --dtype fp16"
        )


def read(query: Query, archives: Path | None = None, source: Path | None = None) -> Granularity:
    """The map of a release by its own rule. Raises RuleUnknown with the reason."""
    require_path(query)
    if source is not None:
        return attention.granularity(query, archives, source)
    (answer,) = _reader(query.framework).granularities([query], archives)
    if isinstance(answer, RuleUnknown):
        raise answer
    return answer


def read_or_shipped(query: Query, archives: Path | None = None, source: Path | None = None) -> Granularity:
    """The map by the release's own rule, or the shipped table's where that rule can't be read.

    Raises RuleUnknown with both reasons.
    """
    try:
        return read(query, archives, source)
    except RuleUnknown as reason:
        if query.mode != "eager" or query.max_count != MAX_COUNT:
            raise  # The table holds maps of eager mode and the default range alone.
        try:
            return shipped.lookup(query, _module_of(query), shape_of(query))
        except RuleUnknown as table_reason:
            raise RuleUnknown(f"{reason}; {table_reason}") from None


def _module_of(query: Query) -> str:
    return "moe" if isinstance(query.shape, ExpertShape) else "attention"


def read_many(queries: Sequence[Query], archives: Path | None = None) -> list[Granularity | RuleUnknown]:
    """For each query its map, or the reason why the map is unknown.

    The MoE rules of one release are evaluated together.
    """
    answers: dict[Query, Granularity | RuleUnknown] = {}
    for q in queries:
        try:
            require_path(q)
        except RuleUnknown as reason:
            answers[q] = reason
    # The rules of one framework are read together.
    for framework in dict.fromkeys(q.framework for q in queries if q not in answers):
        unanswered = [q for q in dict.fromkeys(queries) if q.framework == framework and q not in answers]
        try:
            answers |= dict(zip(unanswered, _reader(framework).granularities(unanswered, archives), strict=True))
        except RuleUnknown as reason:
            answers |= dict.fromkeys(unanswered, reason)
    return [answers[q] for q in queries]


def _reader(framework: str) -> Reader:
    """The module that reads the rules of a framework. Raises RuleUnknown for a framework without one."""
    known = frameworks.get(framework)
    if known is None or not known.rule_reader:
        raise RuleUnknown(f"{framework} has no tile rule here")
    reader: Reader = importlib.import_module(known.rule_reader)
    return reader


def shape_of(query: Query) -> dict[str, int | str]:
    """The dimensions that a rule depends on, by their names in the shipped table."""
    shape = query.shape
    if isinstance(shape, HeadShape):
        return {"head_dim": shape.head_dim}
    experts: dict[str, int | str] = {
        "experts": shape.experts,
        "width": shape.width,
        "hidden": shape.hidden,
        "top_k": shape.top_k,
    }
    framework = frameworks.get(query.framework)
    asks_architecture = framework is not None and framework.asks_architecture
    return experts | ({"architecture": query.architecture} if asks_architecture else {})


def _asks_architecture(case: Case) -> bool:
    framework = frameworks.get(case.backend.framework)
    return framework is not None and framework.asks_architecture


def query_of(case: Case) -> Query:
    """The question that a case puts to its release."""
    subject = case.subject
    if case.module == "moe" and subject.moe is not None:
        shape: ExpertShape | HeadShape = ExpertShape(
            subject.moe.local_experts,
            subject.moe.width,
            subject.hidden,
            case.top_k or subject.moe.top_k,
            subject.moe.expert_parallel,
            subject.moe.activation,
            subject.moe.matrices == 3,
            subject.moe.bias,
        )
    else:
        assert subject.attention is not None
        a = subject.attention
        shape = HeadShape(a.heads, a.kv_heads, a.head_dim, a.value_dim)
    framework = case.backend.framework
    # A rule that does not ask for the model's class gets one question for all models of one shape.
    architecture = subject.architecture if _asks_architecture(case) else ""
    device = device_facts(catalog.gpu(case.gpu))
    return Query(framework, case.backend.release, device, shape, case.dtype, architecture=architecture)


def granularity_of(case: Case, archives: Path | None = None, use_table: bool = True) -> Granularity:
    """The map that this case runs on. Raises RuleUnknown with the reason."""
    framework = case.backend.framework
    if case.gpu == "cpu" or framework not in frameworks.known():
        # A backend without a record has no tile rule of its own.
        return cpu_kernels.granularity(framework, case.backend.release, case.module, case.kernel or "", case.dtype)
    if frameworks.is_unruled(framework, case.module):
        raise RuleUnknown(f"{framework}'s {case.module} kernels on a GPU publish no tile rule")
    if case.module == "dense":
        raise RuleUnknown("a dense GEMM's tiles are chosen by the vendor's library, which publishes no rule")
    query = query_of(case)
    return read_or_shipped(query, archives) if use_table else read(query, archives)
