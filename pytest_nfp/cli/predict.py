"""nfp predict: N_max of a model on a GPU, by both predictors."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from pytest_nfp import catalog
from pytest_nfp.cases import ALIASES, Backend, Case, Module, expand, parse_backend
from pytest_nfp.catalog import UnknownName
from pytest_nfp.cli.options import add_artifacts, positive, release
from pytest_nfp.granularity import Granularity, artifacts, granularity_of
from pytest_nfp.predict import datasheet, model_modules, predict_model
from pytest_nfp.records import finite

OWN_ATTENTION = {"vllm": "flash-attn", "sglang": "flashinfer-python"}


def add(commands: Any) -> None:
    """Declare the command."""
    predict = commands.add_parser(
        "predict",
        help="N_max of a model on a GPU, by both predictors",
        description="Predict N_max: idle compute, the principle with its terms and limiting module, and the tile roofline.",
        epilog="example: nfp predict --gpu h20 --model llada-2.1-mini --backend sglang==0.5.9 --attention flashinfer==0.5.3",
    )
    predict.add_argument("--gpu", required=True, help="catalog name, such as h20")
    predict.add_argument("--model", required=True, help="catalog name, or path of a Hugging Face config.json")
    predict.add_argument(
        "--backend", help="MoE framework and release, such as vllm==0.33.0; may be left out for dense models"
    )
    predict.add_argument("--attention", help="attention framework and release, such as flash-attn==2.8.3")
    predict.add_argument("--batch", type=positive, default=1, help="requests in the forward (default 1)")
    predict.add_argument("--context", type=positive, default=4096, help="cached tokens per request (default 4096)")
    predict.add_argument("--top-k", type=positive, help="experts per token (default: the model's)")
    predict.add_argument(
        "--routing", choices=("balanced", "skewed"), default="balanced", help="expert load (default balanced)"
    )
    predict.add_argument(
        "--dtype", choices=("bf16", "fp16"), default="bf16", help="weights and activations (default bf16)"
    )
    predict.add_argument("--tolerance", type=float, default=0.20, help="epsilon (default 0.2)")
    add_artifacts(predict)
    predict.add_argument("--json", action="store_true", help="print JSON")
    predict.set_defaults(run=run)


def _attention(given: argparse.Namespace) -> Backend:
    """--attention, else the framework's own attention package where it is installed."""
    if given.attention:
        return release(given.attention, "--attention")
    framework = parse_backend(given.backend).framework if given.backend else None
    own = OWN_ATTENTION.get(framework or "")
    installed = artifacts.installed_release(own) if own else None
    if own is None or installed is None:
        known = ", ".join(sorted(set(ALIASES.values())))
        raise UnknownName(
            "which attention kernels run can't be told here: give --attention FRAMEWORK==RELEASE"
            f" (one of {known}), such as --attention flash-attn==2.8.3"
        )
    return Backend(own, installed)


def _cases(given: argparse.Namespace) -> list[Case]:
    """One case for each module of the model, at the workload that was asked for."""
    model = catalog.model(given.model)
    gpu = catalog.gpu(given.gpu).name
    top_k = given.top_k or (model.moe.top_k if model.moe else None)
    if model.moe and top_k and top_k > model.moe.experts:
        raise UnknownName(f"--top-k {top_k}: {model.name} has {model.moe.experts} experts")
    if model.moe and not given.backend:
        raise UnknownName(f"{model.name} has experts: give their framework with --backend FRAMEWORK==RELEASE")
    cases = []
    for name in model_modules(model):
        module: Module = name  # type: ignore[assignment]  # model_modules names modules
        if module == "attention":
            backend = _attention(given)
        else:
            backend = release(given.backend, "--backend") if given.backend else Backend("torch", "0")
        found = list(expand(gpu, backend, module, model.model_copy(update={"context": (given.context,)})))
        if not found:
            raise UnknownName(f"{backend.framework} is no {module} backend")
        case = replace(found[0], batch=given.batch, dtype=given.dtype)
        if module == "moe":
            case = replace(case, top_k=top_k, routing=given.routing)
        cases.append(case)
    return cases


def run(given: argparse.Namespace) -> int:
    """Print the prediction. Raises UnknownName, RuleUnknown."""
    cases = _cases(given)
    pairs: list[tuple[Case, Granularity | None]] = [
        (case, None if case.module == "dense" else granularity_of(case, given.artifacts)) for case in cases
    ]
    gpu = catalog.gpu(given.gpu)
    predicted = predict_model(pairs, datasheet(gpu.peak_flops, gpu.bandwidth), given.tolerance)
    terms, roofline = predicted.principle, predicted.tile_roofline
    assert roofline is not None and predicted.n_idle is not None
    answer: dict[str, Any] = {
        "gpu": gpu.name,
        "model": cases[0].subject.name,
        "modules": {case.module: str(case.backend) for case, _ in pairs if case.backend.framework != "torch"},
        "batch": given.batch,
        "context": given.context,
        "baseline_positions": max(case.baseline_positions for case in cases),
        "n_idle": finite(predicted.n_idle),
        "terms": {"dense": terms.dense, "moe": terms.moe, "attention": terms.attention, "branch": terms.branch},
        "n_max": terms.n_max,
        "limiting": terms.limiting,
        "tile_roofline": {
            "n_max": roofline.n_max,
            "limiting": roofline.limiting,
            "basis": predicted.basis,
        },
        "not_described": [] if cases[0].subject.attention else ["attention"],
        "granularity": {
            g.module: {
                "tiles": g.tiles(),
                "artifact": g.artifact_file,
                "origin": g.origin,
                "warnings": list(g.warnings),
            }
            for _, g in pairs
            if g is not None
        },
    }
    if given.json:
        print(json.dumps(answer, indent=1))
        return 0
    idle = "unbounded" if answer["n_idle"] is None else f"{answer['n_idle']:.1f}"
    print(f"{answer['model']} on {gpu.title}, b={given.batch}, L={given.context}, N0={answer['baseline_positions']}")
    print(f"  idle compute     N_idle {idle}")
    print(f"  principle        N_max {terms.n_max}, limited by {terms.limiting}")
    for name, value in answer["terms"].items():
        if value is not None:
            print(f"    {name:<14} {value}")
    print(f"  tile roofline    N_max {roofline.n_max}, limited by {roofline.limiting} ({predicted.basis})")
    for module in answer["not_described"]:
        print(f"  {module} of this model is not described: the bound is that of its other modules, not of the model")
    for module, g in answer["granularity"].items():
        ranges = ", ".join(f"{first}..{last}: {tile}" for first, last, tile in g["tiles"])
        print(f"  {module} tiles: {ranges} rows ({g['origin']}: {g['artifact']})")
        for warning in g["warnings"]:
            print(f"    {warning}")
    return 0
