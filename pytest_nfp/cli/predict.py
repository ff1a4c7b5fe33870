"""nfp predict: N_max of a model on a GPU, by both predictors."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from pytest_nfp import calibrated, catalog
from pytest_nfp.cases import ALIASES, BYTES_PER_ELEMENT, MLA, Backend, Case, Module, expand, frameworks, parse_backend
from pytest_nfp.catalog import Model, Moe, UnknownName
from pytest_nfp.cli import options
from pytest_nfp.cli.options import add_artifacts, add_parallel, positive, release
from pytest_nfp.granularity import Granularity, artifacts, granularity_of
from pytest_nfp.granularity.query import MAX_COUNT
from pytest_nfp.parallel import Parallel, on_rank, parse_parallel
from pytest_nfp.predict import (
    edge_positions,
    gemm_latency,
    grid,
    last_position,
    model_modules,
    module_latency,
    predict_curve,
    predict_model,
)
from pytest_nfp.principle.boundary import bracketed
from pytest_nfp.principle.routing import Replay
from pytest_nfp.records import finite
from pytest_nfp.verdict import term_in_words

OWN_ATTENTION = {"vllm": "flash-attn", "sglang": "flashinfer-python"}


CURVE = {
    "experts": "with --curve: experts, with --expert-width --hidden --top-k instead of --model",
    "expert-width": "with --curve: intermediate width of an expert, before it is cut over ranks",
    "hidden": "with --curve: hidden size",
    "gemm-n": "with --curve: columns of a dense GEMM, with --gemm-k instead of --model",
    "gemm-k": "with --curve: inner dimension of a dense GEMM",
    "tp": "ranks of tensor parallelism, the same as --parallel tpN",
    "end": "with --curve: last N (default 1024)",
}


def add(commands: Any) -> None:
    """Declare the command."""
    predict = commands.add_parser(
        "predict",
        help="N_max of a model on a GPU, by both predictors",
        description="Predict N_max: idle compute, the principle with its terms and limiting module, and the tile roofline.",
        epilog="example: nfp predict --gpu h20 --model llada-2.1-mini --backend sglang==0.5.9 --attention flashinfer==0.5.3",
    )
    predict.add_argument("--gpu", required=True, help="catalog name, such as h20")
    predict.add_argument("--model", help="catalog name, or path of a Hugging Face config.json")
    predict.add_argument(
        "--backend", help="MoE framework and release, such as vllm==0.33.0; may be left out for dense models"
    )
    predict.add_argument("--release", help="the release alone, beside --backend FRAMEWORK; or the same as --backend")
    predict.add_argument("--attention", help="attention framework and release, such as flash-attn==2.8.3")
    predict.add_argument("--batch", type=positive, default=1, help="requests in the forward (default 1)")
    predict.add_argument("--context", type=positive, default=4096, help="cached tokens per request (default 4096)")
    predict.add_argument("--top-k", type=positive, help="experts per token (default: the model's)")
    predict.add_argument(
        "--routing",
        default="balanced",
        help="balanced (default), skewed; with --curve also uniform, power-law-A (such as power-law-1.2), and"
        " trace:FILE, a CSV with a line `token,expert,expert,...` for each token",
    )
    predict.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp8", "fp8-block", "int4"), default="bf16", help="weights (default bf16)"
    )
    predict.add_argument("--tolerance", type=float, default=0.20, help="epsilon (default 0.2)")
    predict.add_argument(
        "--curve",
        action="store_true",
        help="the predicted T(N) of the MoE layer, or of a shape by hand, with its interval",
    )
    for name in ("experts", "expert-width", "hidden", "gemm-n", "gemm-k", "tp", "end"):
        predict.add_argument(f"--{name}", type=positive, help=CURVE[name])
    predict.add_argument(
        "--kernel",
        help="with --curve: a calibrated kernel, such as triton, by its name here or in recordings (default: the one that"
        " the release runs)",
    )
    add_parallel(predict)
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


def _is_not_described(model: Model, given: argparse.Namespace) -> bool:
    """MLA, where no framework that has it is named: engines run kernels of their own for it."""
    return model.is_latent and not given.attention


def _cases(given: argparse.Namespace) -> list[Case]:
    """One case for each module of the model, at the workload that was asked for."""
    model = on_rank(catalog.model(given.model), _parallel(given))
    gpu = catalog.gpu(given.gpu).name
    top_k = given.top_k or (model.moe.top_k if model.moe else None)
    if model.moe and top_k and top_k > model.moe.experts:
        raise UnknownName(f"--top-k {top_k}: {model.name} has {model.moe.experts} experts")
    if model.moe and not given.backend:
        raise UnknownName(f"{model.name} has experts: give their framework with --backend FRAMEWORK==RELEASE")
    cases = []
    for name in model_modules(model):
        if name == "attention" and _is_not_described(model, given):
            continue
        module: Module = name  # type: ignore[assignment]  # model_modules names modules
        if module == "attention":
            backend = _attention(given)
        else:
            backend = release(given.backend, "--backend") if given.backend else Backend("torch", "0")
        found = list(expand(gpu, backend, module, model.model_copy(update={"context": (given.context,)})))
        if not found:
            if backend.framework in frameworks(module, gpu):
                raise UnknownName(f"{backend.framework}'s MLA is not described: of {model.name} {', '.join(MLA)} is")
            raise UnknownName(f"{backend.framework} is no {module} backend")
        case = replace(found[0], batch=given.batch, dtype=given.dtype)
        if module == "moe":
            routing = options.routing(given.routing)
            if routing not in ("balanced", "skewed"):
                raise UnknownName(f"the closed form knows balanced and skewed routing: give --curve for {routing}")
            case = replace(case, top_k=top_k, routing=routing)
        cases.append(case)
    return cases


def run(given: argparse.Namespace) -> int:
    """Print the prediction. Raises UnknownName, RuleUnknown."""
    if given.release:
        given.backend = f"{given.backend}=={given.release}" if given.backend else given.release
    if given.curve:
        return _curve(given)
    if given.model is None:
        raise UnknownName("give --model, or --curve with a shape by hand")
    cases = _cases(given)
    gpu = catalog.gpu(given.gpu)
    pairs: list[tuple[Case, Granularity | None]] = [
        (case, None if case.module == "dense" else granularity_of(case, given.artifacts)) for case in cases
    ]
    modules = [(case, g, calibrated.figures_of(case, g)) for case, g in pairs]
    predicted = predict_model(modules, given.tolerance)
    terms, roofline = predicted.principle, predicted.tile_roofline
    assert terms is not None and roofline is not None and predicted.n_idle is not None
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
            "interval": list(roofline.boundary.n_max_interval) if predicted.is_interval else None,
            "basis": predicted.basis,
        },
        "not_described": [] if any(case.module == "attention" for case in cases) else ["attention"],
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
    said = term_in_words(predicted.as_dict()["tile_roofline"])
    print(f"  tile roofline    N_max {said}, limited by {roofline.limiting} ({predicted.basis})")
    for module in answer["not_described"]:
        print(f"  {module} of this model is not described: the bound is that of its other modules, not of the model")
    for module, g in answer["granularity"].items():
        ranges = ", ".join(f"{first}..{last}: {tile}" for first, last, tile in g["tiles"])
        print(f"  {module} tiles: {ranges} rows ({g['origin']}: {g['artifact']})")
        for warning in g["warnings"]:
            print(f"    {warning}")
    return 0


def _curve(given: argparse.Namespace) -> int:
    """The predicted T(N) of one layer."""
    gpu = catalog.gpu(given.gpu)
    backend = release(given.backend, "--backend") if given.backend else None
    if given.kernel:
        given.kernel = calibrated.kernel_named(given.kernel)
        if (given.kernel == "gemm") != bool(given.gemm_n or given.gemm_k):
            raise UnknownName(
                f"--kernel {given.kernel}: gemm is the kernel of --gemm-n and --gemm-k, and of them alone"
            )
    warnings: tuple[str, ...] = ()
    edges: list[int] = []
    last = MAX_COUNT
    if given.gemm_n or given.gemm_k:
        if not (given.gemm_n and given.gemm_k):
            raise UnknownName("a GEMM needs both --gemm-n and --gemm-k")
        shape = (given.gemm_n, given.gemm_k)
        on = calibrated.figures(gpu.name, backend.framework if backend else "vllm", given.kernel or "gemm", given.dtype)
        base = 1
        latency = lambda n: gemm_latency(n * given.batch, *shape, BYTES_PER_ELEMENT[given.dtype], on)  # noqa: E731
    else:
        if backend is None:
            raise UnknownName("the tiles of experts are those of a framework: give --backend FRAMEWORK==RELEASE")
        case = _moe_case(given, gpu.name, backend)
        kernel = given.kernel or ("marlin" if given.dtype == "int4" else None)
        granularity = None
        if kernel in (None, "triton"):
            # The tile rule is that of the Triton kernel; the others are calibrated without one.
            granularity = granularity_of(case, given.artifacts)
            warnings = granularity.warnings
        kernel = kernel or calibrated.kernel_of(case, granularity)
        on = calibrated.figures(gpu.name, backend.framework, kernel, given.dtype)
        on = calibrated.for_routing(on, case.routing)
        base, edges = case.baseline_positions, edge_positions(case, granularity)
        latency = module_latency(case, on, granularity)
        last = last_position(case)
    end = min(given.end or 1024, last)
    found = predict_curve(latency, [*grid(base, edges, end), end], base, given.tolerance, on)
    basis = on.basis
    if on.basis == "datasheet":
        basis = f"datasheet peaks: no calibration of this kernel for {given.dtype} on {gpu.name}"
    answer = {
        "points": [[n, *(None if v is None else round(v, 3) for v in rest)] for n, *rest in found.latencies],
        "n_max": found.boundary.n_max,
        "n_max_interval": list(found.boundary.n_max_interval),
        "n_first_exit": found.boundary.n_first_exit,
        "baseline_positions": base,
        "kernel": on.kernel or given.kernel,
        "calibration": basis,
        "warnings": list(warnings),
    }
    if given.json:
        print(json.dumps(answer, indent=1))
        return 0
    print(f"{gpu.title}, N0={base}: N_max {found.boundary.n_max}, interval {bracketed(found.boundary.n_max_interval)}")
    print(f"  {basis}")
    print(f"  {'N':>6}  {'T us':>10}  {'low':>10}  {'high':>10}  T/T(N0)")
    first = next(t for n, t, *_ in found.latencies if n == base)
    for n, t, below, above in found.latencies:
        interval = ("", "") if below is None or above is None else (f"{below:.1f}", f"{above:.1f}")
        print(f"  {n:>6}  {t:>10.1f}  {interval[0]:>10}  {interval[1]:>10}  {t / first:.3f}")
    for warning in warnings:
        print(f"  {warning}")
    return 0


def _parallel(given: argparse.Namespace) -> Parallel:
    return parse_parallel(f"tp{given.tp}" if given.tp else given.parallel)


def _moe_case(given: argparse.Namespace, gpu: str, backend: Backend) -> Case:
    """The layer as one rank holds it: of a model, or of a shape given by hand."""
    by_hand = (given.experts, given.expert_width, given.hidden, given.top_k)
    if given.model:
        model = catalog.model(given.model)
    elif all(by_hand):
        moe = Moe(experts=given.experts, width=given.expert_width, top_k=given.top_k)
        model = Model(name="shape", hidden=given.hidden, moe=moe, source="given by hand")
    else:
        raise UnknownName("the shape is incomplete: give --model, or --experts --expert-width --hidden --top-k")
    model = on_rank(model, _parallel(given))
    if model.moe is None:
        raise UnknownName(f"{model.name} has no experts: give a GEMM with --gemm-n and --gemm-k")
    case = next(expand(gpu, backend, "moe", model), None)
    if case is None:
        raise UnknownName(f"{backend.framework} is no MoE backend")
    top_k, routing = given.top_k or model.moe.top_k, options.routing(given.routing)
    if top_k > model.moe.experts:
        raise UnknownName(f"--top-k {top_k}: {model.name} has {model.moe.experts} experts")
    if isinstance(routing, Replay):
        try:
            routing.check(model.moe.experts, top_k)
        except ValueError as error:
            raise UnknownName(f"--routing {given.routing}: {error}") from None
    return replace(case, batch=given.batch, dtype=given.dtype, top_k=top_k, routing=routing)
