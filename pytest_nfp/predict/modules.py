"""The principle's and the tile roofline's predictions for a case or a whole model, from its tiles by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_nfp.cases import ROUTINGS, Case
from pytest_nfp.granularity import Granularity, RuleUnknown
from pytest_nfp.granularity.query import MAX_COUNT
from pytest_nfp.predict.residuals import GEMM_ROWS, Place, Residuals, setting_at
from pytest_nfp.principle import (
    Boundary,
    Calibration,
    ClosedForm,
    Prediction,
    attention_term,
    attention_work,
    branch_term,
    closed_form,
    dense_term,
    dense_work,
    moe_term,
    moe_work,
    n_idle_attention,
    n_idle_dense,
    n_idle_moe,
    predict_boundary,
    predict_on,
)
from pytest_nfp.principle.boundary import TOLERANCE
from pytest_nfp.principle.routing import Replay
from pytest_nfp.principle.tile_roofline import Work

POSITIONS = tuple(sorted({3, 6, 12, 24, *GEMM_ROWS}))
"""The N of a predicted curve. Both sides of the row counts at which libraries switch kernels are among them."""
CPU_NEAR = 33
"""Up to this many N0, a CPU's predicted curve has N in steps of a quarter of N0."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What the predictors know of a device and kernel."""

    peak_flops: float
    """phi of the closed form, in FLOP/s."""
    bandwidth: float
    """beta of the closed form, in bytes/s."""
    calibration: Calibration
    """What the tile roofline runs on."""
    basis: str
    """Where the figures come from: the datasheet or a calibration, in words."""
    describes: bool = True
    """Whether the calibrated curve predicted the boundary of shapes that it had not seen."""
    cause: str = ""
    """What the calibrated curve could not describe; "" if it describes the kernel."""
    kernel: str | None = None
    """The kernel that is calibrated. None without a calibration."""
    residuals: Residuals | None = None
    """What the roofline of the kernel leaves over."""
    spread: tuple[float, float] | None = None
    """Middle 95% of the predicted over the recorded T(N)/T(N0) on held-out shapes."""
    latency_spread: tuple[float, float] | None = None
    """Middle 95% of the predicted over the recorded T on held-out shapes."""
    has_skewed: bool = False
    """Whether curves under skewed routing were among the calibrated ones."""

    @property
    def is_proven(self) -> bool:
        """Whether the calibration has residuals, that is, is of this GPU or of a stand-in."""
        return self.residuals is not None

    @property
    def balance(self) -> float:
        """rho: FLOP per byte."""
        return self.peak_flops / self.bandwidth


def datasheet(peak_flops: float, bandwidth: float) -> Figures:
    """Figures of a device without a calibration: datasheet peaks, full overlap, no fixed cost."""
    return Figures(peak_flops, bandwidth, Calibration(peak_flops, bandwidth), "datasheet")


@dataclass(frozen=True, slots=True)
class Predicted:
    """Both predictors, each by its name.

    A forward that a user's test brings has neither idle compute nor a tile roofline.
    """

    n_idle: float | None
    """N_idle in positions; infinite where idle compute does not bound N. None where it is not predicted."""
    principle: ClosedForm | None
    """None for drawn or replayed routing: the closed form bounds it by balanced and skewed routing."""
    tile_roofline: Prediction | None
    """Boundary of the predicted curve. None where it is not predicted."""
    basis: str
    """Where the figures come from, in words."""
    is_interval: bool = False
    """Whether the tile roofline's N_max has the interval of a calibration."""

    def as_dict(self) -> dict[str, Any]:
        """As baselines store it: whole positions and limiting modules.

        A calibrated N_max comes with its interval.
        """
        terms: dict[str, dict[str, Any]] = {}
        if self.principle is not None:
            terms["principle"] = {"n_max": self.principle.n_max, "limiting": self.principle.limiting}
            if not self.principle.is_near_free:
                terms["principle"]["bound"] = self.principle.bound
        if self.tile_roofline is not None:
            roofline = self.tile_roofline
            terms["tile_roofline"] = {"n_max": roofline.n_max, "limiting": roofline.limiting}
            if self.is_interval:
                terms["tile_roofline"]["interval"] = list(roofline.boundary.n_max_interval)
        return terms


def idle_compute(case: Case, balance: float) -> float:
    """N_idle of the case's module. math.inf where it is unbounded."""
    s = case.bytes_per_element
    if case.module == "dense":
        return n_idle_dense(balance, s, case.batch)
    if case.module == "attention":
        assert case.subject.attention is not None and case.context is not None
        return n_idle_attention(balance, s, case.context, case.subject.attention.reuse)
    moe, top_k = case.subject.moe, case.top_k
    assert moe is not None and top_k is not None
    active = moe.experts if case.routing == "balanced" else top_k
    return n_idle_moe(balance, s, case.subject.hidden, moe.width, top_k, active, case.batch)


def module_work(case: Case, granularity: Granularity | None) -> Callable[[int], Work]:
    """The work of the case's module at N positions."""
    tile = granularity.tile if granularity is not None and granularity.has_tiles else None
    s = case.bytes_per_element
    if case.module == "dense":
        shapes = case.gemms
        return lambda n: dense_work(n, case.batch, shapes, s, tile)
    if case.module == "attention":
        a, context = case.subject.attention, case.context
        assert a is not None and context is not None
        packed = granularity is not None and granularity.packed
        # The last query block of torch's CPU kernel ends with its rows.
        padded = case.gpu != "cpu"
        return lambda n: attention_work(
            n, case.batch, context, a.heads, a.kv_heads, a.head_dim, s, tile, packed, padded, a.value_dim
        )
    moe, top_k, routing = case.subject.moe, case.top_k, case.routing
    assert moe is not None and top_k is not None and routing is not None
    columns = granularity.parameter_rule("BLOCK_SIZE_N") if granularity is not None else None
    # Experts are spread evenly over the ranks. Skewed tokens may all take the experts of one rank.
    ranks = 1 if routing == "skewed" else moe.expert_parallel
    return lambda n: moe_work(
        n, case.batch, routing, moe.experts, top_k, case.subject.hidden, moe.width, s, tile, moe.matrices, columns
    ).share(ranks)


def edge_positions(case: Case, granularity: Granularity | None) -> list[int]:
    """The last N of each tile of the case's module."""
    if granularity is None:
        return []
    if case.module == "attention":
        assert case.subject.attention is not None
        per_position = case.subject.attention.group if granularity.packed else 1
    else:
        per_position = case.batch
    return [count // per_position for count in granularity.edges()]


def principle_terms(case: Case, balance: float, granularity: Granularity | None) -> dict[str, int]:
    """The closed form's terms of the case's module, at the baseline workload."""
    if case.module == "dense":
        return {"dense": dense_term(balance, case.bytes_per_element, case.batch)}
    if granularity is None or not granularity.has_tiles:
        # A kernel without a tile has no granularity slack: idle compute alone bounds it.
        n_idle = idle_compute(case, balance)
        return {case.module: max(1, math.floor(n_idle))} if math.isfinite(n_idle) else {}
    if case.module == "attention":
        assert case.subject.attention is not None
        group = case.subject.attention.group if granularity.packed else 1
        rows = case.baseline_positions * group
        return {"attention": attention_term(granularity.tile(rows), group)}
    moe, top_k, routing = case.subject.moe, case.top_k, case.routing
    assert moe is not None and top_k is not None and routing is not None
    tokens = case.batch * case.baseline_positions
    terms = {"moe": moe_term(routing, granularity.tile(tokens), moe.experts, top_k, case.batch)}
    limit = granularity.branch_limit(tokens)
    if limit is not None:
        terms["branch"] = branch_term(limit, case.batch)
    return terms


Latency = Callable[[int], float]
"""N -> microseconds."""


def module_latency(case: Case, figures: Figures, granularity: Granularity | None) -> Latency:
    """T(N) of the case's module in microseconds, with its fixed cost.

    Each dense GEMM has a fixed cost of its own: the GEMMs are launched one after the other.
    """
    c, residuals, on_cpu = figures.calibration, figures.residuals, case.gpu == "cpu"
    if figures.kernel not in (None, "triton") and not on_cpu:
        granularity = None  # the tiles are those of the Triton kernel
    if case.module == "dense" and figures.kernel is not None:
        shapes, s = case.gemms, case.bytes_per_element
        return lambda n: sum(gemm_latency(n * case.batch, *shape, s, figures, on_cpu) for shape in shapes)
    work = module_work(case, granularity)
    if residuals is None:
        return lambda n: work(n).latency_us(c) + c.fixed_us
    place = place_of(case, granularity)
    return lambda n: (work(n).latency_us(c) + c.fixed_us) * math.exp(residuals.log_ratio([place(n)])[0])


def place_of(case: Case, granularity: Granularity | None) -> Callable[[int], Place]:
    """The place of a forward of experts or attention among the residuals, as a function of N."""
    on_cpu, moe, top_k = case.gpu == "cpu", case.subject.moe, case.top_k
    if case.module == "attention":
        attention, context = case.subject.attention, case.context
        assert attention is not None and context is not None
        cached = (attention.heads, attention.head_dim, context)
        return lambda n: Place(cached, n, on_cpu=on_cpu)
    assert moe is not None and top_k is not None
    if on_cpu:
        # Skewed tokens all take the same k experts, as under balanced routing over k experts.
        active = top_k if case.routing == "skewed" else moe.experts
        taken = (active, top_k, case.subject.hidden, moe.width)
        return lambda n: Place(taken, n * case.batch, on_cpu=True)
    # The experts of a rank, and the share of the tokens that they get.
    shape = (moe.local_experts, top_k, case.subject.hidden, moe.width)
    ranks = moe.expert_parallel
    return lambda n: Place(shape, max(1, n * case.batch // ranks), setting_at(granularity, n * case.batch))


def gemm_latency(rows: int, n: int, k: int, bytes_per_element: float, figures: Figures, on_cpu: bool = False) -> float:
    """T of one GEMM [rows, k] x [k, n] in microseconds."""
    c = figures.calibration
    latency_us = dense_work(rows, 1, [(n, k)], bytes_per_element, None).latency_us(c) + c.fixed_us
    if figures.residuals is not None:
        latency_us *= math.exp(figures.residuals.log_ratio([Place((n, k), rows, on_cpu=on_cpu)])[0])
    return latency_us


def predict_case(
    case: Case, figures: Figures, granularity: Granularity | None, tolerance: float = TOLERANCE
) -> Predicted:
    """Both predictors for one module. granularity None: the kernel has no tile rule (dense GEMMs)."""
    is_bounded = case.routing in (None, *ROUTINGS)
    terms = principle_terms(case, figures.balance, granularity) if is_bounded else {}
    edges, base, last = edge_positions(case, granularity), case.baseline_positions, last_position(case)
    if figures.spread is not None:
        latencies = {case.module: module_latency(case, figures, granularity)}
        # A CPU's boundaries lie within a few N0: there its predicted curve has a dense grid.
        near = range(base, CPU_NEAR * base, max(1, base // 4)) if case.gpu == "cpu" else ()
        positions = sorted({*grid(base, edges, last), *(n for n in near if n <= last)})
        roofline = predict_on(latencies, positions, tolerance, base, figures.spread)
    else:
        work = {case.module: module_work(case, granularity)}
        roofline = predict_boundary(work, figures.calibration, tolerance, base, last, edges)
    if is_bounded and not terms:
        # The closed form has no bound for the module. Its term is the end of the range that was evaluated.
        terms = {case.module: roofline.points[-1].positions}
    n_idle = idle_compute(case, figures.balance) if is_bounded else None
    principle = closed_form(**terms, baseline_positions=base) if terms else None
    return Predicted(n_idle, principle, roofline, figures.basis, figures.spread is not None)


def last_position(case: Case) -> int:
    """The last N that a case can be predicted for: a trace ends with its tokens.

    Raises RuleUnknown if the trace has fewer tokens than a batch needs.
    """
    if not isinstance(case.routing, Replay):
        return MAX_COUNT
    tokens = len(case.routing.tokens)
    if tokens < case.batch:
        raise RuleUnknown(f"the trace has {tokens} tokens, a batch of {case.batch} needs as many")
    return min(MAX_COUNT, tokens // case.batch)


def grid(baseline_positions: int, edges: Sequence[int], last: int = MAX_COUNT) -> list[int]:
    """The N of a predicted curve whose T may fall as N grows: POSITIONS, and both sides of every edge."""
    wanted = {baseline_positions, *POSITIONS, *edges, *(n + 1 for n in edges)}
    return sorted(n for n in wanted if baseline_positions <= n <= max(last, baseline_positions))


def terms_at(case: Case, positions: int, figures: Figures, granularity: Granularity | None) -> dict[str, int]:
    """The closed form's terms of one module of a model.

    Attention takes its tile at the model's N0, whichever module sets that.
    """
    attention = case.subject.attention
    if case.module != "attention" or granularity is None or not granularity.has_tiles or attention is None:
        return principle_terms(case, figures.balance, granularity)
    group = attention.group if granularity.packed else 1
    return {"attention": attention_term(granularity.tile(positions * group), group)}


def widest(spreads: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The spread of a sum. It reaches as far as the spread of any calibrated part."""
    return min((low for low, _ in spreads), default=1.0), max((high for _, high in spreads), default=1.0)


@dataclass(frozen=True, slots=True)
class PredictedCurve:
    """A predicted curve with its boundary."""

    latencies: tuple[tuple[int, float, float | None, float | None], ...]
    """(N, us, low, high). low and high are the interval in microseconds, None without a calibration."""
    boundary: Boundary
    """The boundary as it is read from the latencies."""


def predict_curve(
    latency: Latency, positions: Sequence[int], baseline_positions: int, tolerance: float, figures: Figures
) -> PredictedCurve:
    """T at these N, at N0 and at both sides of the crossing, with the intervals of the calibration."""
    spread = figures.spread or (1.0, 1.0)
    prediction = predict_on({"": latency}, positions, tolerance, baseline_positions, spread)
    rows: list[tuple[int, float, float | None, float | None]] = []
    for p in prediction.points:
        t = p.latency_us
        if figures.latency_spread is None:
            rows.append((p.positions, t, None, None))
        else:
            # On held-out shapes the prediction was off by these factors: recorded latencies lay in this interval.
            low, high = figures.latency_spread
            rows.append((p.positions, t, t / high, t / low))
    return PredictedCurve(tuple(rows), prediction.boundary)
