"""Does the last-level cache belong into the tile roofline? Cross-validated over shapes, with and without it.

    python benchmarks/cache_residency.py [--gpu h200] [--module moe]      (all of it: about 50 minutes)

Two effects, each as a change of the bytes that reach the memory:

between forwards   a recording runs one layer again and again, so weights that fit stay in the cache: of W bytes,
                   min(W, max(0, 2C - W)) cost a share s of an uncached byte (C: a share of the cache; whole up to C, none from 2C)
within a forward   an expert's second tile finds its weights in the cache if they fit: only max(0, 1 - C/W_expert) is read again

s and C are scanned and the best row is what a fit could reach at most: it has seen the held-out shapes. Large are the curves
that the library keeps, small those that its filters leave out for the cache. BF16, balanced, kernels Triton and GEMM.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product

from pytest_nfp.calibration.cross_validation import NOTHING, HeldOut, judge
from pytest_nfp.calibration.fit import NoFit, by_calibration, fit, folds, leftover
from pytest_nfp.calibration.kernel_work import Joined, join
from pytest_nfp.recordings import library, tables

CACHE = {"a100": 40e6, "h100": 50e6, "h200": 50e6, "l40s": 96e6, "b200": 126e6}
"""Bytes of L2, by NVIDIA's architecture white papers."""
SMALL_EVERY = 4
"""One small GEMM in so many: there are thirty times as many as large ones, and no more to say."""

Change = Callable[[Joined], Joined]


def between_forwards(share: float, part: float) -> Change:
    def change(j: Joined) -> Joined:
        cache = CACHE[j.curve.gpu] * part
        work = []
        for w in j.work:
            weights = w.bytes_once - w.activations
            saved = (1 - share) * min(weights, max(0.0, 2 * cache - weights))
            work.append(replace(w, bytes_once=w.bytes_once - saved))
        return replace(j, work=tuple(work))

    return change


def within_a_forward(part: float) -> Change:
    def change(j: Joined) -> Joined:
        expert = j.curve.weight_bytes / j.curve.experts
        again = max(0.0, 1 - CACHE[j.curve.gpu] * part / expert)
        return replace(j, work=tuple(replace(w, bytes_again=w.bytes_again * again) for w in j.work))

    return change


def said(found: HeldOut) -> str:
    return f"{found.error:>7.1%} {found.within_one_step:>5.0%}" if found.steps else f"{'-':>7} {'-':>5}"


def held_out(
    large: Sequence[Joined], small: Sequence[Joined], change: Change, on_small: bool, with_residuals: bool
) -> str:
    """Errors on large and small curves of shapes that were not fitted; on_small: the fit sees small ones too."""
    keep, cached = NOTHING, NOTHING
    small_names = {id(j) for j in small}
    both = [*large, *small]
    changed = {id(j): change(j) for j in both}
    for seen, unseen in folds(both):
        fitted_on = [changed[id(j)] for j in seen if on_small or id(j) not in small_names]
        try:
            c = fit(fitted_on)
        except NoFit as reason:
            return f"no fit: {reason}"
        predict = by_calibration(c, leftover(fitted_on, c)[1] if with_residuals else None)
        for j in unseen:
            one = judge([changed[id(j)]], predict)
            if id(j) in small_names:
                cached += one
            else:
                keep += one
    return f"{said(keep)}   {said(cached)}"


def table(job: tuple[str, str, library.Module]) -> str:
    gpu, framework, module = job
    lines = []
    family = "triton" if module == "moe" else "gemm"

    def curves(in_cache: bool) -> list[Joined]:
        found = library.read_all([gpu], module, "bf16", in_cache).curves
        mine = [c for c in found if c.framework == framework and c.family == family]
        return join([c for c in mine if c.distribution in ("", "balanced")])[0]

    large = curves(False)
    if not large:
        return f"{gpu} {framework} {family}: no curves"
    kept = {(j.curve.shape, j.curve.release) for j in large}
    small = [j for j in curves(True) if (j.curve.shape, j.curve.release) not in kept]
    if module == "dense":
        small = small[::SMALL_EVERY]
    lines.append(f"{gpu} {framework} {family}: {len(large)} large curves, {len(small)} small")
    lines.append(f"  {'':<64}{'large: T, <=1':>13}   {'small: T, <=1':>13}")

    # The residuals of a GEMM are a system of its recorded points: too many with the small ones.
    for residuals in (False, True) if module == "moe" else (False,):
        name = "with residuals, " if residuals else ""

        def line(label: str, change: Change, on_small: bool, residuals: bool = residuals, name: str = name) -> None:
            lines.append(f"  {name + label:<64}{held_out(large, small, change, on_small, residuals)}")

        line("no cache, fitted on large", lambda j: j, False)
        line("no cache, fitted on both", lambda j: j, True)
        for share, part in product((0.0, 0.25, 0.5), (0.5, 1.0)):
            line(f"between forwards, s={share}, C={part} L2, on both", between_forwards(share, part), True)
        if module == "moe":
            for part in (0.25, 0.5, 1.0):
                line(f"within a forward, C={part} L2, on large", within_a_forward(part), False)
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--module", choices=("moe", "dense"), action="append")
    p.add_argument("--gpu", choices=tuple(CACHE), action="append")
    given = p.parse_args()
    modules: Sequence[library.Module] = given.module or ("moe", "dense")
    jobs = [
        (gpu, framework, module)
        for module in modules
        for gpu in given.gpu or CACHE
        for framework in dict.fromkeys(b.framework for b in tables.releases(gpu, module))
    ]
    with ProcessPoolExecutor() as pool:
        for found in pool.map(table, jobs):
            print(found, flush=True)


if __name__ == "__main__":
    main()
