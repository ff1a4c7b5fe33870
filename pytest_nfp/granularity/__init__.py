"""Which tile runs at which token count: rules of released backends as piecewise maps.

A rule comes from the installed framework, an archive, the package index, or the shipped table, in this order. What
can't be read or evaluated is unknown, with the reason, never a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pytest_nfp import catalog
from pytest_nfp.cases import NO_RULE, OURS, Case
from pytest_nfp.catalog import Gpu, UnknownName
from pytest_nfp.granularity import artifacts, attention, cpu_kernels, fused_moe, shipped
from pytest_nfp.granularity.maps import (
    Granularity,
    Range,
    RuleUnknown,
    changed_parameters,
    changed_ranges,
    tiles_in_words,
)
from pytest_nfp.granularity.query import DeviceFacts, ExpertShape, HeadShape, Query

__all__ = [
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
    "shape_of",
]


def device_facts(gpu: Gpu) -> DeviceFacts:
    """What a rule may ask of a catalog GPU."""
    return DeviceFacts(gpu.driver_names[0], gpu.capability, gpu.shared_memory_optin_kib * 1024)


def check_release(framework: str, release: str, archives: Path | None = None) -> None:
    """Raise UnknownName, with the nearest releases, where the package index does not have this one.

    Not asked where archives are given, the framework is installed, or the release was read before; an index out of
    reach says nothing here, and reading the rule will give the reason.
    """
    if archives is not None or artifacts.installed_release(framework) is not None:
        return
    if release in shipped.shipped_releases(framework) or artifacts.is_cached(framework, release):
        return
    try:
        releases = artifacts.known_releases(framework)
    except RuleUnknown:
        return
    if release not in releases:
        near = ", ".join(artifacts.nearest(release, releases))
        raise UnknownName(
            f"unknown release {release!r} of {framework}; the nearest are {near}."
            " To use one that is on no index, give the folder of its wheel or source archive (--nfp-artifacts of pytest,"
            " --artifacts of nfp)."
        )


def read(query: Query, archives: Path | None = None, source: Path | None = None) -> Granularity:
    """The map that a release's own rule gives. Raises RuleUnknown with the reason."""
    if isinstance(query.shape, ExpertShape):
        return fused_moe.granularity(query, archives)
    return attention.granularity(query, archives, source)


def read_many(queries: Sequence[Query], archives: Path | None = None) -> list[Granularity | RuleUnknown]:
    """Maps of many queries, each or the reason why it is unknown; MoE rules of a release are evaluated together."""
    moe = [q for q in queries if isinstance(q.shape, ExpertShape)]
    answers = dict(zip(moe, fused_moe.granularities(moe, archives), strict=True)) if moe else {}
    for q in queries:
        if q not in answers:
            try:
                answers[q] = attention.granularity(q, archives)
            except RuleUnknown as reason:
                answers[q] = reason
    return [answers[q] for q in queries]


def shape_of(case: Case) -> dict[str, int]:
    """The dimensions that the rule of this case's module is asked about, as the shipped table keys them."""
    if case.module == "moe" and case.subject.moe is not None:
        moe = case.subject.moe
        return {
            "experts": moe.local_experts,
            "width": moe.width,
            "hidden": case.subject.hidden,
            "top_k": case.top_k or moe.top_k,
        }
    if case.module == "attention" and case.subject.attention is not None:
        return {"head_dim": case.subject.attention.head_dim}
    return {}


def query_of(case: Case) -> Query:
    """The question that a case asks of its release."""
    subject = case.subject
    if case.module == "moe" and subject.moe is not None:
        shape: ExpertShape | HeadShape = ExpertShape(
            subject.moe.local_experts,
            subject.moe.width,
            subject.hidden,
            case.top_k or subject.moe.top_k,
            subject.moe.expert_parallel,
        )
    else:
        assert subject.attention is not None
        a = subject.attention
        shape = HeadShape(a.heads, a.kv_heads, a.head_dim, a.value_dim)
    device = device_facts(catalog.gpu(case.gpu))
    return Query(case.backend.framework, case.backend.release, device, shape, case.dtype)


def granularity_of(case: Case, archives: Path | None = None, use_table: bool = True) -> Granularity:
    """The map that this case runs on. Raises RuleUnknown with the reason."""
    framework = case.backend.framework
    if case.gpu == "cpu" or framework not in OURS:
        # What a package registers has no rule here: one row is one row.
        return cpu_kernels.granularity(framework, case.backend.release, case.module, case.kernel or "", case.dtype)
    if (framework, case.module) in NO_RULE:
        raise RuleUnknown(f"{framework}'s {case.module} kernels on a GPU publish no tile rule")
    if case.module == "dense":
        raise RuleUnknown("a dense GEMM's tiles are chosen by the vendor's library, which publishes no rule")
    query = query_of(case)
    try:
        return read(query, archives)
    except RuleUnknown as reason:
        if not use_table:
            raise
        try:
            return shipped.lookup(
                query.framework, query.release, case.module, query.dtype, query.device.name, shape_of(case)
            )
        except RuleUnknown as also:
            raise RuleUnknown(f"{reason}; {also}") from None
