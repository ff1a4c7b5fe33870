"""What is tested: one Case is a module of a subject, on a GPU, by a backend release, at one workload."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pytest_nfp import catalog, frameworks, registry
from pytest_nfp.catalog import Model, UnknownName
from pytest_nfp.principle.routing import Routing, active_experts, baseline_positions

Module = Literal["dense", "moe", "attention", "model", "own"]
"""`model` is a whole model on an engine; `own` is a forward that a user's test brings: no module that the catalog describes."""
ROUTINGS: tuple[Routing, ...] = ("balanced", "skewed")
"""Upper and lower bound of what N_max can be, by the principle."""
BYTES_PER_ELEMENT = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "fp8-block": 1.0, "int4": 0.5}


@dataclass(frozen=True, slots=True)
class Backend:
    """A framework and one release of it."""

    framework: str
    release: str

    def __str__(self) -> str:
        return f"{self.framework}=={self.release}" if self.release else self.framework


@dataclass(frozen=True, slots=True)
class Case:
    """One workload. `kernel` names the variant where a backend has several; `gemm` is the (n, k) of a single GEMM.

    context is None but for attention; top_k and routing are None but for MoE.
    """

    gpu: str
    backend: Backend
    module: Module
    subject: Model
    dtype: str
    batch: int = 1
    context: int | None = None
    top_k: int | None = None
    routing: Routing | None = None
    kernel: str | None = None
    gemm: tuple[int, int] | None = None

    @property
    def key(self) -> str:
        """The workload inside a baseline file, such as bf16-b1-k8-balanced."""
        if self.module == "own":
            return "curve"
        parts = [self.module, self.dtype]
        if self.kernel:
            parts.append(self.kernel)
        if self.gemm:
            parts.append(f"gemm{self.gemm[0]}x{self.gemm[1]}")
        parts.append(f"b{self.batch}")
        if self.context:
            parts.append(f"L{self.context}")
        if self.top_k:
            parts.append(f"k{self.top_k}")
        if self.routing:
            parts.append(str(self.routing))
        return "-".join(parts)

    @property
    def id(self) -> str:
        """Unique and stable: GPU, backend release, subject, workload."""
        return f"{self.gpu}-{self.backend}-{self.subject.name}-{self.key}"

    @property
    def bytes_per_element(self) -> float:
        """S."""
        return BYTES_PER_ELEMENT[self.dtype]

    @property
    def bytes_read(self) -> int:
        """Bytes of weights and KV cache that one forward of a whole model reads at N0."""
        moe, top_k, experts = self.subject.moe, self.top_k, None
        if moe is not None and top_k is not None and self.routing is not None:
            experts = active_experts(self.routing, self.batch * self.baseline_positions, moe.experts, top_k)
        elements = self.subject.weights(experts) + self.subject.cached(self.context or 0, self.batch)
        return int(elements * self.bytes_per_element)

    @property
    def map_key(self) -> str:
        """The name of its map in a baseline file: moe-bf16, with k where the subject sweeps it or k is not the model's own."""
        moe = self.subject.moe
        sweeps_k = (
            moe is not None and self.top_k is not None and (len(self.subject.top_k) > 1 or self.top_k != moe.top_k)
        )
        return f"{self.module}-{self.dtype}" + (f"-k{self.top_k}" if sweeps_k else "")

    @property
    def baseline_positions(self) -> int:
        """N0."""
        if self.subject.moe is None or self.top_k is None:
            return 1
        return baseline_positions(self.routing, self.subject.moe.experts, self.top_k, self.batch)

    @property
    def gemms(self) -> list[tuple[int, int]]:
        """(n, k) of the GEMMs of a dense case, in the order in which they run."""
        if self.gemm is not None:
            return [self.gemm]
        dense, hidden = self.subject.dense, self.subject.hidden
        assert dense is not None
        return [(dense.width, hidden)] * (dense.matrices - 1) + [(hidden, dense.width)]

    @property
    def granule(self) -> int:
        """The positions that add one row to every tile's owner: ceil(E/(k*b)) under balanced routing, else 1."""
        return self.baseline_positions


_KEY = re.compile(
    r"(?P<module>dense|moe|attention|model)-(?P<dtype>[a-z0-9]+(?:-block)?)(?:-(?P<variant>.*?))??-b(?P<batch>\d+)"
    r"(?:-L(?P<context>\d+))?(?:-k(?P<top_k>\d+))?(?:-(?P<routing>.+))?"
)


def read_key(key: str) -> dict[str, Any] | None:
    """What a case's key says, by name (variant: kernel and GEMM); None for one that says nothing, such as a user's own curve."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    numbers = ("batch", "context", "top_k")
    return {name: int(text) if text and name in numbers else text for name, text in found.groupdict().items()}


@dataclass(frozen=True, slots=True)
class Grid:
    """Batches, contexts and k that take the place of a subject's own, where any are given."""

    batch: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    top_k: tuple[int, ...] = ()


def _is_mla(module: Module, subject: Model) -> bool:
    return module == "attention" and subject.is_latent


def variants(case: Case) -> list[Case]:
    """The case by the other kernels of its framework on a GPU, of an engine the other ways to run it; MLA has one."""
    if _is_mla(case.module, case.subject) or (case.gpu == "cpu" and (case.module != "model" or case.routing)):
        return []
    framework = frameworks.get(case.backend.framework)
    names = framework.variants.get(case.module, ()) if framework is not None else ()
    return [replace(case, kernel=name) for name in names]


def _whole(
    gpu: str, backend: Backend, subject: Model, routings: Sequence[Routing], dtype: str | None, asked: Grid
) -> Iterator[Case]:
    """A whole model over its batches and contexts, and its k and these routings where it has experts.

    The k of its sweep are asked for at the shortest context, where the experts bound it: at the longest attention does.
    """
    if subject.layers is None or subject.attention is None or subject.is_latent:
        return  # A module shape, or MLA, whose projections no engine here is described with.
    base = Case(gpu, backend, "model", subject, dtype or ("fp32" if gpu == "cpu" else "bf16"))
    contexts = asked.context or subject.context or (512,)
    for batch in asked.batch or subject.batch:
        for context in contexts:
            case = replace(base, batch=batch, context=context)
            if subject.moe is None:
                yield case
                continue
            own = asked.top_k or subject.top_k or (subject.moe.top_k,)
            more = subject.sweep_top_k if context == min(contexts) and not asked.top_k else ()
            for top_k in dict.fromkeys((*own, *more)):
                yield from (replace(case, top_k=top_k, routing=routing) for routing in routings)


def parse_backend(text: str) -> Backend:
    """`vllm==0.33.0`, and all that pip writes around it; a framework without a release is completed by the caller. Raises UnknownName.

    Extras, markers, comments and local versions (`vllm[audio]==0.33.0+cu129 ; python_version > "3.9"  # pin`) choose no other
    release.
    """
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import Version

    line = re.sub(r"(^|\s+)#.*$", "", text).strip()
    name = re.match(r"[^\[=<>!~;@\s]*", line)[0].lower()  # type: ignore[index]  # matches the empty text too
    aliases = frameworks.aliases()
    framework = aliases.get(name, name)
    known = sorted({*frameworks.known(), *(f for f, _ in registry.registered())})
    if framework in frameworks.broken():
        raise UnknownName(f"{framework} can't be used: {frameworks.broken()[framework]}")
    if framework not in known:
        how = "give one of these as FRAMEWORK==RELEASE; other frameworks have no granularity rule here yet"
        raise UnknownName(catalog.unknown("backend", text, [*known, *aliases], how))
    try:
        pins = list(Requirement(line).specifier)
    except InvalidRequirement:
        release = line.partition("==")[2].strip()
        raise UnknownName(
            f"unknown release {release!r} of {framework}: not a version; write {framework}==1.2.3"
        ) from None
    if not pins:
        return Backend(framework, "")
    if len(pins) > 1 or pins[0].operator not in ("==", "===") or "*" in pins[0].version:
        raise UnknownName(f"{text!r} is more than one release of {framework}: write {framework}==1.2.3")
    return Backend(framework, Version(pins[0].version).public)


def frameworks_of(module: Module, gpu: str) -> list[str]:
    """The frameworks of a module: those with a granularity rule or a forward; on the CPU, those with a forward."""
    registered = registry.frameworks(module)
    if gpu == "cpu":
        return registered
    # What has a record has a rule or is not asked on a GPU; a backend without one is asked as it says.
    return [*frameworks.with_module(module), *(f for f in registered if f not in frameworks.known())]


def expand(
    gpu: str,
    backend: Backend,
    module: Module,
    subject: Model,
    routings: Sequence[Routing] = ROUTINGS,
    dtype: str | None = None,
    asked: Grid = Grid(),  # frozen
) -> Iterator[Case]:
    """Every case of a module of a subject by one backend, on the subject's own grid or what is asked for; of experts, under these
    routings.

    dtype: FP32 on a CPU and BF16 on a GPU where none is given.
    """
    if module == "own" or backend.framework not in frameworks_of(module, gpu):
        return
    if module == "model":
        yield from _whole(gpu, backend, subject, routings, dtype, asked)
        return
    if getattr(subject, module) is None:
        return
    framework = frameworks.get(backend.framework)
    if _is_mla(module, subject) and not (framework is not None and framework.has_mla):
        return
    if module == "dense" and subject.moe is not None:
        return  # A MoE model's few dense layers do not bound it: the principle has no dense term for it.
    on_cpu = gpu == "cpu"
    base = Case(gpu, backend, module, subject, dtype or ("fp32" if on_cpu else "bf16"))
    cpu_kernels = framework.cpu_kernels.get(module) if framework is not None and on_cpu else None
    for kernel in cpu_kernels or (None,):
        for batch in asked.batch or subject.batch:
            case = replace(base, kernel=kernel, batch=batch)
            if module == "dense":
                yield case
            elif module == "attention":
                # Its boundary is of a request's own rows: the batches of a model's grid would ask the same again.
                if asked.batch or batch == subject.batch[0]:
                    yield from (replace(case, context=context) for context in asked.context or subject.context)
            elif subject.moe is not None:
                for top_k in asked.top_k or subject.top_k or (subject.moe.top_k,):
                    for routing in routings:
                        yield replace(case, top_k=top_k, routing=routing)
