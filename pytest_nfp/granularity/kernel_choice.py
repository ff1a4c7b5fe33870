"""Which fused-MoE kernel a release runs, by the release's own choice. The choice comes before any tile.

vLLM: newer releases have a selection function for each number format (`oracle/`), which asks every kernel class in turn
what it supports. Older releases have a function for FP8 alone. SGLang: the server arguments choose by the model's
class. Where they leave `auto`, the quantisation method chooses the runner.

Both are evaluated in the sandbox: for one rank or expert parallelism in one node, in the default environment, with
FlashInfer where the release requires it. DeepGEMM is not a requirement: where the release asks for it, the choice is
evaluated with both answers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from pytest_nfp import frameworks
from pytest_nfp.granularity import evaluator
from pytest_nfp.granularity.artifacts import Artifact
from pytest_nfp.granularity.choice_code import code_of
from pytest_nfp.granularity.maps import UNKNOWN, RuleUnknown
from pytest_nfp.granularity.query import ExpertShape, Query
from pytest_nfp.granularity.release import opened

LAYERS = "vllm.model_executor.layers"
ORACLES = {
    "bf16": (f"{LAYERS}.fused_moe.oracle.unquantized", "select_unquantized_moe_backend"),
    "fp8": (f"{LAYERS}.fused_moe.oracle.fp8", "select_fp8_moe_backend"),
}
OLD_FP8 = (f"{LAYERS}.quantization.fp8", "get_fp8_moe_backend")
CLASSES = {
    "vllm": {
        "bf16": (f"{LAYERS}.fused_moe.layer", "UnquantizedFusedMoEMethod"),
        "fp8": (f"{LAYERS}.quantization.fp8", "Fp8MoEMethod"),
    },
    "sglang": {
        "bf16": ("sglang.srt.layers.quantization.unquant", "UnquantizedFusedMoEMethod"),
        "fp8": ("sglang.srt.layers.quantization.fp8", "Fp8MoEMethod"),
    },
}
"""The classes that make the choice in a release without a selection function."""
LONGEST_SOURCE = 1 << 20
"""Most characters of a source that is parsed in this process. A release's longest source has half as many."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel that a release runs, and why."""

    kernel: str
    """Name of the kernel, or `unknown`. Two names where the choice depends on what is installed."""
    reason: str
    """Which code made the choice for which workload, or why the kernel is unknown."""
    code: tuple[tuple[str, str], ...] = ()
    """(function, digest) of everything that makes the choice, where the kernel is unknown. Two releases with the same
    code choose the same kernel, whichever that is."""


def kernel_choices(queries: Sequence[Query], archives: Path | None = None) -> list[Choice]:
    """The kernel of each query, or `unknown` with the reason.

    The queries of one release are evaluated together.
    """
    answers: dict[int, Choice] = {}
    asked: dict[Artifact, list[tuple[int, dict[str, Any], str]]] = {}
    for i, query in enumerate(queries):
        artifact = None
        try:
            artifact = opened(query.framework, query.release, archives)
            question_or_choice = _asked(artifact, query)
            if isinstance(question_or_choice, Choice):
                answers[i] = question_or_choice
            else:
                asked.setdefault(artifact, []).append((i, *question_or_choice))
        except RuleUnknown as reason:
            answers[i] = _unknown(artifact, query, str(reason))
    for artifact, questions in asked.items():
        shared = partial(_shared, questions[0][1]["framework"], artifact)
        evaluated = evaluator.evaluate_kernels([q for _, q, _ in questions], _identity(artifact), shared)
        for (i, _, why), kernels in zip(questions, evaluated, strict=True):
            if isinstance(kernels, RuleUnknown):
                answers[i] = _unknown(artifact, queries[i], str(kernels))
                continue
            names = [_name(k) for k in kernels]
            kernel = names[0] if len(set(names)) == 1 else f"{names[0]} if installed, else {names[1]}"
            answers[i] = Choice(kernel, why)
    return [answers[i] for i in range(len(queries))]


def kernel_choice(query: Query, archives: Path | None = None) -> Choice:
    """The kernel of one query, or `unknown` with the reason."""
    return kernel_choices([query], archives)[0]


def _asked(artifact: Artifact, query: Query) -> Choice | tuple[dict[str, Any], str]:
    """The question to the sandbox and the reason that its answer gets, or the choice where no question is needed."""
    shape = query.shape
    assert isinstance(shape, ExpertShape)
    parallel = shape.expert_parallel
    ranks = "one rank" if parallel == 1 else f"expert parallelism over {parallel} ranks"
    common = {
        "framework": query.framework,
        "origin": artifact.origin,
        "dtype": query.dtype,
        **evaluator.surroundings(query.device),
        "expert_parallel": parallel,
        "model": {
            "activation": shape.activation,
            "gated": shape.gated,
            "bias": shape.bias,
            "hidden": shape.hidden,
            "width": shape.width,
            "experts": shape.experts * parallel,
            "top_k": shape.top_k,
        },
    }
    if query.framework == "sglang":
        if query.device.compute_capability is None:
            raise RuleUnknown("the runner is chosen by compute capability, which this device's name does not tell")
        model = "the model's class" if query.architecture else "a model whose class has no choice of its own"
        reason = (
            f"the release's server arguments and quantisation method for {model}, for {ranks} with nothing set by hand"
        )
        return common | {"architecture": query.architecture}, reason
    kind = _kind(query.dtype)
    entry = _entry(artifact, kind)
    if entry is None:
        if kind != "bf16":
            raise RuleUnknown(f"{artifact.file} has no function that chooses the FP8 kernel")
        return _unordered(artifact)
    if query.device.compute_capability is None:
        raise RuleUnknown("the order asks for a compute capability, which this device's name does not tell")
    flashinfer = _requires(artifact, "flashinfer-python")
    reason = (
        f"{entry[1]} of the release, for {ranks} in the default environment,"
        f" {'with' if flashinfer else 'without'} FlashInfer as its requirements say"
    )
    return common | {"entry": entry, "flashinfer": flashinfer}, reason


def _kind(dtype: str) -> str:
    return "bf16" if dtype in ("bf16", "fp16") else "fp8"


def _identity(artifact: Artifact) -> str:
    """The text that stands for a release's sources in the cache."""
    return f"{artifact.file} {artifact.sha256}"


@lru_cache(maxsize=64)
def _shared(framework: str, artifact: Artifact) -> dict[str, Any]:
    sources = _sources(framework, artifact)
    names = sorted({n for text in sources.values() for n in re.findall(r"\bhas_flashinfer\w*", text)})
    return {"sources": sources, "environment_file": "vllm/envs.py", "flashinfer_names": names}


def _unknown(artifact: Artifact | None, query: Query, reason: str) -> Choice:
    """An unknown kernel, with the code that chooses it if the release can be read."""
    if artifact is None:
        return Choice(UNKNOWN, reason)
    kind = _kind(query.dtype)
    entry = _entry(artifact, kind) if query.framework == "vllm" else None
    module, name = entry or CLASSES[query.framework][kind]
    starts = [(module, name)]
    if query.framework == "sglang":
        starts.append(("sglang.srt.server_args", "ServerArgs"))
    return Choice(UNKNOWN, reason, _code(query.framework, artifact, tuple(starts)))


@lru_cache(maxsize=64)
def _code(framework: str, artifact: Artifact, starts: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return code_of(_sources(framework, artifact), starts)


def marlin_question(query: Query, archives: Path | None = None) -> dict[str, Any]:
    """The question to the sandbox about Marlin's own size rule. Raises RuleUnknown.

    The rule is a loop over Marlin's block sizes, lifted from its function.
    """
    shape = query.shape
    assert isinstance(shape, ExpertShape)
    artifact = opened(query.framework, query.release, archives)
    for name, text in _sources(query.framework, artifact).items():
        if "marlin_moe" not in name.rpartition("/")[2]:
            continue
        for node in ast.walk(parsed(text, name)):
            if isinstance(node, ast.For) and ast.unparse(node.target) == "block_size_m":
                body = "\n".join("    " + line for line in ast.unparse(node).splitlines())
                source = f"def marlin(M, topk, E):\n{body}\n    return {{'BLOCK_SIZE_M': block_size_m}}\n"
                arguments = {"topk": shape.top_k, "E": shape.experts}
                return evaluator.question(
                    query, artifact.origin, source, name, "marlin", arguments, "M", ["BLOCK_SIZE_M"]
                )
    raise RuleUnknown(f"vllm {query.release} has no loop over Marlin's block sizes")


def parsed(text: str, name: str) -> ast.Module:
    """The syntax tree of a foreign source, parsed in this process.

    Raises RuleUnknown if it can't be parsed, or is longer than any source of a release.
    """
    if len(text) > LONGEST_SOURCE:
        raise RuleUnknown(f"{name} has {len(text)} characters, more than a source of a release")
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RuleUnknown(f"{name} can't be parsed: {error}") from error


def own_tile_limit(query: Query, archives: Path | None = None) -> int:
    """The last M at which every (token, expert) pair gets a tile of its own.

    0 if the release has no such path or can't be read.
    """
    shape = query.shape
    assert isinstance(shape, ExpertShape)
    try:
        sources = _sources(query.framework, opened(query.framework, query.release, archives))
    except RuleUnknown:
        return 0
    text = sources.get("vllm/model_executor/layers/fused_moe/fused_moe.py", "")
    factor = re.search(r"\*\s*(\d+)\s*<=\s*global_num_experts", text)
    return shape.experts * shape.expert_parallel // (shape.top_k * int(factor[1])) if factor else 0


@lru_cache(maxsize=64)
def _sources(framework: str, artifact: Artifact) -> dict[str, str]:
    """The Python files that a choice may reach, by their path inside the release."""
    may_reach = re.compile(frameworks.known()[framework].choice_files)
    return {n: artifact.read(n) for n in sorted(artifact.names) if may_reach.search(n)}


@lru_cache(maxsize=256)
def _entry(artifact: Artifact, kind: str) -> tuple[str, str] | None:
    candidates = [ORACLES[kind], *([OLD_FP8] if kind == "fp8" else [])]
    for module, function in candidates:
        path = module.replace(".", "/") + ".py"
        if path in artifact.names and f"def {function}(" in artifact.read(path):
            return module, function
    return None


def _unordered(artifact: Artifact) -> Choice:
    """The choice of a release that has no order for unquantised experts: Triton.

    Raises RuleUnknown if a switch of its environment selects another kernel by default, or if its files are missing.
    """
    if not {"vllm/envs.py", "vllm/model_executor/layers/fused_moe/layer.py"} <= artifact.names:
        raise RuleUnknown(f"{artifact.file} lacks the files in which a kernel would be chosen")
    switch = re.search(r"VLLM_USE_FLASHINFER_MOE_FP16\s*:\s*bool\s*=\s*(\w+)", artifact.read("vllm/envs.py"))
    if switch is not None and switch[1] != "False":
        raise RuleUnknown(
            f"{artifact.file} has no function that chooses, and VLLM_USE_FLASHINFER_MOE_FP16 is {switch[1]}"
        )
    return Choice("triton", "the release has no other path for unquantised experts in the default environment")


@lru_cache(maxsize=64)
def _requires(artifact: Artifact, distribution: str) -> bool:
    for name in artifact.names:
        if name.endswith(("METADATA", "PKG-INFO")):
            lines = re.findall(rf"^Requires-Dist: {distribution}\b([^\n]*)", artifact.read(name), re.MULTILINE)
            return any("extra ==" not in line for line in lines)
    return False


def _name(member: str) -> str:
    return member.lower().replace("_", "-")
