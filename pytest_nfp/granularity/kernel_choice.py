"""Which fused-MoE kernel vLLM runs before any tile: the release's own backend order, evaluated.

Newer releases have a selection function a number format (`oracle/`), which asks every kernel class in turn what it
supports; older ones a function for FP8 alone. They run in the sandbox, for one rank or expert parallelism in one node, in
the default environment, with FlashInfer where the release requires it. DeepGEMM is not a requirement: both answers are asked.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_nfp.granularity import evaluator
from pytest_nfp.granularity.artifacts import Artifact, open_release
from pytest_nfp.granularity.maps import RuleUnknown
from pytest_nfp.granularity.query import DeviceFacts, ExpertShape, Query

WANTED = re.compile(
    r"(?:^|/)vllm/(?:model_executor/layers/fused_moe/.+\.py"
    r"|model_executor/layers/quantization/(?:fp8|utils/quant_utils|utils/flashinfer_utils)\.py|envs\.py)$"
    r"|(?:^|/)[^/]+\.dist-info/METADATA$|^PKG-INFO$"
)
LAYERS = "vllm.model_executor.layers"
ORACLES = {
    "bf16": (f"{LAYERS}.fused_moe.oracle.unquantized", "select_unquantized_moe_backend"),
    "fp8": (f"{LAYERS}.fused_moe.oracle.fp8", "select_fp8_moe_backend"),
}
OLD_FP8 = (f"{LAYERS}.quantization.fp8", "get_fp8_moe_backend")


UNKNOWN = "unknown"
"""The kernel's name where it can't be known from the artifact; the reason stands beside it."""


def kernel_choice(query: Query, archives: Path | None = None) -> tuple[str, str]:
    """(kernel, reason) that vLLM runs for a query; `unknown` with the reason where the artifact does not tell."""
    try:
        assert isinstance(query.shape, ExpertShape)
        parallel = query.shape.expert_parallel
        return _choice(query.release, query.device.compute_capability, query.dtype, parallel, archives)
    except RuleUnknown as reason:
        return UNKNOWN, str(reason)


@lru_cache(maxsize=256)
def _choice(
    release: str, capability: tuple[int, int] | None, dtype: str, expert_parallel: int, archives: Path | None
) -> tuple[str, str]:
    artifact = _artifact(release, archives)
    sources = _sources(artifact)
    dtype = "bf16" if dtype in ("bf16", "fp16") else dtype
    entry = _entry(sources, "bf16" if dtype == "bf16" else "fp8")
    if entry is None:
        if dtype != "bf16":
            raise RuleUnknown(f"{artifact.file} has no function that chooses the FP8 kernel")
        return _unordered(artifact, sources)
    if capability is None:
        raise RuleUnknown("the order asks for a compute capability, which the catalog does not know")
    flashinfer = _requires(artifact, "flashinfer-python")
    questions = [
        _question(capability, sources, entry, dtype, flashinfer, deep_gemm, expert_parallel)
        for deep_gemm in (True, False)
    ]
    with_it, without = evaluator.evaluate_kernels(questions)
    for found in (with_it, without):
        if isinstance(found, RuleUnknown):
            raise found
    assert isinstance(with_it, str) and isinstance(without, str)
    ranks = "one rank" if expert_parallel == 1 else f"expert parallelism over {expert_parallel} ranks"
    reason = (
        f"{entry[1]} of the release, for {ranks} in the default environment,"
        f" {'with' if flashinfer else 'without'} FlashInfer as its requirements say"
    )
    if with_it != without:
        return f"{_name(with_it)} if installed, else {_name(without)}", reason
    return _name(without), reason


def marlin_question(query: Query, archives: Path | None = None) -> dict[str, Any]:
    """What the sandbox is asked for Marlin's own size rule: the loop over its sizes, lifted. Raises RuleUnknown."""
    shape = query.shape
    assert isinstance(shape, ExpertShape)
    for name, text in _sources(_artifact(query.release, archives)).items():
        if "marlin_moe" not in name.rpartition("/")[2]:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.For) and ast.unparse(node.target) == "block_size_m":
                body = "\n".join("    " + line for line in ast.unparse(node).splitlines())
                source = f"def marlin(M, topk, E):\n{body}\n    return {{'BLOCK_SIZE_M': block_size_m}}\n"
                arguments = {"topk": shape.top_k, "E": shape.experts}
                return evaluator.question(query, source, name, "marlin", arguments, "M", ["BLOCK_SIZE_M"])
    raise RuleUnknown(f"vllm {query.release} has no loop over Marlin's block sizes")


def own_tile_limit(query: Query, archives: Path | None = None) -> int:
    """The last M at which every (token, expert) pair gets a tile of its own; 0 where the release has no such path."""
    shape = query.shape
    assert isinstance(shape, ExpertShape)
    try:
        sources = _sources(_artifact(query.release, archives))
    except RuleUnknown:
        return 0
    text = sources.get("vllm/model_executor/layers/fused_moe/fused_moe.py", "")
    factor = re.search(r"\*\s*(\d+)\s*<=\s*global_num_experts", text)
    return shape.experts * shape.expert_parallel // (shape.top_k * int(factor[1])) if factor else 0


@lru_cache(maxsize=64)
def _artifact(release: str, archives: Path | None) -> Artifact:
    return open_release("vllm", release, WANTED, archives)


@lru_cache(maxsize=64)
def _sources(artifact: Artifact) -> dict[str, str]:
    """The Python files that a choice may reach, by their path inside the release."""
    return {n: artifact.read(n) for n in sorted(artifact.names) if n.endswith(".py")}


def _entry(sources: dict[str, str], kind: str) -> tuple[str, str] | None:
    candidates = [ORACLES[kind], *([OLD_FP8] if kind == "fp8" else [])]
    for module, function in candidates:
        path = module.replace(".", "/") + ".py"
        if f"def {function}(" in sources.get(path, ""):
            return module, function
    return None


def _unordered(artifact: Artifact, sources: dict[str, str]) -> tuple[str, str]:
    """A release without an order for unquantised experts: Triton, unless a switch of its environment is on by default."""
    if not {"vllm/envs.py", "vllm/model_executor/layers/fused_moe/layer.py"} <= set(sources):
        raise RuleUnknown(f"{artifact.file} lacks the files in which a kernel would be chosen")
    switch = re.search(r"VLLM_USE_FLASHINFER_MOE_FP16\s*:\s*bool\s*=\s*(\w+)", sources.get("vllm/envs.py", ""))
    if switch is not None and switch[1] != "False":
        raise RuleUnknown(
            f"{artifact.file} has no function that chooses, and VLLM_USE_FLASHINFER_MOE_FP16 is {switch[1]}"
        )
    return "triton", "the release has no other path for unquantised experts in the default environment"


def _requires(artifact: Artifact, distribution: str) -> bool:
    for name in artifact.names:
        if name.endswith(("METADATA", "PKG-INFO")):
            lines = re.findall(rf"^Requires-Dist: {distribution}\b([^\n]*)", artifact.read(name), re.MULTILINE)
            return any("extra ==" not in line for line in lines)
    return False


def _question(
    capability: tuple[int, int],
    sources: dict[str, str],
    entry: tuple[str, str],
    dtype: str,
    flashinfer: bool,
    deep_gemm: bool,
    expert_parallel: int,
) -> dict[str, Any]:
    names = sorted({n for text in sources.values() for n in re.findall(r"\bhas_flashinfer\w*", text)})
    return {
        "sources": sources,
        "environment_file": "vllm/envs.py",
        "entry": entry,
        "dtype": dtype,
        **evaluator.surroundings(DeviceFacts("", capability)),
        "flashinfer": flashinfer,
        "flashinfer_names": names,
        "deep_gemm": deep_gemm,
        "expert_parallel": expert_parallel,
    }


def _name(member: str) -> str:
    return member.lower().replace("_", "-")
