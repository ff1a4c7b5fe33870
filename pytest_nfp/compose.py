"""A whole model as the sum of its modules: which GEMMs, experts and attention one forward runs, and how often.

    T_model(N) = sum over parts of  count * T_part(N)

Norms, rotary embedding, sampling, communication between ranks and the host are in no part: a composed T is a floor of the
model's, and its N_max is read by the same definition as from any other curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_nfp import calibrated, recordings
from pytest_nfp.cases import Backend, Case, Module
from pytest_nfp.catalog import Model, UnknownName
from pytest_nfp.granularity import Granularity, granularity_of
from pytest_nfp.granularity.query import MAX_COUNT
from pytest_nfp.predict import Figures, edge_positions, grid, last_position, module_latency, widest
from pytest_nfp.principle import Prediction, predict_on
from pytest_nfp.principle.routing import Routing
from pytest_nfp.recordings import NoRecording, aiconfigurator
from pytest_nfp.recordings import parts as recorded_parts

QUANTISED = ("fp8", "fp8-block", "int4")
"""Weights of few bits: the KV cache and the head stay in BF16."""


@dataclass(frozen=True, slots=True)
class Part:
    """One module of a model at one workload, and how many times a forward runs it."""

    name: str
    case: Case
    count: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Where and how a model runs. attention: the framework of its attention kernel; None: left out, and said."""

    gpu: str
    backend: Backend
    attention: Backend | None
    dtype: str = "bf16"
    batch: int = 1
    context: int = 4096
    top_k: int | None = None
    routing: Routing = "balanced"


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed curve. latencies: microseconds of each part in one forward, its count included. missing: what is in no part.

    base: N0, of the experts where there are any. last: the largest N that every part is known for. spread and latency_spread: of T(N)/T(N0) and of T, the widest of the parts
    that are calibrated.
    """

    latencies: dict[str, Callable[[int], float]]
    edges: tuple[int, ...]
    base: int
    last: int
    spread: tuple[float, float]
    latency_spread: tuple[float, float]
    basis: dict[str, str]
    missing: tuple[str, ...]

    def latency_us(self, positions: int) -> float:
        """T(N) of all parts."""
        return sum(latency(positions) for latency in self.latencies.values())

    def shares(self, positions: int) -> dict[str, float]:
        """Each part's share of T(N)."""
        whole = self.latency_us(positions)
        return {name: latency(positions) / whole for name, latency in self.latencies.items()}

    def predict(self, tolerance: float = 0.20, positions: Sequence[int] = ()) -> Prediction:
        """N_max of the composed curve, with its interval, and the part whose time grows most across it."""
        wanted = [*grid(self.base, self.edges, self.last), *(n for n in positions if self.base <= n <= self.last)]
        return predict_on(self.latencies, wanted, tolerance, self.base, self.spread)


def parts(model: Model, on: Workload, merged: bool = True) -> list[Part]:
    """The parts of a forward of this model. merged: the engine runs q, k and v, and gate and up, as one GEMM each.

    Raises UnknownName for a model whose layers are not known, or whose attention is MLA: its projections are not described.
    """
    if model.layers is None:
        raise UnknownName(f"{model.name} is a module shape, not a model: its layers are not known")
    if model.attention is None or model.is_latent:
        raise UnknownName(f"the attention projections of {model.name} are not described, so it can't be composed")
    layers, hidden = model.layers, model.hidden
    found: list[Part] = []

    def add(name: str, module: Module, count: int, backend: Backend, **workload: object) -> None:
        case = Case(on.gpu, backend, module, model, on.dtype, on.batch)
        if count:
            found.append(Part(name, replace(case, **workload), count))  # type: ignore[arg-type]

    def gemm(name: str, columns: int, depth: int, count: int, dtype: str = on.dtype) -> None:
        add(name, "dense", count, on.backend, gemm=(columns, depth), dtype=dtype)

    a = model.attention
    if merged:
        gemm("qkv", (a.heads + 2 * a.kv_heads) * a.head_dim, hidden, layers)
    else:
        gemm("q", a.heads * a.head_dim, hidden, layers)
        gemm("k and v", a.kv_heads * a.head_dim, hidden, 2 * layers)
    half = "bf16" if on.dtype in QUANTISED else on.dtype
    if on.attention is not None:
        add("attention", "attention", layers, on.attention, context=on.context, dtype=half)
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
        gemm("router", moe.experts, hidden, layers - dense_layers, half)
        top_k = on.top_k or moe.top_k
        add("experts", "moe", layers - dense_layers, on.backend, top_k=top_k, routing=on.routing)
        if moe.shared_experts:
            ffn("shared experts", moe.shared_experts * moe.width, layers - dense_layers)
    if model.vocabulary is not None:
        gemm("head", model.vocabulary, hidden, 1, half)
    return found


def compose(model: Model, on: Workload, archives: Path | None = None, recorded: bool = False) -> Composed:
    """The composed curve by each part's own kernel: tile rule, calibration or datasheet.

    recorded: where a table of the backend's release holds exactly this shape, its times stand in place of the prediction;
    of attention its time at one position, from which on the growth is predicted. The basis of each part says which it is.
    Raises UnknownName as `parts` does, RuleUnknown where the rule of the experts or the attention is unknown, NoRecording
    where recordings are asked for and there are none of this GPU and release.
    """
    latencies: dict[str, Callable[[int], float]] = {}
    edges: set[int] = set()
    spreads: list[tuple[float, float]] = []
    latency_spreads: list[tuple[float, float]] = []
    basis: dict[str, str] = {}
    base, last = 1, MAX_COUNT
    if recorded and on.backend not in recordings.recorded_releases(on.gpu, "moe" if model.moe else "dense"):
        aiconfigurator.table_path(on.gpu, on.backend.framework, on.backend.release, "moe" if model.moe else "dense")
    for part in parts(model, on):
        granularity = None if part.case.module == "dense" else granularity_of(part.case, archives)
        figures = calibrated.figures_of(part.case, granularity)
        edges |= set(edge_positions(part.case, granularity))
        latencies[part.name], basis[part.name] = _times(part, figures, granularity), figures.basis
        if recorded and (found := _recorded(part, on.backend, latencies[part.name])) is not None:
            latencies[part.name], basis[part.name], end = found
            last = min(last, end)
            if part.case.module != "attention":
                base = part.case.baseline_positions if part.case.module == "moe" else base
                continue  # Nothing of it is predicted.
        if figures.spread is not None:
            spreads.append(figures.spread)
        if figures.latency_spread is not None:
            latency_spreads.append(figures.latency_spread)
        if part.case.module == "moe":
            base = part.case.baseline_positions
            last = min(last, last_position(part.case))
    missing = [] if on.attention is not None else ["attention"]
    missing += [] if model.vocabulary is not None else ["head"]
    return Composed(
        latencies, tuple(sorted(edges)), base, last, widest(spreads), widest(latency_spreads), basis, tuple(missing)
    )


def _recorded(
    part: Part, backend: Backend, predicted: Callable[[int], float]
) -> tuple[Callable[[int], float], str, int] | None:
    """The part's times by a table of this release, what they are, and the last N that they reach; None where there are none."""
    try:
        if part.case.module == "attention":
            one = recorded_parts.attention_at_one(part.case, backend.framework, backend.release)
            at_one, moving = predicted(1), one.latency_us - one.fixed_us
            said = f"recorded at one position ({one.source}), its growth predicted"
            # What it takes over next to nothing is launch and reduction: it does not grow with N.
            return lambda n: part.count * (one.fixed_us + moving * predicted(n) / at_one), said, MAX_COUNT
        times = recorded_parts.times(part.case)
    except NoRecording:
        return None
    # Below the first recorded count (of experts: N0) the prediction stands, at the level of the recording.
    first = -(-times.rows[0] // part.case.batch)
    level = part.count * times.at(first * part.case.batch) / predicted(first)

    def latency(n: int) -> float:
        rows = n * part.case.batch
        return predicted(n) * level if rows < times.rows[0] else part.count * times.at(rows)

    return latency, f"recorded ({times.source})", times.rows[-1] // part.case.batch


def _times(part: Part, figures: Figures, granularity: Granularity | None) -> Callable[[int], float]:
    latency = module_latency(part.case, figures, granularity)
    return lambda n: part.count * latency(n)
