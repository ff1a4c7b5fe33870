"""What the principle and the tile roofline say about a case, or about a whole model: granularity + arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pytest_nfp.cases import Case
from pytest_nfp.catalog import Model
from pytest_nfp.granularity import Granularity
from pytest_nfp.principle import (
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
)
from pytest_nfp.principle.tile_roofline import Work


@dataclass(frozen=True, slots=True)
class Figures:
    """A device's phi and beta (FLOP/s, bytes/s) for the closed form, and what the tile roofline runs on.

    basis: datasheet, or where the calibration comes from. describes: whether the calibrated curve predicted the
    boundary of shapes that it had not seen; `cause` says what it could not describe.
    """

    peak_flops: float
    bandwidth: float
    calibration: Calibration
    basis: str
    describes: bool = True
    cause: str = ""

    @property
    def balance(self) -> float:
        """Rho."""
        return self.peak_flops / self.bandwidth


def datasheet(peak_flops: float, bandwidth: float) -> Figures:
    """Figures of a device that nothing is calibrated for: peaks, full overlap, no fixed cost."""
    return Figures(peak_flops, bandwidth, Calibration(peak_flops, bandwidth), "datasheet")


@dataclass(frozen=True, slots=True)
class Predicted:
    """Both predictors, always named. n_idle may be infinite: unbounded.

    A forward that a user's test brings has neither idle compute nor a tile roofline: both are None.
    """

    n_idle: float | None
    principle: ClosedForm
    tile_roofline: Prediction | None
    basis: str

    def as_dict(self) -> dict[str, Any]:
        """As baselines store it: whole positions and limiting modules."""
        terms = {"principle": {"n_max": self.principle.n_max, "limiting": self.principle.limiting}}
        if self.tile_roofline is not None:
            roofline = self.tile_roofline
            terms["tile_roofline"] = {"n_max": roofline.n_max, "limiting": roofline.limiting}
        return terms


def gemm_shapes(case: Case) -> list[tuple[int, int]]:
    """(n, k) of the GEMMs of a dense case."""
    if case.gemm is not None:
        return [case.gemm]
    dense, hidden = case.subject.dense, case.subject.hidden
    assert dense is not None
    return [(dense.width, hidden)] * (dense.matrices - 1) + [(hidden, dense.width)]


def idle_compute(case: Case, balance: float) -> float:
    """N_idle of the case's module; math.inf where it is unbounded."""
    s = case.bytes_per_element
    if case.module == "dense":
        return n_idle_dense(balance, s, case.batch)
    if case.module == "attention":
        assert case.subject.attention is not None and case.context is not None
        return n_idle_attention(balance, s, case.context, case.subject.attention.group)
    moe, top_k = case.subject.moe, case.top_k
    assert moe is not None and top_k is not None
    active = moe.experts if case.routing == "balanced" else top_k
    return n_idle_moe(balance, s, case.subject.hidden, moe.width, top_k, active, case.batch)


def module_work(case: Case, granularity: Granularity | None) -> Callable[[int], Work]:
    """The work of the case's module at N positions."""
    tile = granularity.tile if granularity is not None and granularity.has_tiles else None
    s = case.bytes_per_element
    if case.module == "dense":
        shapes = gemm_shapes(case)
        return lambda n: dense_work(n, case.batch, shapes, s, tile)
    if case.module == "attention":
        a, context = case.subject.attention, case.context
        assert a is not None and context is not None
        packed = granularity is not None and granularity.packed
        # torch's CPU kernel ends its last query block with the rows that there are.
        padded = case.gpu != "cpu"
        return lambda n: attention_work(
            n, case.batch, context, a.heads, a.kv_heads, a.head_dim, s, tile, packed, padded
        )
    moe, top_k, routing = case.subject.moe, case.top_k, case.routing
    assert moe is not None and top_k is not None and routing is not None
    columns = granularity.parameter_rule("BLOCK_SIZE_N") if granularity is not None else None
    # Balanced experts are spread evenly over the ranks; skewed ones may all lie on one of them.
    ranks = moe.expert_parallel if routing == "balanced" else 1
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
        # A kernel without a tile has no granularity slack: what is left is idle compute.
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


def predict_case(case: Case, figures: Figures, granularity: Granularity | None, tolerance: float = 0.20) -> Predicted:
    """Both predictors for one module. granularity None: the kernel has no tile rule (dense GEMMs)."""
    terms = principle_terms(case, figures.balance, granularity)
    roofline = predict_boundary(
        {case.module: module_work(case, granularity)},
        figures.calibration,
        tolerance,
        case.baseline_positions,
        edges=edge_positions(case, granularity),
    )
    if not terms:
        # Nothing bounds the module in the closed form: the end of the range that was looked at is what can be said.
        terms = {case.module: roofline.points[-1].positions}
    return Predicted(idle_compute(case, figures.balance), closed_form(**terms), roofline, figures.basis)


def predict_model(cases: list[tuple[Case, Granularity | None]], figures: Figures, tolerance: float = 0.20) -> Predicted:
    """Both predictors for a model: the first exiting module, and the sum of the modules' predicted times.

    cases: one for each module, at one workload. N0 is that of the MoE module where there is one, for every module:
    the closed form takes M_attn at the baseline workload. The principle's MoE model has no dense term.
    """
    if not cases:
        raise ValueError("a model needs at least one module")
    positions = max(case.baseline_positions for case, _ in cases)
    terms: dict[str, int] = {}
    work = {}
    for case, granularity in cases:
        if case.module == "attention" and granularity is not None and case.subject.attention is not None:
            group = case.subject.attention.group if granularity.packed else 1
            terms["attention"] = attention_term(granularity.tile(positions * group), group)
        else:
            terms |= principle_terms(case, figures.balance, granularity)
        work[case.module] = module_work(case, granularity)
    ffn = next((case for case, _ in cases if case.module != "attention"), cases[0][0])
    edges = [n for case, granularity in cases for n in edge_positions(case, granularity)]
    roofline = predict_boundary(work, figures.calibration, tolerance, positions, edges=edges)
    return Predicted(idle_compute(ffn, figures.balance), closed_form(**terms), roofline, figures.basis)


def model_modules(model: Model) -> list[str]:
    """The modules that bound a model by the principle: MoE and attention, or dense and attention."""
    ffn = "moe" if model.moe is not None else "dense"
    return [m for m in (ffn, "attention") if getattr(model, m) is not None]
