"""What a fit is made from: a curve, the map of its release's own rule, and the work of its kernel at each point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_nfp import catalog
from pytest_nfp.granularity import ExpertShape, Granularity, Query, RuleUnknown, device_facts, read_many
from pytest_nfp.predict.residuals import Place, setting_at
from pytest_nfp.principle import attention_work, dense_work, moe_work
from pytest_nfp.principle.tile_roofline import Work
from pytest_nfp.recordings.library import WEIGHT_BYTES, RecordedCurve

LAST_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Joined:
    """A curve with what its kernel does at each point."""

    curve: RecordedCurve
    """The recorded or measured curve."""
    granularity: Granularity | None
    """The map of the release's own rule. None: the kernel's library publishes no rule."""
    work: tuple[Work, ...]
    """The work of the kernel at each point."""
    places: tuple[Place, ...]
    """The place among the residuals of each point."""


def join(curves: Sequence[RecordedCurve]) -> tuple[list[Joined], dict[str, int]]:
    """The curves with their maps, and by reason the number of curves that were left out.

    A curve is left out if the tile rule of its kernel is unknown.
    """
    left_out: dict[str, int] = {}
    triton = [c for c in curves if c.family == "triton"]
    queries = [
        Query(
            c.framework,
            c.release,
            device_facts(catalog.gpu(c.gpu)),
            ExpertShape(c.experts, c.width, c.hidden, c.top_k),
            c.dtype,
        )
        for c in triton
    ]
    maps = dict(zip(triton, read_many(queries), strict=True))
    joined = []
    for curve in curves:
        rule = maps.get(curve)
        if isinstance(rule, RuleUnknown):
            reason = f"the rule is unknown: {rule}"
            left_out[reason] = left_out.get(reason, 0) + 1
        else:
            joined.append(join_one(curve, rule))
    return joined, left_out


def join_one(curve: RecordedCurve, granularity: Granularity | None) -> Joined:
    """The curve with its kernel's work and place at each of its points."""
    rows, on_cpu = [p.positions for p in curve.points], curve.gpu == "cpu"
    if curve.module == "dense":
        shape: tuple[int, ...] = (curve.width, curve.hidden)
        places = [Place(shape, m, on_cpu=on_cpu) for m in rows]
    elif curve.module == "attention":
        places = [Place((curve.experts, curve.width, curve.context), m, on_cpu=on_cpu) for m in rows]
    elif on_cpu:
        # Skewed tokens all take the same k experts, as under balanced routing over k experts.
        active = curve.top_k if curve.routing == "skewed" else curve.experts
        places = [Place((active, curve.top_k, curve.hidden, curve.width), m, on_cpu=True) for m in rows]
    else:
        shape = (curve.experts, curve.top_k, curve.hidden, curve.width)
        places = [Place(shape, m, setting_at(granularity, m)) for m in rows]
    return Joined(curve, granularity, work_of(curve, granularity), tuple(places))


def work_of(curve: RecordedCurve, granularity: Granularity | None) -> tuple[Work, ...]:
    """The work of the kernel at each of the curve's points: for tokens under its routing, or for rows of a GEMM."""
    s, points = WEIGHT_BYTES[curve.dtype], [p.positions for p in curve.points]
    if curve.module == "dense":
        return tuple(dense_work(rows, 1, [(curve.width, curve.hidden)], s, None) for rows in points)
    tile = granularity.tile if granularity is not None else None
    if curve.module == "attention":
        # The last query block of torch's CPU kernel ends with its rows.
        heads, cached, padded = curve.experts, curve.context, curve.gpu != "cpu"
        return tuple(attention_work(n, 1, cached, heads, heads, curve.width, s, tile, False, padded) for n in points)
    columns = granularity.parameter_rule("BLOCK_SIZE_N") if granularity is not None else None
    dimensions = (curve.experts, curve.top_k, curve.hidden, curve.width)
    return tuple(moe_work(rows, 1, curve.routing, *dimensions, s, tile, 3, columns) for rows in points)
