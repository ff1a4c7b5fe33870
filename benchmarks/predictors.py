"""Predictors of N_max and T(N) on recorded GPU curves that they have not seen.

    python benchmarks/predictors.py [--dtype bf16] [--module moe] [--gpu h200] [--ablate]

Closed form, idle compute, tile roofline on datasheet peaks, the nearest recorded shape scaled by its bytes, AIConfigurator's
own engine on tables without the shape, the calibrated tile roofline, and that with the residuals of other shapes. Held out:
shapes (four folds), releases (fitted on the oldest, judged on the newest), GPUs (fitted on H100, judged on H200 from datasheet
ratios). Distances of N_max are in steps of the table's grid.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from packaging.version import Version

from pytest_nfp import catalog
from pytest_nfp.calibration.cross_validation import NOTHING, HeldOut, judge
from pytest_nfp.calibration.fit import NoFit, by_calibration, cross_validate, fit, folds, leftover
from pytest_nfp.calibration.kernel_work import Joined, join
from pytest_nfp.predict import residuals
from pytest_nfp.principle import Calibration, active_experts, branch_term, moe_term, n_idle_dense, n_idle_moe
from pytest_nfp.recordings import library, tables

GPUS = ("h100", "h200", "l40s", "a100", "b200")


def row(name: str, found: HeldOut, is_boundary_alone: bool = False) -> None:
    if not found.steps:
        return
    error = "" if is_boundary_alone else f"{found.error:.1%}"
    exits = sum(s <= 1 for s in found.exit_steps) / len(found.exit_steps)
    print(
        f"  {name:<44} {len(found.steps):>5}  {error:>7}  {median(found.steps):>6g}  {found.within_one_step:>6.0%}  {exits:>6.0%}"
    )


def step_curve(j: Joined, n_max: float) -> list[float]:
    """A curve that is flat to n_max and outside beyond, for a predictor that gives N_max alone."""
    return [1.0 if p.positions <= max(n_max, j.curve.base) else 2.0 for p in j.curve.points]


def closed_form(j: Joined) -> list[float]:
    c = j.curve
    if c.module == "dense":
        gpu = catalog.gpu(c.gpu)
        return step_curve(j, gpu.peak_flops_of(c.dtype) / gpu.bandwidth * library.WEIGHT_BYTES[c.dtype] / 2)
    assert j.granularity is not None
    tile, limit = j.granularity.tile(c.base), j.granularity.branch_limit(c.base)
    terms = [moe_term("balanced", tile, c.experts, c.top_k, 1), *([branch_term(limit, 1)] if limit else [])]
    return step_curve(j, min(terms))


def idle_compute(j: Joined) -> list[float]:
    c, gpu = j.curve, catalog.gpu(j.curve.gpu)
    balance, s = gpu.peak_flops_of(c.dtype) / gpu.bandwidth, library.WEIGHT_BYTES[c.dtype]
    if c.module == "dense":
        return step_curve(j, n_idle_dense(balance, s))
    active = round(active_experts("balanced", c.base, c.experts, c.top_k))
    return step_curve(j, min(1e9, n_idle_moe(balance, s, c.hidden, c.width, c.top_k, active, 1)))


def nearest(seen: Sequence[Joined]) -> Callable[[Joined], list[float]]:
    """The recorded curve of the nearest shape (by the logarithm of its dimensions), scaled by the bytes of the weights."""

    def distance(a: Joined, b: Joined) -> float:
        return sum(abs(math.log(x / y)) for x, y in zip(a.curve.shape, b.curve.shape, strict=True))

    def predict(j: Joined) -> list[float]:
        near = min(seen, key=lambda s: distance(s, j))
        known = {p.positions: p.latency_us for p in near.curve.points}
        scale = j.curve.weight_bytes / near.curve.weight_bytes
        grid = sorted(known)
        return [known[min(grid, key=lambda m: abs(m - p.positions))] * scale for p in j.curve.points]

    return predict


def repeated(joined: Sequence[Joined], others: Sequence[library.RecordedCurve]) -> HeldOut:
    """The same shapes as another table has them: what a predictor could reach that knew every curve but for its noise."""
    known = {c.shape: {p.positions: p.latency_us for p in c.points} for c in others}
    total = NOTHING
    for j in joined:
        other = known.get(j.curve.shape)
        if other is None or j.curve.base not in other:
            continue
        both = [i for i, p in enumerate(j.curve.points) if p.positions in other]
        points = tuple(j.curve.points[i] for i in both)
        if len(points) < library.MIN_POINTS:
            continue
        cut = replace(j, curve=replace(j.curve, points=points))
        total += judge([cut], lambda c, other=other: [other[p.positions] for p in c.curve.points])  # type: ignore[misc]
    return total


QUANT = {"bf16": "bfloat16", "fp8": "fp8", "fp8-block": "fp8_block", "int4": "int4_wo"}


def engine(seen: Sequence[Joined]) -> Callable[[Joined], list[float]]:
    """AIConfigurator's own engine, on the tables of these curves' releases without any other shape."""
    import aiconfigurator_core
    import pyarrow
    import pyarrow.compute as pc
    from aiconfigurator_core.sdk import common
    from aiconfigurator_core.sdk.operations import GEMM, MoE
    from aiconfigurator_core.sdk.perf_database import get_database_view
    from pyarrow import parquet

    systems = Path(str(aiconfigurator_core.__file__)).parent / "systems"
    first = seen[0].curve
    op, system = tables.OPS[first.module], tables.SYSTEMS[first.gpu]
    quant = getattr(common.GEMMQuantMode if first.module == "dense" else common.MoEQuantMode, QUANT[first.dtype])
    # The engine keeps a database by its path: a path of its own for each fold.
    root = Path(tempfile.mkdtemp(prefix="predictors-"))
    shutil.copy(systems / f"{system}.yaml", root)
    databases: dict[str, Any] = {}
    for release in {j.curve.release for j in seen}:
        source = systems / "data" / system / op / first.framework / release
        target = root / "data" / system / op / first.framework / release
        target.mkdir(parents=True)
        shutil.copy(source / "collection_meta.yaml", target)
        table = parquet.read_table(source / f"{op}_perf.parquet")
        mine = [j.curve for j in seen if j.curve.release == release]
        keep: Any = None
        for key, values in shapes_of(mine):
            rows = pc.and_(pc.equal(table[key[0]], values[0]), pc.equal(table[key[1]], values[1]))
            for name, value in zip(key[2:], values[2:], strict=True):
                rows = pc.and_(rows, pc.equal(table[name], value))
            keep = rows if keep is None else pc.or_(keep, rows)
        kernels = pc.is_in(table["kernel_source"], value_set=pyarrow.array(sorted({c.kernel for c in mine})))
        parquet.write_table(table.filter(pc.and_(keep, kernels)), target / f"{op}_perf.parquet")
        databases[release] = get_database_view(
            system,
            first.framework,
            release,
            systems_paths=[str(root)],
            database_mode="HYBRID",
            shared_layer=False,
            allow_unlisted_version=True,
        )

    def predict(j: Joined) -> list[float]:
        c = j.curve
        database = databases.get(c.release) or next(iter(databases.values()))
        if c.module == "dense":
            op: Any = GEMM("g", 1.0, c.width, c.hidden, quant)
        else:
            op = MoE("m", 1.0, c.hidden, c.width * c.tp, c.top_k, c.experts, c.tp, 1, quant, c.distribution, 1)
        return [float(op._engine_query(database, x=p.positions)) * 1e3 for p in c.points]

    return predict


def by_engine(joined: Sequence[Joined]) -> HeldOut:
    """Held-out shapes by the engine; those that it has no neighbour for are left out, as the count of the row shows."""
    from aiconfigurator_core.sdk import errors

    total = NOTHING
    for seen, unseen in folds(joined):
        predict = engine(seen)
        for j in unseen:
            try:
                total += judge([j], predict)
            except (errors.EmpiricalNotImplementedError, errors.PerfDataNotAvailableError):
                continue
    return total


def shapes_of(curves: Sequence[library.RecordedCurve]) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """(columns, values) of each curve's shape in its table."""
    if curves[0].module == "dense":
        return [(("n", "k"), (c.width, c.hidden)) for c in curves]
    names = ("num_experts", "topk", "hidden_size", "inter_size", "moe_tp_size", "moe_ep_size")
    return [(names, (c.experts, c.top_k, c.hidden, c.width * c.tp, c.tp, 1)) for c in curves]


WITHOUT: dict[str, dict[str, object]] = {
    "tile heights": {"tile": None},
    "thread blocks": {"blocks": 0.0},
    "activations apart": {"activations": 0.0},
}
"""What a part of the arithmetic stands on: without it, the part is absent from the fit too."""


def without(joined: Sequence[Joined], parts: Sequence[str]) -> list[Joined]:
    changed = {name: value for part in parts for name, value in WITHOUT[part].items()}
    return [replace(j, work=tuple(replace(w, **changed) for w in j.work)) for j in joined]  # type: ignore[arg-type]


def table(gpu: str, framework: str, module: library.Module, dtype: str, ablate: bool) -> None:
    found = [c for c in library.read_all([gpu], module, dtype).curves if c.framework == framework]
    for family in sorted({c.family for c in found}):
        mine = [c for c in found if c.family == family]
        joined, left_out = join([c for c in mine if c.distribution in ("", "balanced")])
        if len({j.curve.shape for j in joined}) < 8:
            continue
        releases = sorted({j.curve.release for j in joined})
        print(f"{gpu} {framework} {', '.join(releases)} {family} {dtype}; left out: {left_out or 'none'}")
        print(f"  {'predictor':<44} {'n':>5}  {'T error':>7}  {'median':>6}  {'<=1':>6}  {'exit':>6}")
        rows(joined, mine, ablate)
        newest = [j for j in joined if j.curve.release == max(releases, key=Version)]
        for name, others in repeats(newest[0].curve):
            row(f"  as {name} recorded the same shape", repeated(newest, others))


def repeats(mine: library.RecordedCurve) -> list[tuple[str, list[library.RecordedCurve]]]:
    """Other tables of the same kernel: a framework's other releases, and any table of a GEMM, which is a library's."""
    found: dict[str, list[library.RecordedCurve]] = {}
    for c in library.read_all([mine.gpu], mine.module, mine.dtype).curves:
        is_mine = (c.framework, c.release) == (mine.framework, mine.release)
        is_same = c.family == mine.family and (c.framework == mine.framework or c.module == "dense")
        if is_same and not is_mine and c.distribution == mine.distribution:
            found.setdefault(f"{c.framework} {c.release}", []).append(c)
    return list(found.items())


def rows(joined: list[Joined], found: Sequence[library.RecordedCurve], ablate: bool) -> None:
    first = joined[0].curve
    device = catalog.gpu(first.gpu)
    if first.module == "dense" or joined[0].granularity is not None:
        row("closed form", judge(joined, closed_form), True)
    row("idle compute", judge(joined, idle_compute), True)
    peaks = Calibration(device.peak_flops_of(first.dtype), device.bandwidth)
    row("tile roofline, datasheet", judge(joined, by_calibration(peaks)))
    row("nearest recorded shape", cross_validate(joined, nearest))
    row("AIConfigurator's engine, where it answers", by_engine(joined))
    try:
        row("tile roofline, calibrated", cross_validate(joined, roofline))
        row("tile roofline, calibrated, with residuals", cross_validate(joined))
        if ablate:
            ablations(joined)
        releases = sorted({j.curve.release for j in joined})
        if len(releases) > 1:
            old, new = ([j for j in joined if j.curve.release == r] for r in (releases[0], releases[-1]))
            row(f"  fitted on {releases[0]}, judged on {releases[-1]}", judge(new, with_residuals(old)))
        c = fit(joined)
        left = leftover(joined, c)[1]
        for law in sorted({x.distribution for x in found} - {"", "balanced"}):
            skewed, _ = join([x for x in found if x.distribution == law])
            row(f"  the roofline on {law}", judge(skewed, by_calibration(c)))
            row(f"  with the balanced residuals on {law}", judge(skewed, by_calibration(c, left)))
    except NoFit as reason:
        print(f"  no calibration: {reason}")


def roofline(seen: Sequence[Joined]) -> Callable[[Joined], list[float]]:
    return by_calibration(fit(seen))


def with_residuals(seen: Sequence[Joined]) -> Callable[[Joined], list[float]]:
    c = fit(seen)
    return by_calibration(c, leftover(seen, c)[1])


COORDINATES = {
    "moe": {"the tile's other parameters": range(7, 12), "the padding": range(6, 7)},
    "dense": {"rows up to 16, 64, 128": range(3, 6), "the last wave": range(6, 8)},
}
"""Coordinates of a place, left out of the residuals together."""


def ablations(joined: list[Joined]) -> None:
    """The same without a part: of the roofline's arithmetic, or of the residuals' coordinates."""
    module = joined[0].curve.module
    if joined[0].granularity is not None:
        for parts in (*((part,) for part in WITHOUT), tuple(WITHOUT)):
            name = parts[0] if len(parts) == 1 else "all three"
            row(f"  the roofline without {name}", cross_validate(without(joined, parts), roofline))
    fits: dict[tuple[int, ...], Calibration] = {}

    def remembered(seen: Sequence[Joined]) -> Callable[[Joined], list[float]]:
        key = tuple(id(j) for j in seen)
        if key not in fits:
            fits[key] = fit(seen)
        return by_calibration(fits[key], leftover(seen, fits[key])[1])

    whole = residuals.coordinates
    for name, left_out in COORDINATES[module].items():
        residuals.coordinates = lambda place, processors, left_out=left_out: [  # type: ignore[misc]
            0.0 if i in left_out else v for i, v in enumerate(whole(place, processors))
        ]
        row(f"  the residuals without {name}", cross_validate(joined, remembered))
    residuals.coordinates = whole


def other_gpu(framework: str, module: library.Module, dtype: str) -> None:
    """Fitted on H100, judged on H200, whose bandwidth alone differs on the datasheet."""
    sides = []
    for gpu in ("h100", "h200"):
        curves = [c for c in library.read_all([gpu], module, dtype).curves if c.framework == framework]
        mine = [c for c in curves if c.distribution in ("", "balanced") and c.family in ("gemm", "triton")]
        sides.append(join(mine)[0])
    h100, h200 = catalog.gpu("h100"), catalog.gpu("h200")
    c = fit(sides[0])
    moved = replace(
        c, flops=c.flops * h200.peak_flops / h100.peak_flops, bandwidth=c.bandwidth * h200.bandwidth / h100.bandwidth
    )
    row(f"{framework} {module}, fitted on H100, judged on H200", judge(sides[1], by_calibration(moved)))
    left = leftover(sides[0], c)[1]
    row("  with the residuals of H100", judge(sides[1], by_calibration(moved, left)))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dtype", choices=tuple(QUANT), default="bf16")
    p.add_argument("--module", choices=("moe", "dense"), action="append")
    p.add_argument("--gpu", choices=GPUS, action="append")
    p.add_argument("--ablate", action="store_true", help="also each part of the arithmetic left out")
    given = p.parse_args()
    modules: Sequence[library.Module] = given.module or ("moe", "dense")
    for module in modules:
        for gpu in given.gpu or GPUS:
            for framework in dict.fromkeys(b.framework for b in tables.releases(gpu, module)):
                table(gpu, framework, module, given.dtype, given.ablate)
    for module in modules:
        print(f"left out of the {module} tables, curves (power laws are counted too)")
        for reason, count in library.read_all(given.gpu or GPUS, module, given.dtype).left_out.items():
            print(f"  {count:>6}  {reason}")
    if given.gpu is None:
        print("another GPU")
        for module in modules:
            for framework in ("vllm", "sglang"):
                other_gpu(framework, module, given.dtype)


if __name__ == "__main__":
    main()
