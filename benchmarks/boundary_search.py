"""The adaptive boundary search against the reference protocol: python benchmarks/boundary_search.py [cases] | --cpu TEXT.

Simulated machines (pytest_nfp.testing): staircases, rooflines, holes and mixtures of them, noise of 0.5 to 5%, spikes, cold starts.
The reference protocol measures every N of the range (50 warm-ups, 10 rounds of 200 forwards); its samples are drawn with numpy
from the same noise model. Then A/A and A/B pairs through the same judgement as a baseline, and other ways to sample the same
curve. --cpu: real forwards of the CPU suites instead.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from pytest_nfp.baselines import CaseBaseline, measured_of
from pytest_nfp.comparison import slack
from pytest_nfp.measure import PROTOCOLS, sweep
from pytest_nfp.measure.protocol import PAPER_FORWARDS
from pytest_nfp.principle import Boundary, Point, find_boundary
from pytest_nfp.principle.boundary import bracketed
from pytest_nfp.run.own_kernel import own_case
from pytest_nfp.testing import Latency, Noise, Simulated, roofline, staircase, with_hole
from pytest_nfp.verdict import Evidence, judge_boundary

TOLERANCE, MATCH_TOLERANCE = 0.20, 0.15


@dataclass
class Experiment:
    """One simulated machine with one kernel, on 1..end; edges: of its granularity map, if it has one."""

    kind: str
    latency: Latency
    end: int
    noise: Noise
    edges: list[int]


def experiments(count: int, seed: int) -> list[Experiment]:
    """Random machines; every second one comes with the edges of its granularity map, the others without a map."""
    r = random.Random(seed)
    made = []
    for i in range(count):
        end = r.choice((48, 64, 96, 128, 160))
        noise = Noise(
            jitter=r.uniform(0.005, 0.05),
            spikes=r.choice((0.0, 0.005, 0.02)),
            cold=r.choice((0.0, 0.3)),
        )
        kind = ("staircase", "roofline", "hole", "mixture")[i % 4]
        tile, height = r.choice((4, 8, 16, 32, 64)), r.uniform(0.04, 1.0)
        steps, slope = staircase(tile, height), roofline(r.uniform(3, end), r.uniform(1.5, 16))
        edges = list(range(tile, end, tile))
        match kind:
            case "staircase":
                latency: Latency = steps
            case "roofline":
                latency, edges = slope, []
            case "hole":
                first = r.randint(min(tile, 32) + 1, end - 8)
                latency = with_hole(steps, first, min(end, first + r.randint(2, 16)), r.uniform(1.0, 1.15))
            case _:
                latency = lambda n, a=steps, b=slope: a(n) * b(n) / 100  # noqa: E731
        made.append(Experiment(kind, latency, end, noise, edges if i % 8 < 4 else []))
    return made


def adaptive(e: Experiment, seed: int) -> tuple[Boundary, int, bool]:
    """(boundary, forwards, whether the measurement is trusted)."""
    machine = Simulated(e.latency, e.noise, seed)
    grid = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, e.end, *e.edges, *(n + 1 for n in e.edges)}
    curve = sweep(machine.forward, [n for n in grid if n <= e.end], machine.device(), PROTOCOLS["adaptive"], seed=seed)
    found = curve.boundary(TOLERANCE)
    assert found is not None
    return found, machine.calls, not curve.invalid


def reference(e: Experiment, seed: int) -> Boundary:
    """The reference protocol on every N of the range, in order."""
    rng = np.random.default_rng(seed)
    points, elapsed = [], 0.0
    for n in range(1, e.end + 1):
        exact = e.latency(n)
        samples = exact * rng.lognormal(0, e.noise.jitter, (10, 200))
        samples = np.where(rng.random((10, 200)) < e.noise.spikes, samples * e.noise.spike, samples)
        samples *= 1 + e.noise.drift * elapsed
        elapsed += exact * PAPER_FORWARDS / 1e6
        points.append(Point(n, float(np.median(np.median(samples, axis=1)))))
    return find_boundary(points, TOLERANCE)


def exact(e: Experiment) -> Boundary:
    return find_boundary([Point(n, e.latency(n)) for n in range(1, e.end + 1)], TOLERANCE)


def is_decided(b: Boundary) -> bool:
    """Whether what noise leaves open is within the match tolerance: a verdict can be given."""
    low, high = b.n_max_interval
    return not b.undecided or (high is not None and high - low <= slack(low, (), 1, MATCH_TOLERANCE))


def search(count: int, seed: int) -> None:
    made = experiments(count, seed)
    started = time.perf_counter()
    rows = [(e, *adaptive(e, i)) for i, e in enumerate(made)]
    seconds = time.perf_counter() - started
    decided = same = inside = exactly = paper_exactly = first_exit = trusted = single = single_same = 0
    shares = []
    for i, (e, b, forwards, sound) in enumerate(rows):
        trusted += sound
        shares.append(forwards / (e.end * PAPER_FORWARDS))
        paper, truth = reference(e, i), exact(e)
        paper_exactly += paper.n_max == truth.n_max
        if not is_decided(b):
            continue
        low, high = b.n_max_interval
        if low == high or (low == e.end and high is None):
            single += 1
            single_same += paper.n_max == b.n_max
        decided += 1
        same += paper.n_max == b.n_max
        inside += low <= paper.n_max <= (e.end if high is None else high)
        exactly += truth.n_max == b.n_max
        first_exit += truth.n_first_exit == b.n_first_exit
    print(f"{count} simulated cases, ranges of 48 to 160 positions, {seconds:.0f} s")
    print(f"  trusted                                   {trusted / count:.1%}")
    print(f"  undecided                                 {1 - decided / count:.1%}  (target: under 3%)")
    print(
        f"  of the decided, n_max of the reference lies in the interval: {inside / decided:.1%}  (target: at least 99%)"
    )
    print(f"    n_max by the medians is the same        {same / decided:.1%}")
    print(f"    {single / count:.1%} are known to the position; of these it is the same in {single_same / single:.1%}")
    print(
        f"  of the decided, n_max of the exact curve: {exactly / decided:.1%} (reference: {paper_exactly / count:.1%})"
    )
    print(f"  of the decided, n_first_exit of the exact curve: {first_exit / decided:.1%}")
    print(
        f"  forwards: 1/{1 / np.median(shares):.0f} of the reference's in the median, 1/{1 / max(shares):.0f} at most"
    )


def outcome(before: Latency, after: Latency, end: int, noise: Noise, seed: int) -> str:
    """A baseline measured on one machine, then the same question on another: the verdict's outcome."""
    grid = [1, 2, 4, 8, 16, 32, 64, 128, end]
    curves = []
    for latency, which in ((before, 2 * seed), (after, 2 * seed + 1)):
        machine = Simulated(latency, noise, which)
        positions = [n for n in grid if n <= end]
        curves.append(sweep(machine.forward, positions, machine.device(), PROTOCOLS["adaptive"], seed=which))
    old, new = (c.boundary(TOLERANCE) for c in curves)
    assert old is not None and new is not None
    stored = CaseBaseline(baseline_positions=1, measured=measured_of(curves[0], old, True, ""))
    case = own_case("cpu", "simulated")
    return judge_boundary(Evidence(case, curves[1], new, baseline=stored, match_tolerance=MATCH_TOLERANCE)).outcome


def pairs(count: int, seed: int) -> None:
    """A/A: how often a kernel that did not change is called changed. A/B: how often one that did is found."""
    r = random.Random(seed)
    noises = [Noise(r.uniform(0.005, 0.05), spikes=r.choice((0.0, 0.01))) for _ in range(count)]
    same = [
        outcome(e.latency, e.latency, e.end, n, i)
        for i, (e, n) in enumerate(zip(experiments(count, seed), noises, strict=True))
    ]
    print(
        f"A/A, {count} pairs: {same.count('FAIL') / count:.1%} false alarms (target: at most 0.5%), {same.count('UNDECIDED') / count:.1%} undecided"
    )
    changes: dict[str, Callable[[], tuple[Latency, Latency]]] = {
        "M_moe 16 to 32": lambda: (staircase(16, h := r.uniform(0.25, 1)), staircase(32, h)),
        "tile 64 to 128": lambda: (staircase(64, h := r.uniform(0.25, 1)), staircase(128, h)),
        "backend switch": lambda: (roofline(r.uniform(40, 80), 8), staircase(r.choice((4, 8)), r.uniform(0.25, 1), 80)),
    }
    for name, make in changes.items():
        made = [make() for _ in range(count // 3)]
        seen = [outcome(a, b, 160, noises[i], i) for i, (a, b) in enumerate(made)]
        print(f"A/B, {name}, {len(seen)} pairs: {seen.count('FAIL') / len(seen):.1%} found (target: at least 99%)")


def on_cpu(wanted: str) -> None:
    """Adaptive against the reference on real CPU forwards of the suites, in one run: minutes a case for the reference."""
    from pytest_nfp import backends, catalog
    from pytest_nfp.cases import Backend, expand
    from pytest_nfp.devices import find_device

    device, reason = find_device("cpu")
    if device is None:
        raise SystemExit(reason)
    print(
        "case                                                 reference  adaptive  interval   forwards   seconds  ratio"
    )
    for module in ("dense", "moe", "attention"):
        for model in (m for m in catalog.models() if m.device == "cpu"):
            for case in expand("cpu", Backend("torch", device.torch_release), module, model):  # type: ignore[arg-type]
                if wanted not in case.key:
                    continue
                prepared = backends.prepare(case, 0, device.cache_bytes)
                base = case.baseline_positions
                grid = sorted({base, *(n for n in (1, 2, 3, 4, 6, 8, 12, 16) if n >= base), 2 * base})
                found = []
                for name in ("paper", "adaptive"):
                    curve = sweep(
                        prepared.forward, grid, device, PROTOCOLS[name], TOLERANCE, base, turns=prepared.turns
                    )
                    found.append((curve.boundary(TOLERANCE), curve.counts))
                (paper, spent), (mine, cost) = found
                assert paper is not None and mine is not None
                print(
                    f"{case.key[:50]:<52} {paper.n_max:>9}  {mine.n_max:>8}  {bracketed(mine.n_max_interval)}"
                    f"  {cost['forwards']:>6}/{spent['forwards']}  {cost['seconds']:.1f}/{spent['seconds']:.1f}"
                    f"  1/{spent['seconds'] / cost['seconds']:.0f}",
                    flush=True,
                )


def side_by_side(count: int) -> None:
    """The same simulated curves sampled as others do: N one after another, a fixed count or a fixed time at each."""
    made = experiments(count, 7)
    rows: dict[str, list[tuple[bool, int]]] = {}
    for i, e in enumerate(made):
        truth = exact(e)
        b, forwards, _ = adaptive(e, i)
        low, high = b.n_max_interval
        rows.setdefault("adaptive search", []).append((low <= truth.n_max <= (high or e.end), forwards))
        for name, (warm, timed, statistic) in {
            # pytest-benchmark: at least five rounds, in fact as many as fit into a second; its min is what people compare.
            "pytest-benchmark, 1 s, min": (1, 10_000, min),
            "pytest-benchmark, 1 s, median": (1, 10_000, median),
            # triton.testing.do_bench: 25 ms of warm-up, 100 ms of timed forwards, median.
            "triton do_bench, 100 ms, median": (250, 1000, median),
        }.items():
            machine = Simulated(e.latency, e.noise, i)
            device, points = machine.device(), []
            for n in range(1, e.end + 1):
                run, share = machine.forward(n), 100 / e.latency(n)
                for _ in range(max(1, int(warm * share))):
                    device.time_us(run)
                points.append(Point(n, statistic(device.time_us(run) for _ in range(max(5, int(timed * share))))))
            rows.setdefault(name, []).append((find_boundary(points, TOLERANCE).n_max == truth.n_max, machine.calls))
    print(f"{count} simulated curves, every N measured where the sampler does not choose:")
    for name, results in rows.items():
        right = sum(ok for ok, _ in results) / len(results)
        print(
            f"  {name:<34} N_max right {right:.1%}, forwards {median(calls for _, calls in results):.0f} in the median"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", metavar="TEXT", help="real CPU forwards of the cases with this in their name, alone")
    given = parser.parse_args()
    if given.cpu is not None:
        on_cpu(given.cpu)
        return
    search(given.cases, given.seed)
    pairs(given.cases, given.seed)
    side_by_side(max(4, given.cases // 50))


if __name__ == "__main__":
    main()
