"""Which tile runs at which token count: rules of released backends as piecewise maps.

A rule comes from the installed framework, an archive, the package index, or the shipped table, in this order. What
can't be read or evaluated is unknown, with the reason, never a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from pytest_nfp import catalog
from pytest_nfp.cases import NO_RULE, OURS, Case
from pytest_nfp.catalog import Gpu, UnknownName
from pytest_nfp.granularity import artifacts, attention, cpu_kernels, fused_moe, shipped
from pytest_nfp.granularity.maps import (
    UNKNOWN,
    Granularity,
    Range,
    RuleUnknown,
    changed_parameters,
    changed_ranges,
    tiles_in_words,
)
from pytest_nfp.granularity.query import DeviceFacts, ExpertShape, HeadShape, Query

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
    "require_path",
    "shape_of",
]


CAPABILITIES: dict[str, tuple[tuple[int, int], str]] = {
    "vllm": ((7, 0), "vLLM's installation guide: compute capability 7.0 or higher"),
    "sglang": ((7, 5), "sglang.srt.utils: 'SGLang only supports sm75 and above'"),
    "flashinfer-python": ((7, 5), "FlashInfer's README: Turing and later"),
    "flash-attn": ((8, 0), "flash-attention's README: Ampere, Ada, or Hopper"),
    "flash-attn-3": ((8, 0), "flash-attention's hopper/setup.py: 8.0, 8.6, 9.0"),
    "flash-attn-4": ((9, 0), "flash-attention's README: FlashAttention-4 is for Hopper and Blackwell"),
}
"""The compute capability from which on a framework has kernels, and where it says so."""


def device_facts(gpu: Gpu) -> DeviceFacts:
    """What a rule may ask of a catalog GPU."""
    return DeviceFacts(gpu.driver_names[0], gpu.capability, gpu.shared_memory_optin_kib * 1024)


def check_release(framework: str, release: str, archives: Path | None = None) -> str:
    """The release as the package index writes it (0.24 is 0.24.0). Raises UnknownName, with the nearest, where it has none.

    Not asked where archives are given, the framework is installed, or the release was read before; an index out of
    reach says nothing here, and reading the rule will give the reason.
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
    """Raise RuleUnknown for a device that the framework has no kernels for, as far as its name tells."""
    device, framework = query.device, query.framework
    if device.architecture:
        raise RuleUnknown(
            f"{device.name} is AMD's {device.architecture}: the kernels that {framework} runs there are others, and are not"
            " read here. Choose an NVIDIA GPU."
        )
    capability = device.compute_capability
    if capability is None:
        return
    least, source = CAPABILITIES[framework]
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
    """The map that a release's own rule gives. Raises RuleUnknown with the reason."""
    require_path(query)
    if isinstance(query.shape, ExpertShape):
        return fused_moe.granularity(query, archives)
    return attention.granularity(query, archives, source)


def read_many(queries: Sequence[Query], archives: Path | None = None) -> list[Granularity | RuleUnknown]:
    """Maps of many queries, each or the reason why it is unknown; MoE rules of a release are evaluated together."""
    answers: dict[Query, Granularity | RuleUnknown] = {}
    for q in queries:
        try:
            require_path(q)
        except RuleUnknown as reason:
            answers[q] = reason
    moe = [q for q in queries if isinstance(q.shape, ExpertShape) and q not in answers]
    answers |= dict(zip(moe, fused_moe.granularities(moe, archives), strict=True))
    for q in queries:
        if q not in answers:
            try:
                answers[q] = attention.granularity(q, archives)
            except RuleUnknown as reason:
                answers[q] = reason
    return [answers[q] for q in queries]


def shape_of(case: Case) -> dict[str, int | str]:
    """The dimensions that the rule of this case's module is asked about, as the shipped table keys them."""
    if case.module == "moe" and case.subject.moe is not None:
        moe = case.subject.moe
        shape: dict[str, int | str] = {
            "experts": moe.local_experts,
            "width": moe.width,
            "hidden": case.subject.hidden,
            "top_k": case.top_k or moe.top_k,
        }
        return shape | ({"architecture": case.subject.architecture} if case.backend.framework == "sglang" else {})
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
            subject.moe.activation,
            subject.moe.matrices == 3,
            subject.moe.bias,
        )
    else:
        assert subject.attention is not None
        a = subject.attention
        shape = HeadShape(a.heads, a.kv_heads, a.head_dim, a.value_dim)
    framework = case.backend.framework
    # Only SGLang asks for the model's class: models of one shape stay one question to the others.
    architecture = subject.architecture if framework == "sglang" else ""
    device = device_facts(catalog.gpu(case.gpu))
    return Query(framework, case.backend.release, device, shape, case.dtype, architecture=architecture)


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
