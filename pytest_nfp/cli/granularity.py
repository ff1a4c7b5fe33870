"""nfp granularity FRAMEWORK==RELEASE: the piecewise map of one release, device and shape."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_nfp import catalog, frameworks
from pytest_nfp.catalog import UnknownName
from pytest_nfp.catalog.device_names import device_by_name
from pytest_nfp.catalog.parallel import on_rank, parse_parallel
from pytest_nfp.cli import options
from pytest_nfp.cli.workload import refuse
from pytest_nfp.compare.upgrades import rule_module
from pytest_nfp.granularity import (
    DeviceFacts,
    ExpertShape,
    Granularity,
    HeadShape,
    Query,
    device_facts,
    read_or_shipped,
    require_path,
)
from pytest_nfp.granularity.query import MAX_COUNT

SHAPE = {
    "experts": "shape by hand: experts of one rank",
    "expert-width": "shape by hand: intermediate width of an expert on one rank",
    "value-dim": "width of a value where it is not the head dimension (MLA: 512)",
}


def add(commands: Any) -> None:
    """Declare the command."""
    p = commands.add_parser(
        "granularity",
        help="which tile a release runs at which token count",
        description="The piecewise map of a release's own rule: tiles by token rows (MoE) or query rows (attention).",
        epilog="example: nfp granularity vllm==0.33.0 --gpu h20 --model llada-2.1-mini",
    )
    p.add_argument("backend", metavar="FRAMEWORK==RELEASE", help=f"one of {', '.join(frameworks.with_rule())}")
    device = p.add_mutually_exclusive_group(required=True)
    device.add_argument("--gpu", help="catalog name, such as h20")
    device.add_argument("--device-name", help="name as the driver reports it, such as 'NVIDIA H20'")
    p.add_argument("--model", help="catalog name, or path of a Hugging Face config.json")
    for name in ("experts", "expert-width", "hidden", "top-k", "heads", "kv-heads", "head-dim", "value-dim"):
        p.add_argument(f"--{name}", type=options.positive, help=SHAPE.get(name, "shape by hand"))
    options.add_parallel(p)
    options.add_dtype(p)
    p.add_argument("--mode", choices=("eager", "graph"), default="eager", help="CUDA graphs change FlashInfer's choice")
    p.add_argument("--batch", type=options.positive, default=1, help="requests in the forward (default 1)")
    p.add_argument(
        "--max-tokens", type=options.positive, default=MAX_COUNT, help=f"end of the map (default {MAX_COUNT})"
    )
    p.add_argument("--source", type=Path, help="root of a flash-attention source tree (flash-attn-3)")
    options.add_artifacts(p)
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print the map. Raises UnknownName, RuleUnknown."""
    query = _query(given)
    require_path(query)
    granularity = read_or_shipped(query, given.artifacts, given.source)
    if given.json:
        print(json.dumps(options.with_walls(as_json(granularity)), indent=1))
    else:
        print("\n".join(in_words(granularity)))
    return 0


def _query(given: argparse.Namespace) -> Query:
    framework, _, release = given.backend.partition("==")
    if framework.lower() in ("flash-attn-3", "flash-attention-3") and not release:
        # No index has this framework: its rule is recorded, or read from a source tree.
        given.backend = "flash-attn-3==0"
    backend = options.existing(options.release(given.backend), given.artifacts)
    rule_module(backend.framework)
    return Query(
        backend.framework,
        backend.release,
        _device(given),
        _shape(given, rule_module(backend.framework) == "moe"),
        given.dtype,
        given.mode,
        given.batch,
        given.max_tokens,
        catalog.model(given.model).architecture if given.model and backend.framework == "sglang" else "",
    )


def _device(given: argparse.Namespace) -> DeviceFacts:
    if given.gpu:
        return device_facts(catalog.gpu(given.gpu))
    for gpu in catalog.gpus():
        if given.device_name in gpu.driver_names:
            return replace(device_facts(gpu), name=given.device_name)
    # The catalog lacks this name, but a tuned file may be named by it.
    # What is known of the device comes from the vendor's naming.
    named = device_by_name(given.device_name)
    if named is None:
        return DeviceFacts(given.device_name)
    return DeviceFacts(given.device_name, named.compute_capability, named.shared_memory_optin, named.architecture)


def _shape(given: argparse.Namespace, is_moe: bool) -> ExpertShape | HeadShape:
    parallel = parse_parallel(given.parallel)
    model = on_rank(catalog.model(given.model), parallel) if given.model else None
    part = (model.moe if is_moe else model.attention) if model else None
    if is_moe:
        refuse(given, ["heads", "kv-heads", "head-dim", "value-dim", "source"], "for experts")
    else:
        refuse(given, ["experts", "expert-width", "hidden", "top-k"], "for attention")
    if model and part is None:
        raise UnknownName(f"{model.name} has no {'experts' if is_moe else 'attention that is described'}")
    if is_moe:
        moe = model.moe if model else None
        values = {
            "experts": given.experts or (moe.local_experts if moe else None),
            "width": given.expert_width or (moe.width if moe else None),
            "hidden": given.hidden or (model.hidden if model else None),
            "top_k": given.top_k or (moe.top_k if moe else None),
        }
        _complete(values, "--experts --expert-width --hidden --top-k")
        expert_parallel = parallel.ranks if parallel.kind == "ep" else 1
        own = {"activation": moe.activation, "gated": moe.matrices == 3, "bias": moe.bias} if moe else {}
        return ExpertShape(**values, expert_parallel=expert_parallel, **own)  # type: ignore[arg-type]  # _complete leaves no None
    attention = model.attention if model else None
    heads = given.heads or (attention.heads if attention else None)
    values = {
        "heads": heads,
        "kv_heads": given.kv_heads or (attention.kv_heads if attention else heads),
        "head_dim": given.head_dim or (attention.head_dim if attention else None),
    }
    _complete(values, "--heads --kv-heads --head-dim")
    shape = HeadShape(**values, value_dim=given.value_dim)  # type: ignore[arg-type]  # _complete leaves no None
    if shape.heads % shape.kv_heads:
        raise UnknownName(f"--heads {shape.heads} is no multiple of --kv-heads {shape.kv_heads}")
    return shape


def _complete(values: dict[str, int | None], names: str) -> None:
    if missing := [n for n, v in values.items() if v is None]:
        raise UnknownName(f"the shape lacks {', '.join(missing)}: give --model, or {names}")


def as_json(g: Granularity) -> dict[str, Any]:
    """The map as JSON. Its ranges are sorted, without gaps, and merged."""
    return {
        "framework": g.framework,
        "release": g.release,
        "module": g.module,
        "dtype": g.dtype,
        "device_name": g.device_name,
        "counts": counts_in_words(g),
        "ranges": [
            {"first": r.first, "last": r.last, "tile": r.tile, "source": r.source, "key": r.key} for r in g.ranges
        ],
        "parameters": [{"first": a, "last": b, "values": text} for a, b, text in g.parameters],
        "kernel": {"name": g.kernel, "reason": g.kernel_reason},
        "artifact": {"file": g.artifact_file, "sha256": g.artifact_sha256, "origin": g.origin},
        "warnings": list(g.warnings),
    }


def counts_in_words(g: Granularity) -> str:
    """The unit of `first` and `last`."""
    if g.module == "moe":
        return "tokens"
    return "packed query rows" if g.packed else "query rows"


def in_words(g: Granularity) -> list[str]:
    """The map as lines of text."""
    lines = [
        f"{g.framework}=={g.release} {g.module} {g.dtype} on {g.device_name}",
        f"  kernel   {g.kernel}: {g.kernel_reason}",
    ]
    lines.append(f"  rule     {g.origin}: {g.artifact_file} {g.artifact_sha256[:12]}".rstrip())
    lines.append(f"  {counts_in_words(g)}")
    width = len(str(g.ranges[-1].last))
    for r in g.ranges:
        key = "" if r.key is None else f", key {r.key}"
        lines.append(f"    {r.first:>{width}}..{r.last:<{width}}  {r.tile:>4} rows  {r.source}{key}")
    return [*lines, *(f"  warning  {w}" for w in g.warnings)]
