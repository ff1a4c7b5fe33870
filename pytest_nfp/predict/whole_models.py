"""A whole model as the sum of its modules: which GEMMs, experts and attention one forward runs, and how often.

    T_model(N) = sum over parts of  count * T_part(N)

Norms, rotary embedding, sampling, communication between ranks and the host are in no part. So a composed T is a floor
of the model's T. Its N_max is read by the same definition as from any other curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_nfp import frameworks, recordings
from pytest_nfp.cases import ROUTINGS, Backend, Case, Module, frameworks_of
from pytest_nfp.catalog import Model, UnknownName
from pytest_nfp.granularity import Granularity, granularity_of
from pytest_nfp.granularity.query import MAX_COUNT
from pytest_nfp.predict import calibrations
from pytest_nfp.predict.modules import (
    Figures,
    Predicted,
    edge_positions,
    grid,
    idle_compute,
    last_position,
    module_latency,
    terms_at,
    widest,
)
from pytest_nfp.principle import closed_form, predict_on
from pytest_nfp.principle.boundary import TOLERANCE
from pytest_nfp.principle.routing import Routing
from pytest_nfp.recordings import NoRecording, tables
from pytest_nfp.recordings import parts as recorded_parts

QUANTISED = ("fp8", "fp8-block", "int4")
"""Dtypes of weights with few bits. The KV cache and the head stay in BF16."""


@dataclass(frozen=True, slots=True)
class Part:
    """One module of a model at one workload, and how many times a forward runs it."""

    name: str
    case: Case
    count: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Where and how a model runs."""

    gpu: str
    """Catalog name of the GPU."""
    backend: Backend
    """The release that runs the GEMMs and the experts."""
    attention: Backend | None
    """The release that runs the attention kernel. None: attention is left out, and `missing` names it."""
    dtype: str = "bf16"
    """Number format of the weights."""
    batch: int = 1
    """Requests."""
    context: int = 4096
    """Cached tokens of each request."""
    top_k: int | None = None
    """Experts per token. None: the model's own."""
    routing: Routing = "balanced"
    """Routing of the experts."""


@dataclass(frozen=True, slots=True)
class Known:
    """A part with what its kernel is predicted with."""

    part: Part
    figures: Figures
    granularity: Granularity | None
    """None: the kernel has no tile rule."""


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed curve."""

    known: tuple[Known, ...]
    """The parts, each with its figures."""
    latencies: dict[str, Callable[[int], float]]
    """By part: N -> microseconds in one forward, its count included."""
    edges: tuple[int, ...]
    """The last N of each tile of any part."""
    base: int
    """N0: that of the experts where there are any."""
    last: int
    """The largest N that every part is known for."""
    spread: tuple[float, float]
    """Of T(N)/T(N0): the widest of the calibrated parts."""
    latency_spread: tuple[float, float]
    """Of T: the widest of the calibrated parts."""
    basis: dict[str, str]
    """By part: where its figures come from, in words."""
    missing: tuple[str, ...]
    """What is in no part."""

    def latency_us(self, positions: int) -> float:
        """T(N) of all parts, in microseconds."""
        return sum(latency(positions) for latency in self.latencies.values())

    def shares(self, positions: int) -> dict[str, float]:
        """Each part's share of T(N)."""
        whole = self.latency_us(positions)
        return {name: latency(positions) / whole for name, latency in self.latencies.items()}

    def predict(self, tolerance: float = TOLERANCE, positions: Sequence[int] = ()) -> Predicted:
        """Both predictors.

        The principle gives the first exiting module. The tile roofline gives N_max of the composed curve, and the part
        that grows most.
        """
        wanted = [*grid(self.base, self.edges, self.last), *(n for n in positions if self.base <= n <= self.last)]
        return predict_parts(self.known, self.latencies, self.base, wanted, tolerance, self.spread)


def predict_parts(
    known: Sequence[Known],
    latencies: dict[str, Callable[[int], float]],
    base: int,
    positions: Sequence[int],
    tolerance: float,
    spread: tuple[float, float],
) -> Predicted:
    """Both predictors for a model. Only this function makes one bound of a model's modules.

    The principle is the first exiting module at the model's N0. Its MoE model has no dense term. Under drawn or
    replayed routing there is no principle. N_idle is that of the experts, or of a dense model's FFN. The tile roofline
    is the sum of all parts. latencies: T of each part in microseconds, its count included.
    """
    terms: dict[str, int] = {}
    n_idle: float | None = None
    bases: dict[str, str] = {}
    has_experts = any(k.part.case.module == "moe" for k in known)
    is_bounded = all(k.part.case.routing in (None, *ROUTINGS) for k in known)
    for k in known:
        case = k.part.case
        bases.setdefault(case.module, k.figures.basis)
        is_ffn = case.module == "moe" or (not has_experts and k.part.name.startswith("ffn"))
        if not is_bounded or (case.module == "dense" and not is_ffn):
            continue
        if is_ffn:
            n_idle = idle_compute(case, k.figures.balance)
        terms |= terms_at(case, base, k.figures, k.granularity)
    roofline = predict_on(latencies, positions, tolerance, base, spread)
    principle = closed_form(**terms, baseline_positions=base) if terms else None
    basis = "; ".join(dict.fromkeys(f"{module} {module_basis}" for module, module_basis in bases.items()))
    return Predicted(n_idle, principle, roofline, basis, any(k.figures.spread is not None for k in known))


def parts(model: Model, on: Workload, merged: bool = True) -> list[Part]:
    """The parts of a forward of this model.

    merged: the engine runs q, k and v as one GEMM, and gate and up as one. A module shape has an unknown number of
    layers: it counts as one layer. The projections of MLA are not described. `missing` names what is in no part.
    """
    layers, hidden = model.layers or 1, model.hidden
    model_parts: list[Part] = []

    def add(name: str, module: Module, count: int, backend: Backend, **workload: object) -> None:
        case = Case(on.gpu, backend, module, model, on.dtype, on.batch)
        if count:
            model_parts.append(Part(name, replace(case, **workload), count))  # type: ignore[arg-type]

    def gemm(name: str, columns: int, depth: int, count: int, dtype: str = on.dtype) -> None:
        add(name, "dense", count, on.backend, gemm=(columns, depth), dtype=dtype)

    # The projections of attention are not described for a module shape or for MLA.
    a = model.attention if model.layers is not None and not model.is_latent else None
    if a is not None and merged:
        gemm("qkv", (a.heads + 2 * a.kv_heads) * a.head_dim, hidden, layers)
    elif a is not None:
        gemm("q", a.heads * a.head_dim, hidden, layers)
        gemm("k and v", a.kv_heads * a.head_dim, hidden, 2 * layers)
    unquantised = "bf16" if on.dtype in QUANTISED else on.dtype
    if on.attention is not None and model.attention is not None:
        add("attention", "attention", layers, on.attention, context=on.context, dtype=unquantised)
    if a is not None:
        gemm("o", hidden, a.heads * a.head_dim, layers)
    moe = model.moe
    dense_layers = layers if moe is None else moe.dense_layers

    def ffn(name: str, width: int, count: int, matrices: int = 3) -> None:
        ups = matrices - 1
        gemm(f"{name} up", ups * width if merged else width, hidden, count * (1 if merged else ups))
        gemm(f"{name} down", hidden, width, count)

    if model.dense is not None:
        ffn("ffn", model.dense.width, dense_layers, model.dense.matrices)
    if moe is not None:
        gemm("router", moe.experts, hidden, layers - dense_layers, unquantised)
        top_k = on.top_k or moe.top_k
        add("experts", "moe", layers - dense_layers, on.backend, top_k=top_k, routing=on.routing)
        if moe.shared_experts:
            ffn("shared experts", moe.shared_experts * moe.width, layers - dense_layers)
    if model.vocabulary is not None:
        gemm("head", model.vocabulary, hidden, 1, unquantised)
    return model_parts


def _require_frameworks(model: Model, on: Workload) -> None:
    """Raise UnknownName for a framework that lacks a module of the model.

    For a model with MLA the framework of its attention must have MLA.
    """
    if model.moe is not None and on.backend.framework not in frameworks_of("moe", on.gpu):
        raise UnknownName(f"{on.backend.framework} is no moe backend")
    if on.attention is None:
        return
    framework = on.attention.framework
    if framework not in frameworks_of("attention", on.gpu):
        raise UnknownName(f"{framework} is no attention backend")
    with_mla = [f.name for f in frameworks.known().values() if f.has_mla]
    if model.is_latent and framework not in with_mla:
        raise UnknownName(f"{framework}'s MLA is not described: of {model.name} {', '.join(with_mla)} is")


def missing(model: Model, on: Workload) -> tuple[str, ...]:
    """What a forward of the model has and no part describes.

    Nothing is missing from a module shape: it is the module.
    """
    if model.layers is None:
        return ()
    absent = []
    if model.attention is None or on.attention is None:
        absent.append("attention")
    if model.is_latent:
        absent.append("attention projections")
    if model.vocabulary is None:
        absent.append("head")
    return tuple(absent)


def compose(model: Model, on: Workload, archives: Path | None = None, recorded: bool = False) -> Composed:
    """The composed curve, each part by its own kernel: tile rule, and calibration or datasheet.

    recorded: if a table of the backend's release holds exactly the shape of a part, the recorded times replace the
    prediction. Attention is recorded at one position: from there on its growth is predicted. The basis of each part
    tells which it is.

    Raises UnknownName for a framework that has no such module, RuleUnknown if the rule of the experts or the attention
    is unknown, NoRecording if recordings are asked for and there are none of this GPU and release.
    """
    latencies: dict[str, Callable[[int], float]] = {}
    edges: set[int] = set()
    spreads: list[tuple[float, float]] = []
    latency_spreads: list[tuple[float, float]] = []
    basis: dict[str, str] = {}
    base, last = 1, MAX_COUNT
    known: list[Known] = []
    _require_frameworks(model, on)
    if recorded and on.backend not in recordings.recorded_releases(on.gpu, "moe" if model.moe else "dense"):
        tables.table_path(on.gpu, on.backend.framework, on.backend.release, "moe" if model.moe else "dense")
    for part in parts(model, on):
        granularity = None if part.case.module == "dense" else granularity_of(part.case, archives)
        figures = calibrations.figures_of(part.case, granularity)
        known.append(Known(part, figures, granularity))
        edges |= set(edge_positions(part.case, granularity))
        latencies[part.name], basis[part.name] = _times(part, figures, granularity), figures.basis
        if recorded and (recording := _recorded(part, on.backend, latencies[part.name])) is not None:
            latencies[part.name], basis[part.name], end = recording
            last = min(last, end)
            if part.case.module != "attention":
                base = part.case.baseline_positions if part.case.module == "moe" else base
                continue  # A recorded part has no spread, and its N0 and last N are set.
        if figures.spread is not None:
            spreads.append(figures.spread)
        if figures.latency_spread is not None:
            latency_spreads.append(figures.latency_spread)
        if part.case.module == "moe":
            base = part.case.baseline_positions
            last = min(last, last_position(part.case))
    return Composed(
        tuple(known),
        latencies,
        tuple(sorted(edges)),
        base,
        last,
        widest(spreads),
        widest(latency_spreads),
        basis,
        missing(model, on),
    )


def _recorded(
    part: Part, backend: Backend, predicted: Callable[[int], float]
) -> tuple[Callable[[int], float], str, int] | None:
    """(N -> microseconds, basis, last recorded N) of a part, by a table of this release.

    None if the table does not hold the part.
    """
    try:
        if part.case.module == "attention":
            attention = recorded_parts.attention_at_one(part.case, backend.framework, backend.release)
            at_one, moving = predicted(1), attention.latency_us - attention.fixed_us
            basis = f"recorded at one position ({attention.source}), its growth predicted"
            # Its time over next to no cached tokens is launch and reduction, which do not grow with N.
            return lambda n: part.count * (attention.fixed_us + moving * predicted(n) / at_one), basis, MAX_COUNT
        times = recorded_parts.times(part.case)
    except NoRecording:
        return None
    # Below the first recorded count (of experts: N0) the prediction is scaled to the recording.
    first = -(-times.rows[0] // part.case.batch)
    level = part.count * times.at(first * part.case.batch) / predicted(first)

    def latency(n: int) -> float:
        rows = n * part.case.batch
        return predicted(n) * level if rows < times.rows[0] else part.count * times.at(rows)

    return latency, f"recorded ({times.source})", times.rows[-1] // part.case.batch


def _times(part: Part, figures: Figures, granularity: Granularity | None) -> Callable[[int], float]:
    latency = module_latency(part.case, figures, granularity)
    return lambda n: part.count * latency(n)
