"""nfp predict: N_max of a model on a GPU, by both predictors."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from pytest_nfp import catalog, frameworks
from pytest_nfp.cases import BYTES_PER_ELEMENT, Backend, Case, expand
from pytest_nfp.catalog import Model, Moe, UnknownName
from pytest_nfp.catalog.parallel import on_rank, parse_parallel
from pytest_nfp.cli import options, workload
from pytest_nfp.cli.options import positive, release
from pytest_nfp.files import finite
from pytest_nfp.granularity import granularity_of
from pytest_nfp.granularity.query import MAX_COUNT
from pytest_nfp.predict import (
    calibrations,
    edge_positions,
    gemm_latency,
    grid,
    last_position,
    module_latency,
    predict_curve,
    whole_models,
)
from pytest_nfp.principle.boundary import bracketed
from pytest_nfp.principle.routing import Replay
from pytest_nfp.verdict import term_in_words

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
    workload.add(predict, is_required=False)
    predict.add_argument("--release", help="the release alone, beside --backend FRAMEWORK; or the same as --backend")
    predict.add_argument("--batch", type=positive, default=1, help="requests in the forward (default 1)")
    predict.add_argument("--context", type=positive, help="cached tokens per request (default 4096)")
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
    predict.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print the prediction. Raises UnknownName, RuleUnknown."""
    if given.release:
        given.backend = f"{given.backend}=={given.release}" if given.backend else given.release
    if given.gpu is None:
        raise UnknownName("give --gpu, a catalog name such as h20")
    if given.tp:
        workload.refuse(given, ["parallel"], "beside --tp, which is the same")
        given.parallel, given.tp = f"tp{given.tp}", None
    if given.curve:
        workload.refuse(given, ["attention", "context"], "with --curve, which is the curve of one module")
        if given.gemm_n or given.gemm_k:
            workload.refuse(given, OF_EXPERTS, "for a GEMM, which --gemm-n and --gemm-k give whole")
        elif given.model:
            workload.refuse(given, ["experts", "expert-width", "hidden"], "beside --model")
        return _curve(given)
    workload.refuse(given, [*CURVE, "kernel"], "without --curve")
    if given.model is None:
        raise UnknownName("give --model, or --curve with a shape by hand")
    model, on = workload.read(given, given.batch, given.context or workload.CONTEXT)
    if on.attention is None and model.attention is not None and not model.is_latent:
        known = ", ".join(n for n, module in frameworks.with_rule().items() if module == "attention")
        raise UnknownName(
            "which attention kernels run can't be told here: give --attention FRAMEWORK==RELEASE"
            f" (one of {known}), such as --attention flash-attn==2.8.3"
        )
    composed = whole_models.compose(model, on, given.artifacts)
    predicted = composed.predict(workload.value(given, "tolerance"))
    terms, roofline = predicted.principle, predicted.tile_roofline
    assert roofline is not None
    notes = workload.notes(model, on, composed)
    maps = {k.granularity.module: k.granularity for k in composed.known if k.granularity is not None}
    answer: dict[str, Any] = {
        "gpu": on.gpu,
        "model": model.name,
        "modules": {k.part.case.module: str(k.part.case.backend) for k in composed.known if k.granularity is not None},
        "batch": on.batch,
        "context": on.context,
        "baseline_positions": composed.base,
        "n_idle": finite(predicted.n_idle),
        "terms": {n: getattr(terms, n) for n in TERMS} if terms else None,
        "n_max": terms.n_max if terms else None,
        "limiting": terms.limiting if terms else None,
        "near_free_at_baseline": terms.is_near_free if terms else None,
        "bound": terms.bound if terms else None,
        "tile_roofline": {
            "n_max": roofline.n_max,
            "limiting": roofline.limiting,
            "interval": list(roofline.boundary.n_max_interval) if predicted.is_interval else None,
            "basis": predicted.basis,
        },
        "parts": list(composed.latencies),
        "not_described": list(composed.missing),
        "notes": notes,
        "granularity": {
            module: {
                "kernel": g.kernel,
                "tiles": g.tiles(),
                "artifact": g.artifact_file,
                "origin": g.origin,
                "warnings": list(g.warnings),
            }
            for module, g in maps.items()
        },
    }
    if given.json:
        print(json.dumps(options.with_walls(answer), indent=1))
        return 0
    idle = "unbounded" if answer["n_idle"] is None else f"{answer['n_idle']:.1f}"
    print(f"{model.name} on {catalog.gpu(on.gpu).title}, b={on.batch}, L={on.context}, N0={composed.base}")
    print(f"  idle compute     N_idle {idle}")
    if terms is None:
        print(f"  principle        none: the closed form knows balanced and skewed routing, not {on.routing}")
    else:
        said = term_in_words(predicted.as_dict()["principle"])
        print(f"  principle        N_max {said}, limited by {terms.limiting}")
        for name in TERMS:
            if (term := getattr(terms, name)) is not None:
                print(f"    {name:<14} {term}")
    said = term_in_words(predicted.as_dict()["tile_roofline"])
    print(f"  tile roofline    N_max {said}, limited by {roofline.limiting} ({predicted.basis})")
    for note in notes:
        print(f"  {note}")
    for module, g in maps.items():
        ranges = ", ".join(f"{first}..{last}: {tile}" for first, last, tile in g.tiles())
        print(f"  {module} tiles: {ranges} rows ({g.origin}: {g.artifact_file})")
        for warning in g.warnings:
            print(f"    {warning}")
    return 0


OF_EXPERTS = ("model", "experts", "expert-width", "hidden", "top-k", "routing", "parallel", "artifacts")
"""Options of a layer of experts."""
TERMS = ("dense", "moe", "attention", "branch")


def _curve(given: argparse.Namespace) -> int:
    """The predicted T(N) of one layer."""
    gpu = catalog.gpu(given.gpu)
    backend = release(given.backend, "--backend") if given.backend else None
    if given.kernel:
        given.kernel = calibrations.kernel_named(given.kernel)
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
        on = calibrations.figures(
            gpu.name, backend.framework if backend else "vllm", given.kernel or "gemm", workload.value(given, "dtype")
        )
        base = 1
        latency = lambda n: gemm_latency(n * given.batch, *shape, BYTES_PER_ELEMENT[workload.value(given, "dtype")], on)  # noqa: E731
    else:
        if backend is None:
            raise UnknownName("the tiles of experts are those of a framework: give --backend FRAMEWORK==RELEASE")
        case = _moe_case(given, gpu.name, backend)
        kernel = given.kernel or ("marlin" if workload.value(given, "dtype") == "int4" else None)
        granularity = None
        if kernel in (None, "triton"):
            # The tile rule is that of the Triton kernel; the others are calibrated without one.
            granularity = granularity_of(case, given.artifacts)
            warnings = granularity.warnings
        kernel = kernel or calibrations.kernel_of(case, granularity)
        on = calibrations.figures(gpu.name, backend.framework, kernel, workload.value(given, "dtype"))
        on = calibrations.for_routing(on, case.routing)
        base, edges = case.baseline_positions, edge_positions(case, granularity)
        latency = module_latency(case, on, granularity)
        last = last_position(case)
    end = min(given.end or 1024, last)
    found = predict_curve(latency, [*grid(base, edges, end), end], base, workload.value(given, "tolerance"), on)
    basis = on.basis
    if on.basis == "datasheet":
        basis = f"datasheet peaks: no calibration of this kernel for {workload.value(given, 'dtype')} on {gpu.name}"
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
    model = on_rank(model, parse_parallel(workload.value(given, "parallel")))
    if model.moe is None:
        raise UnknownName(f"{model.name} has no experts: give a GEMM with --gemm-n and --gemm-k")
    case = next(expand(gpu, backend, "moe", model), None)
    if case is None:
        raise UnknownName(f"{backend.framework} is no MoE backend")
    top_k, routing = given.top_k or model.moe.top_k, options.routing(workload.value(given, "routing"))
    if top_k > model.moe.experts:
        raise UnknownName(f"--top-k {top_k}: {model.name} has {model.moe.experts} experts")
    if isinstance(routing, Replay):
        try:
            routing.check(model.moe.experts, top_k)
        except ValueError as error:
            raise UnknownName(f"--routing {given.routing}: {error}") from None
    return replace(case, batch=given.batch, dtype=workload.value(given, "dtype"), top_k=top_k, routing=routing)
