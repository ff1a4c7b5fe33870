"""BLOCK_SIZE_M of the fused-MoE Triton kernel of vLLM and SGLang: the release's own rule and tuned files, evaluated.

The rule's source is lifted and run by `sandbox.py` in a separate interpreter. Where the two frameworks differ is data:
which file holds the rule, and which triton it is run with (SGLang keys its tuned files by triton version).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_nfp.granularity.artifacts import Artifact, open_release, pinned_requirement
from pytest_nfp.granularity.maps import Granularity, RuleUnknown, from_points

ENTRY = "try_get_optimal_moe_config"
RULE_FILES = {
    "vllm": ("vllm/model_executor/layers/fused_moe/fused_moe.py",),
    # Newest first: the function moved out of fused_moe.py in 0.5.3 and to moe_runner in 0.5.12.
    "sglang": (
        "sglang/srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_config.py",
        "sglang/srt/layers/moe/fused_moe_triton/fused_moe_triton_config.py",
        "sglang/srt/layers/moe/fused_moe_triton/fused_moe.py",
    ),
}
WANTED = re.compile(
    r"(?:^|/)(?:vllm/model_executor/layers/fused_moe/(?:fused_moe\.py|configs/[^/]+\.json)"
    r"|sglang/srt/layers/moe/(?:fused_moe_triton|moe_runner/triton_utils)/"
    r"(?:fused_moe\.py|fused_moe_triton_config\.py|configs/.+\.json))$"
    r"|(?:^|/)[^/]+\.dist-info/METADATA$|^PKG-INFO$"
)
ENVIRONMENT = ("VLLM_TUNED_CONFIG_FOLDER", "VLLM_BATCH_INVARIANT", "SGLANG_MOE_CONFIG_DIR")
MAX_TOKENS = 4096
TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What the rule is asked about: E, expert width f, hidden d, k."""

    experts: int
    width: int
    hidden: int
    top_k: int


def granularity(
    framework: str,
    release: str,
    shape: ExpertShape,
    device_name: str,
    compute_capability: str,
    shared_memory_optin: int,
    dtype: str = "bf16",
    archives: Path | None = None,
    max_tokens: int = MAX_TOKENS,
) -> Granularity:
    """The piecewise map over M = 1..max_tokens. Raises RuleUnknown with the reason."""
    if dtype not in ("bf16", "fp16"):
        raise RuleUnknown(f"the fused-MoE rule is read for bf16 and fp16 so far, not for {dtype}")
    artifact = _artifact(framework, release, archives)
    points = _evaluate(
        artifact, framework, shape, device_name, compute_capability, shared_memory_optin, max_tokens, _environment()
    )
    named = tuple((tile, Path(path).name if path else "default rule", key) for tile, path, key in points)
    warnings = list(_near_misses(artifact, shape, device_name, {s for _, s, _ in named}))
    warnings += [f"{name}={value} is in force" for name, value in _environment()]
    return Granularity(
        framework=framework,
        release=release,
        module="moe",
        dtype=dtype,
        device_name=device_name,
        ranges=from_points(named),
        kernel="triton",
        kernel_reason="the tile rule is that of the fused-MoE Triton kernel; the backend order before it is not evaluated",
        artifact_file=artifact.file,
        artifact_sha256=artifact.sha256,
        origin=artifact.origin,
        warnings=tuple(warnings),
    )


@lru_cache(maxsize=32)
def _artifact(framework: str, release: str, archives: Path | None) -> Artifact:
    return open_release(framework, release, WANTED, archives)


def _environment() -> tuple[tuple[str, str], ...]:
    return tuple((name, os.environ[name]) for name in ENVIRONMENT if os.environ.get(name))


@lru_cache(maxsize=512)
def _evaluate(
    artifact: Artifact,
    framework: str,
    shape: ExpertShape,
    device_name: str,
    compute_capability: str,
    shared_memory_optin: int,
    max_tokens: int,
    environment: tuple[tuple[str, str], ...],
) -> tuple[tuple[int, str | None, int | None], ...]:
    rule_file = next((n for f in RULE_FILES[framework] for n in sorted(artifact.names) if n.endswith(f)), None)
    if rule_file is None:
        raise RuleUnknown(f"{artifact.file} holds none of {', '.join(RULE_FILES[framework])}")
    source = artifact.read(rule_file)
    if f"def {ENTRY}(" not in source:
        raise RuleUnknown(f"{artifact.file}: {rule_file} has no function {ENTRY}")
    folder = rule_file.rpartition("/")[0]
    # Only files that this shape could resolve to are read: a release has hundreds of others.
    stem = re.compile(rf"/E={shape.experts},N={shape.width}[,.]")
    texts = {n: "{}" for n in artifact.names if n.startswith(f"{folder}/configs/")}
    texts |= {n: artifact.read(n) for n in texts if stem.search(n)}
    texts |= _user_files(dict(environment), stem)
    gated = 2 * shape.width
    request = {
        "source": source,
        "file": rule_file,
        "entry": ENTRY,
        "texts": texts,
        "device_name": device_name,
        "compute_capability": [int(part) for part in compute_capability.split(".")],
        "shared_memory_optin": shared_memory_optin,
        "triton_version": _triton(artifact) if framework == "sglang" else "",
        "environment": dict(environment),
        "max_tokens": max_tokens,
        "shapes": [
            {
                "w1_shape": [shape.experts, gated, shape.hidden],
                "w2_shape": [shape.experts, shape.hidden, shape.width],
                "top_k": shape.top_k,
                "dtype": None,
            }
        ],
    }
    return tuple((tile, path, key) for tile, path, key in _run(request)[0])


def _user_files(environment: dict[str, str], stem: re.Pattern[str]) -> dict[str, str]:
    """Tuned files of a folder that an environment variable of the framework names."""
    texts = {}
    for name in ("VLLM_TUNED_CONFIG_FOLDER", "SGLANG_MOE_CONFIG_DIR"):
        if folder := environment.get(name):
            for path in sorted(Path(folder).rglob("*.json")):
                if stem.search(f"/{path.name}"):
                    texts[str(path)] = path.read_text(encoding="utf-8")
    return texts


def _run(request: dict[str, Any]) -> Sequence[Sequence[tuple[int, str | None, int | None]]]:
    """Evaluate in an isolated interpreter. Raises RuleUnknown when the rule asks for more than it may, or never ends."""
    script = Path(__file__).with_name("sandbox.py")
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(script)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={},
        )
    except subprocess.TimeoutExpired:
        raise RuleUnknown(f"the rule did not end within {TIMEOUT_S} s") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        raise RuleUnknown(f"the rule could not be evaluated: {last[0]} (time or memory limit)")
    answer = json.loads(done.stdout)
    if "unknown" in answer:
        raise RuleUnknown(f"the rule could not be evaluated: {answer['unknown']}")
    answers: Sequence[Sequence[tuple[int, str | None, int | None]]] = answer["answers"]
    return answers


def _triton(artifact: Artifact) -> str:
    """The triton that the release's pinned torch brings. Raises RuleUnknown where neither can be told."""
    for name in sorted(artifact.names):
        if name.endswith(("METADATA", "PKG-INFO")):
            pinned = re.search(r"^Requires-Dist: torch==([\d.]+)", artifact.read(name), re.MULTILINE)
            if pinned:
                return pinned_requirement("torch", pinned[1], "triton")
    raise RuleUnknown(f"{artifact.file} pins no torch, so its triton version and tuned files can't be told")


def _near_misses(artifact: Artifact, shape: ExpertShape, device_name: str, used: set[str]) -> list[str]:
    """Tuned files for this shape and dtype that another device name would have found (names match to the letter)."""
    if used != {"default rule"}:
        return []
    stem = f"E={shape.experts},N={shape.width},device_name="
    mine = device_name.replace(" ", "_")
    others = {
        n.rpartition("/")[2].removeprefix(stem).removesuffix(".json")
        for n in artifact.names
        if n.rpartition("/")[2].startswith(stem) and ",dtype=" not in n and not n.endswith("_down.json")
    }
    near = sorted(o for o in others - {mine} if o.split("_")[1].split("-")[0] == mine.split("_")[1].split("-")[0])
    return [
        f"default rule in force; a tuned file exists for {o}, not for {mine}: names match to the letter" for o in near
    ]
