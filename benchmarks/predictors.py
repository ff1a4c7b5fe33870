"""Predictors of N_max and T(N) on recorded GPU curves that they have not seen: python benchmarks/predictors.py [dtype] [moe|dense].

Closed form, idle compute, tile roofline on datasheet peaks, calibrated tile roofline, and the nearest recorded shape scaled by its
bytes. Held out: shapes (four folds), releases (fitted on the oldest, judged on the newest), GPUs (fitted on H100, judged on
H200 from datasheet ratios). Distances of N_max are in steps of the table's grid.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from pytest_nfp import catalog
from pytest_nfp.principle import Calibration, branch_term, moe_term
from pytest_nfp.recordings import aiconfigurator, library
from pytest_nfp.recordings.fit import NOTHING, HeldOut, Joined, NoFit, by_calibration, fit, folds, join, judge

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
    if j.granularity is None:
        gpu = catalog.gpu(c.gpu)
        return step_curve(j, gpu.balance * library.WEIGHT_BYTES[c.dtype] / 2)
    tile, limit = j.granularity.tile(c.base), j.granularity.branch_limit(c.base)
    terms = [moe_term("balanced", tile, c.experts, c.top_k, 1), *([branch_term(limit, 1)] if limit else [])]
    return step_curve(j, min(terms))


def nearest(seen: Sequence[Joined]) -> Callable[[Joined], list[float]]:
    """The recorded curve of the nearest shape (by the logarithm of its dimensions), scaled by the bytes of the weights."""
    import math

    def distance(a: Joined, b: Joined) -> float:
        return sum(abs(math.log(x / y)) for x, y in zip(a.curve.shape, b.curve.shape, strict=True))

    def predict(j: Joined) -> list[float]:
        near = min(seen, key=lambda s: distance(s, j))
        known = {p.positions: p.latency_us for p in near.curve.points}
        scale = j.curve.weight_bytes / near.curve.weight_bytes
        grid = sorted(known)
        return [known[min(grid, key=lambda m: abs(m - p.positions))] * scale for p in j.curve.points]

    return predict


def held_out_shapes(
    joined: Sequence[Joined], make: Callable[[Sequence[Joined]], Callable[[Joined], Sequence[float]]]
) -> HeldOut:
    total = NOTHING
    for seen, unseen in folds(joined):
        total += judge(unseen, make(seen))
    return total


WITHOUT: dict[str, dict[str, object]] = {
    "tile heights": {"tile": None},
    "thread blocks": {"blocks": 0.0},
    "activations apart": {"activations": 0.0},
}
"""What a part of the arithmetic stands on: without it, the part is absent from the fit too."""


def without(joined: Sequence[Joined], parts: Sequence[str]) -> list[Joined]:
    changed = {name: value for part in parts for name, value in WITHOUT[part].items()}
    return [replace(j, work=tuple(replace(w, **changed) for w in j.work)) for j in joined]  # type: ignore[arg-type]


def table(gpu: str, framework: str, module: library.Module, dtype: str) -> None:
    found = [c for c in library.read_all([gpu], module, dtype).curves if c.framework == framework]
    curves = [c for c in found if c.distribution in ("", "balanced")]
    joined, left_out = join(curves)
    releases = sorted({j.curve.release for j in joined})
    if len(joined) < 8:
        return
    device = catalog.gpu(gpu)
    print(f"{gpu} {framework} {', '.join(releases)} {module} {dtype}; left out: {left_out or 'none'}")
    print(f"  {'predictor':<44} {'n':>5}  {'T error':>7}  {'median':>6}  {'<=1':>6}  {'exit':>6}")
    row("closed form", judge(joined, closed_form), True)
    row("tile roofline, datasheet", judge(joined, by_calibration(Calibration(device.peak_flops, device.bandwidth))))
    row("nearest recorded shape, held-out shapes", held_out_shapes(joined, nearest))
    try:
        row(
            "tile roofline, calibrated, held-out shapes",
            held_out_shapes(joined, lambda seen: by_calibration(fit(seen))),
        )
        if module == "moe":
            for parts in (*((part,) for part in WITHOUT), tuple(WITHOUT)):
                name = f"  the same without {parts[0] if len(parts) == 1 else 'all three'}"
                row(name, held_out_shapes(without(joined, parts), lambda seen: by_calibration(fit(seen))))
        if len(releases) > 1:
            old, new = ([j for j in joined if j.curve.release == r] for r in (releases[0], releases[-1]))
            row(f"  the same, fitted on {releases[0]}, judged on {releases[-1]}", judge(new, by_calibration(fit(old))))
        c = fit(joined)
        for law in sorted({x.distribution for x in found} - {"", "balanced"}):
            skewed, _ = join([x for x in found if x.distribution == law])
            row(f"  the same numbers on {law}", judge(skewed, by_calibration(c)))
    except NoFit as reason:
        print(f"  no calibration: {reason}")


def other_gpu(framework: str, module: library.Module, dtype: str) -> None:
    """Fitted on H100, judged on H200, whose bandwidth alone differs on the datasheet."""
    sides = []
    for gpu in ("h100", "h200"):
        curves = [c for c in library.read_all([gpu], module, dtype).curves if c.framework == framework]
        sides.append(join([c for c in curves if c.distribution in ("", "balanced")])[0])
    h100, h200 = catalog.gpu("h100"), catalog.gpu("h200")
    c = fit(sides[0])
    moved = replace(
        c, flops=c.flops * h200.peak_flops / h100.peak_flops, bandwidth=c.bandwidth * h200.bandwidth / h100.bandwidth
    )
    row(f"{framework} {module}, fitted on H100, judged on H200", judge(sides[1], by_calibration(moved)))


def main() -> None:
    dtype = sys.argv[1] if len(sys.argv) > 1 else "bf16"
    every: tuple[library.Module, ...] = ("moe", "dense")
    modules = [m for m in every if m in sys.argv[2:] or len(sys.argv) < 3]
    for module in modules:
        for gpu in GPUS:
            for framework in dict.fromkeys(b.framework for b in aiconfigurator.releases(gpu, module)):
                table(gpu, framework, module, dtype)
    print("another GPU")
    for module in modules:
        for framework in ("vllm", "sglang"):
            other_gpu(framework, module, dtype)


if __name__ == "__main__":
    main()
