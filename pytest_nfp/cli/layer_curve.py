"""nfp predict --curve: the predicted T(N) of one layer. The layer is a model's, or has a shape given by hand."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pytest_nfp import catalog
from pytest_nfp.cases import BYTES_PER_ELEMENT, Backend, Case, expand
from pytest_nfp.catalog import Model, Moe, UnknownName
from pytest_nfp.catalog.parallel import on_rank, parse_parallel
from pytest_nfp.cli import options, workload
from pytest_nfp.cli.options import release
from pytest_nfp.granularity import granularity_of
from pytest_nfp.granularity.query import MAX_COUNT
from pytest_nfp.predict import (
    Figures,
    PredictedCurve,
    calibrations,
    edge_positions,
    gemm_latency,
    grid,
    last_position,
    module_latency,
    predict_curve,
)
from pytest_nfp.principle.boundary import bracketed
from pytest_nfp.principle.routing import Replay

OPTIONS = {
    "experts": "with --curve: experts, with --expert-width --hidden --top-k instead of --model",
    "expert-width": "with --curve: intermediate width of an expert, before it is cut over ranks",
    "hidden": "with --curve: hidden size",
    "gemm-n": "with --curve: columns of a dense GEMM, with --gemm-k instead of --model",
    "gemm-k": "with --curve: inner dimension of a dense GEMM",
    "end": "with --curve: last N (default 1024)",
}
OF_EXPERTS = ("model", "experts", "expert-width", "hidden", "top-k", "routing", "parallel", "artifacts")
"""Options that don't apply to a GEMM."""
END = 1024


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer whose curve can be predicted."""

    figures: Figures
    """The calibrated figures, or those of the datasheet."""
    latency: Callable[[int], float]
    """N -> microseconds."""
    base: int
    """N0."""
    edges: tuple[int, ...] = ()
    """N at which a tile or a tuned file changes."""
    last: int = MAX_COUNT
    """The last N that the map or the trace describes."""
    warnings: tuple[str, ...] = ()


def run(given: argparse.Namespace) -> int:
    """Print the curve. Raises UnknownName, RuleUnknown."""
    workload.refuse(given, ["attention", "context"], "with --curve, which is the curve of one module")
    is_gemm = bool(given.gemm_n or given.gemm_k)
    if is_gemm:
        workload.refuse(given, OF_EXPERTS, "for a GEMM, which --gemm-n and --gemm-k give whole")
    elif given.model:
        workload.refuse(given, ["experts", "expert-width", "hidden"], "beside --model")
    gpu = catalog.gpu(given.gpu)
    if given.kernel:
        given.kernel = calibrations.kernel_named(given.kernel)
        if (given.kernel == "gemm") != is_gemm:
            raise UnknownName(
                f"--kernel {given.kernel}: gemm is the kernel of --gemm-n and --gemm-k, and of them alone"
            )
    backend = release(given.backend, "--backend") if given.backend else None
    layer = _gemm(given, gpu.name, backend) if is_gemm else _experts(given, gpu.name, backend)
    end = min(given.end or END, layer.last)
    positions = [*grid(layer.base, layer.edges, end), end]
    tolerance = workload.value(given, "tolerance")
    curve = predict_curve(layer.latency, positions, layer.base, tolerance, layer.figures)
    basis = layer.figures.basis
    if basis == "datasheet":
        dtype = workload.value(given, "dtype")
        basis = f"datasheet peaks: no calibration of this kernel for {dtype} on {gpu.name}"
    if given.json:
        print(json.dumps(_as_json(layer, curve, layer.figures.kernel or given.kernel, basis), indent=1))
    else:
        print("\n".join([f"{gpu.title}, N0={layer.base}: {_n_max(curve)}", f"  {basis}", *_in_words(layer, curve)]))
    return 0


def _gemm(given: argparse.Namespace, gpu: str, backend: Backend | None) -> _Layer:
    """A dense GEMM by its columns and inner dimension."""
    if not (given.gemm_n and given.gemm_k):
        raise UnknownName("a GEMM needs both --gemm-n and --gemm-k")
    dtype = workload.value(given, "dtype")
    figures = calibrations.figures(gpu, backend.framework if backend else "vllm", given.kernel or "gemm", dtype)
    shape, element = (given.gemm_n, given.gemm_k), BYTES_PER_ELEMENT[dtype]
    return _Layer(figures, lambda n: gemm_latency(n * given.batch, *shape, element, figures), 1)


def _experts(given: argparse.Namespace, gpu: str, backend: Backend | None) -> _Layer:
    """A layer of experts with the map of its release. Raises RuleUnknown where the map is unknown."""
    if backend is None:
        raise UnknownName("the tiles of experts are those of a framework: give --backend FRAMEWORK==RELEASE")
    case = _moe_case(given, gpu, backend)
    kernel = given.kernel or ("marlin" if case.dtype == "int4" else None)
    # Only the Triton kernel has a tile rule; the other kernels are calibrated without one.
    granularity = granularity_of(case, given.artifacts) if kernel in (None, "triton") else None
    kernel = kernel or calibrations.kernel_of(case, granularity)
    figures = calibrations.figures(gpu, backend.framework, kernel, case.dtype)
    figures = calibrations.for_routing(figures, case.routing)
    return _Layer(
        figures,
        module_latency(case, figures, granularity),
        case.baseline_positions,
        tuple(edge_positions(case, granularity)),
        last_position(case),
        granularity.warnings if granularity is not None else (),
    )


def _moe_case(given: argparse.Namespace, gpu: str, backend: Backend) -> Case:
    """The layer as one rank holds it, of a model or of a shape given by hand."""
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


def _as_json(layer: _Layer, found: PredictedCurve, kernel: str | None, basis: str) -> dict[str, Any]:
    return {
        "points": [[n, *(None if v is None else round(v, 3) for v in rest)] for n, *rest in found.latencies],
        "n_max": found.boundary.n_max,
        "n_max_interval": list(found.boundary.n_max_interval),
        "n_first_exit": found.boundary.n_first_exit,
        "baseline_positions": layer.base,
        "kernel": kernel,
        "calibration": basis,
        "warnings": list(layer.warnings),
    }


def _n_max(found: PredictedCurve) -> str:
    return f"N_max {found.boundary.n_max}, interval {bracketed(found.boundary.n_max_interval)}"


def _in_words(layer: _Layer, found: PredictedCurve) -> list[str]:
    """One line a position, then the warnings."""
    lines = [f"  {'N':>6}  {'T us':>10}  {'low':>10}  {'high':>10}  T/T(N0)"]
    first = next(t for n, t, *_ in found.latencies if n == layer.base)
    for n, t, low, high in found.latencies:
        interval = ("", "") if low is None or high is None else (f"{low:.1f}", f"{high:.1f}")
        lines.append(f"  {n:>6}  {t:>10.1f}  {interval[0]:>10}  {interval[1]:>10}  {t / first:.3f}")
    return [*lines, *(f"  {warning}" for warning in layer.warnings)]
