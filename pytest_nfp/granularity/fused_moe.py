"""BLOCK_SIZE_M of the fused-MoE Triton kernel of vLLM and SGLang, by the release's own rule and tuned files.

`sandbox.py` runs the lifted source of the rule in a separate interpreter. The two frameworks differ in data alone:
which file holds the rule, and which triton version it runs with. SGLang keys its tuned files by triton version.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_nfp import frameworks
from pytest_nfp.granularity import evaluator, kernel_choice
from pytest_nfp.granularity.artifacts import Artifact, pinned_requirement
from pytest_nfp.granularity.maps import UNKNOWN, Granularity, Range, RuleUnknown, from_runs, parameter_runs
from pytest_nfp.granularity.query import ExpertShape, Query
from pytest_nfp.granularity.release import opened

ENTRY = "try_get_optimal_moe_config"
ENVIRONMENT = ("VLLM_TUNED_CONFIG_FOLDER", "VLLM_BATCH_INVARIANT", "SGLANG_MOE_CONFIG_DIR")
DTYPES: dict[str, tuple[str | None, list[int] | None]] = {
    "bf16": (None, None),
    "fp16": (None, None),
    "fp8": ("fp8_w8a8", None),
    "fp8-block": ("fp8_w8a8", [128, 128]),
}
FAR_KEY = 2.0
"""A tuned key is distant if the counts that it serves reach more than this factor beyond it."""


def granularity(query: Query, archives: Path | None = None) -> Granularity:
    """The piecewise map over M = 1..max_count. Raises RuleUnknown with the reason."""
    answer = granularities([query], archives)[0]
    if isinstance(answer, RuleUnknown):
        raise answer
    return answer


def granularities(queries: Sequence[Query], archives: Path | None = None) -> list[Granularity | RuleUnknown]:
    """For each query its map, or the reason why the map is unknown.

    The queries of one release are evaluated together.
    """
    answers: list[Granularity | RuleUnknown | None] = [None] * len(queries)
    questions: dict[Artifact, list[tuple[int, dict[str, Any]]]] = {}
    for i, query in enumerate(queries):
        try:
            artifact = opened(query.framework, query.release, archives)
            questions.setdefault(artifact, []).append((i, _question(artifact, query)))
        except RuleUnknown as reason:
            answers[i] = reason
    read = [i for asked in questions.values() for i, _ in asked]
    choices = dict(zip(read, kernel_choice.kernel_choices([queries[i] for i in read], archives), strict=True))
    for artifact, asked in questions.items():
        for (i, _), points in zip(asked, evaluator.evaluate([q for _, q in asked]), strict=True):
            try:
                answers[i] = (
                    points
                    if isinstance(points, RuleUnknown)
                    else _map(artifact, queries[i], points, choices[i], archives)
                )
            except RuleUnknown as reason:
                answers[i] = reason
    return [a for a in answers if a is not None]


def _map(
    artifact: Artifact, query: Query, runs: evaluator.Runs, choice: kernel_choice.Choice, archives: Path | None
) -> Granularity:
    ranges = from_runs(
        (count, (tile, Path(path).name if path else "default rule", key)) for count, (tile, path, key, _) in runs
    )
    parameters = parameter_runs((count, others) for count, (_, _, _, others) in runs)
    folders = {Path(path).parent.name for _, (_, path, _, _) in runs if path}
    warnings = [*_near_misses(artifact, query, {r.source for r in ranges}), *_key_gaps(ranges)]
    kernel = choice.kernel
    if query.framework == "sglang" and folders and (own_folder := _triton_folder(artifact)) not in folders:
        served = ", ".join(sorted(folders))
        warnings.append(f"same shape, other source folder: {served} serves {own_folder}, which has no such file")
    if kernel == "marlin" and query.framework == "vllm":
        ranges, warnings, parameters = _marlin(query, archives), [], ()
    elif kernel == UNKNOWN:
        warnings.append("which kernel runs is unknown; the tiles are those of the Triton kernel")
    elif kernel != "triton":
        warnings.append(f"the tiles are those of the Triton kernel, which {kernel} does not run on")
    elif query.framework == "vllm" and (own := kernel_choice.own_tile_limit(query, archives)):
        warnings.append(f"M=1..{own}: every (token, expert) pair gets a tile of its own")
    warnings += [f"{name}={value} is in force" for name, value in _environment()]
    return Granularity(
        framework=query.framework,
        release=query.release,
        module="moe",
        dtype=query.dtype,
        device_name=query.device.name,
        ranges=ranges,
        kernel=kernel,
        kernel_reason=choice.reason,
        artifact_file=artifact.file,
        artifact_sha256=artifact.sha256,
        origin=artifact.origin,
        warnings=tuple(warnings),
        parameters=parameters,
        choice=choice.code,
    )


def _marlin(query: Query, archives: Path | None) -> tuple[Range, ...]:
    """The ranges of Marlin's own rule, by the experts of this rank. Raises RuleUnknown."""
    runs = evaluator.evaluate([kernel_choice.marlin_question(query, archives)])[0]
    if isinstance(runs, RuleUnknown):
        raise runs
    return from_runs((count, (tile, "marlin's size rule", None)) for count, (tile, _, _, _) in runs)


def _environment() -> tuple[tuple[str, str], ...]:
    return tuple((name, os.environ[name]) for name in ENVIRONMENT if os.environ.get(name))


def _question(artifact: Artifact, query: Query) -> dict[str, Any]:
    """The question to the sandbox. Raises RuleUnknown if the release has no rule for it."""
    if query.dtype not in DTYPES:
        raise RuleUnknown(f"the fused-MoE rule is read for {', '.join(DTYPES)}, not for {query.dtype}")
    shape = query.shape
    assert isinstance(shape, ExpertShape)
    files = frameworks.known()[query.framework].rule_files
    present = [n for f in files for n in sorted(artifact.names) if n.endswith(f)]
    if not present:
        raise RuleUnknown(f"{artifact.file} holds none of {', '.join(files)}")
    rule_file, source = next(
        ((n, text) for n in present if f"def {ENTRY}(" in (text := artifact.read(n))), (present[0], None)
    )
    if source is None:
        raise RuleUnknown(f"{artifact.file}: {rule_file} has no function {ENTRY}")
    folder = rule_file.rpartition("/")[0]
    environment = dict(_environment())
    dtype, block_shape = DTYPES[query.dtype]
    # Only files that this shape could use are read: a release has hundreds of others. Of those the names count alone.
    stem = re.compile(rf"/E={shape.experts},N={shape.width}[,.]")
    texts = {n: "{}" for n in artifact.names if n.startswith(f"{folder}/configs/")}
    texts |= {n: artifact.read(n) for n in texts if stem.search(n)}
    # The names of other shapes matter only where folders are listed: one file stands for all of a folder.
    texts = {n: t for n, t in texts.items() if stem.search(n)} | {
        f"{folder}/configs/{f}/other.json": "{}"
        for f in {n.split("/configs/")[1].split("/")[0] for n in texts}
        if ".json" not in f
    }
    texts |= _user_files(environment, stem)
    arguments: dict[str, Any] = {
        "w1_shape": [shape.experts, 2 * shape.width, shape.hidden],
        "w2_shape": [shape.experts, shape.hidden, shape.width],
        "top_k": shape.top_k,
        "dtype": dtype,
    }
    if block_shape is not None:
        arguments["block_shape"] = block_shape
    return evaluator.question(
        query,
        artifact.origin,
        source,
        rule_file,
        ENTRY,
        arguments,
        "M",
        ["BLOCK_SIZE_M"],
        texts,
        environment,
        _triton(artifact) if query.framework == "sglang" else "",
    )


def _user_files(environment: dict[str, str], stem: re.Pattern[str]) -> dict[str, str]:
    """Tuned files for this shape from the folders that the framework's environment variables name."""
    texts = {}
    for name in ("VLLM_TUNED_CONFIG_FOLDER", "SGLANG_MOE_CONFIG_DIR"):
        if folder := environment.get(name):
            for path in sorted(Path(folder).rglob("*.json")):
                if stem.search(f"/{path.name}"):
                    texts[str(path)] = path.read_text(encoding="utf-8")
    return texts


@lru_cache(maxsize=128)
def _triton(artifact: Artifact) -> str:
    """The triton version that the release's pinned torch requires. Raises RuleUnknown if the release pins no torch."""
    for name in sorted(artifact.names):
        if name.endswith(("METADATA", "PKG-INFO")):
            pinned = re.search(r"^Requires-Dist: torch\s*\(?==([\d.]+)", artifact.read(name), re.MULTILINE)
            if pinned:
                return pinned_requirement("torch", pinned[1], "triton")
    raise RuleUnknown(f"{artifact.file} pins no torch, so its triton version and tuned files can't be told")


def _triton_folder(artifact: Artifact) -> str:
    return f"triton_{_triton(artifact).replace('.', '_')}"


def _key_gaps(ranges: Sequence[Range]) -> list[str]:
    """Warnings about counts that a distant tuned key serves: the nearest key serves any M."""
    served: dict[tuple[str, int], tuple[int, int]] = {}
    for r in ranges:
        if r.key is not None:
            first, last = served.get((r.source, r.key), (r.first, r.last))
            served[r.source, r.key] = (min(first, r.first), max(last, r.last))
    return [
        f"M={first}..{last} served by key {key} of {source}"
        for (source, key), (first, last) in served.items()
        if first * FAR_KEY < key or (last > key * FAR_KEY and last != ranges[-1].last)
    ]


def _near_misses(artifact: Artifact, query: Query, used: set[str]) -> list[str]:
    """Warnings about tuned files for this shape and dtype under another device name.

    The rule does not find them: names must match to the letter.
    """
    if used != {"default rule"}:
        return []
    shape = query.shape
    assert isinstance(shape, ExpertShape)
    dtype, block_shape = DTYPES[query.dtype]
    stem = f"E={shape.experts},N={shape.width},device_name="
    tail = (f",dtype={dtype}" if dtype else "") + (f",block_shape={block_shape}" if block_shape else "") + ".json"
    own_name = query.device.name.replace(" ", "_")
    others = set()
    for name in artifact.names:
        file = name.rpartition("/")[2].replace(", ", ",")
        if file.startswith(stem) and file.endswith(tail.replace(", ", ",")):
            device = file.removeprefix(stem).removesuffix(tail.replace(", ", ","))
            if "," not in device and not device.endswith("_down"):
                others.add(device)

    def family(device: str) -> str:
        return device.removeprefix("NVIDIA_").removeprefix("GeForce_").split("-")[0].split("_")[0]

    near = sorted(o for o in others - {own_name} if _related(family(o), family(own_name)))
    return [
        f"default rule in force; a tuned file exists for {o}, not for {own_name}: names match to the letter"
        for o in near
    ]


RELATED = ({"H100", "H800"}, {"A100", "A800"})
"""Device families of which people expect that one's tuned files serve the other."""


def _related(a: str, b: str) -> bool:
    return a == b or any({a, b} <= group for group in RELATED)
