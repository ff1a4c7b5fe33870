"""A measured model against its measured modules: each part by the kernel that the engine runs, alone, on the same device.

    T_composed(N) = sum over parts of  count * T_part(N)  +  rest        rest = max(0, T_model(N0) - sum at N0)

The rest is norms, rotary embedding and what lies between the modules; it is taken as constant, so that whatever of it grows
with N shows as a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from pytest_nfp import frameworks
from pytest_nfp.backends import REFUSALS, Unsupported, prepare_on
from pytest_nfp.cases import Backend, Case
from pytest_nfp.curves.curve import Curve
from pytest_nfp.devices import Device
from pytest_nfp.frameworks import DRAFTS
from pytest_nfp.granularity import Granularity
from pytest_nfp.granularity.artifacts import installed_release
from pytest_nfp.measure.sweep import sweep_module
from pytest_nfp.predict import Figures, Predicted, module_latency, whole_models, widest
from pytest_nfp.predict.whole_models import Part
from pytest_nfp.principle import Boundary, Point, find_boundary

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


ATTEMPTS = 3
"""Load and drift pass: a part is measured again."""
SMALL = 0.05
"""A part of at most this share of T(N0) moves no boundary, whatever its noise."""


class NotComposed(Exception):
    """A part could not be measured; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Composition:
    """parts: microseconds of each part in one forward at each N, its count included. rest_us: what T(N0) has beyond them.

    points: the composed curve. steps: how far its N_max, as the grid knows it, is from the interval of the model's; 0 where they
    overlap. limiting: the part whose time grows most across the composed boundary. error: median of |composed / measured - 1|.
    """

    parts: dict[str, dict[int, float]]
    rest_us: float
    points: tuple[Point, ...]
    boundary: Boundary
    steps: int
    error: float
    limiting: str


def parts_of(case: Case) -> list[Part]:
    """The parts of a model case, each as a case of the framework whose kernel the engine runs for it."""
    engine, on_cpu = case.backend, case.gpu == "cpu"
    attention = engine
    framework, torch = frameworks.get(engine.framework), frameworks.known()["torch"]
    if not on_cpu and framework is not None and (name := framework.engine_attention):
        attention = Backend(name, installed_release(name) or "")
    workload = whole_models.Workload(
        case.gpu, engine, engine, case.dtype, case.batch, case.context or 1, case.top_k, case.routing or "balanced"
    )
    found = []
    for part in whole_models.parts(case.subject, workload, merged=engine.framework != "transformers"):
        is_torch = engine.framework == "transformers" or (not on_cpu and part.case.module == "dense")
        backend = Backend("torch", "") if is_torch else attention if part.case.module == "attention" else engine
        kernel = torch.cpu_kernels[part.case.module][0] if is_torch and on_cpu else None
        found.append(replace(part, case=replace(part.case, backend=backend, kernel=kernel)))
    return found


def measure(
    case: Case, curve: Curve, device: Device, tolerance: float, seed: int, say: Callable[[str], None]
) -> Composition:
    """Measure the parts at the N of the model's curve. Raises NotComposed."""
    base = curve.baseline_positions
    own = {p.positions: p for p in curve.points}
    more = [n for n in own if base > 1 and n % base == 0]
    grid = sorted({base, *more, *(n for n in GRID if n in own and n >= base)})
    times: dict[str, dict[int, float]] = {}
    found = parts_of(case)
    for part in found:
        say(f"{case.key}: measuring its {part.name}")
        if _is_of_last_tokens(part, case):
            one = _times(part, [1, 2], 1, device, seed, own[base].latency_us)[1]
            times[part.name] = dict.fromkeys(grid, one)
            continue
        times[part.name] = _times(part, grid, base, device, seed, own[base].latency_us)
    grid = [n for n in grid if all(n in t for t in times.values())]
    rest = max(0.0, own[base].latency_us - sum(t[base] for t in times.values()))
    points = tuple(Point(n, rest + sum(t[n] for t in times.values())) for n in grid)
    composed = find_boundary(points, tolerance, base)
    after = next((n for n in grid if n > composed.n_max), grid[-1])
    limiting = max(times, key=lambda name: times[name][after] - times[name][base])
    of_model = curve.boundary(tolerance)
    measured = of_model.n_max_interval if of_model is not None else (base, None)
    if composed.n_max_interval[1] is None and measured[0] > grid[-1]:
        # A sum that ends within the tolerance before the model's boundary is no sum that agrees with it.
        raise NotComposed(f"its parts are known to N={grid[-1]} alone, and the model's N_max is {measured[0]} or more")
    error = median(abs(p.latency_us / own[p.positions].latency_us - 1) for p in points)
    return Composition(
        times, rest, points, composed, steps_apart(composed.n_max_interval, measured, grid), error, limiting
    )


@dataclass(frozen=True, slots=True)
class Beside:
    """What both predictors say of a measured model. steps: of each, from the measured interval. error: of the tile roofline, the
    median of |predicted / measured - 1| of T over N.
    """

    predicted: Predicted
    steps: dict[str, int]
    error: float


def predict(
    case: Case, curve: Curve, tolerance: float, figures_of: Callable[[Case], tuple[Figures, Granularity | None]]
) -> Beside:
    """Both predictors for a model whose curve is known: the first exiting module, and the sum of its parts' predicted times.

    figures_of: of a part's case, what its kernel is predicted with. N0 is the curve's for every module; the principle's MoE model
    has no dense term. Raises RuleUnknown where a part's rule or figures are unknown.
    """
    base = curve.baseline_positions
    own = {p.positions: p.latency_us for p in curve.points if p.positions >= base}
    known: list[whole_models.Known] = []
    latencies: dict[str, Callable[[int], float]] = {}
    for part in parts_of(case):
        figures, granularity = figures_of(part.case)
        known.append(whole_models.Known(part, figures, granularity))
        latency = module_latency(part.case, figures, granularity)
        latencies[part.name] = _times_of(part, latency, _is_of_last_tokens(part, case))
    spread = widest([k.figures.spread for k in known if k.figures.spread is not None])
    found = whole_models.predict_parts(known, latencies, base, sorted(own), tolerance, spread)
    of_model = curve.boundary(tolerance)
    measured = of_model.n_max_interval if of_model is not None else (base, None)
    n_max = {name: term["n_max"] for name, term in found.as_dict().items()}
    steps = {name: steps_apart((n, n), measured, sorted(own)) for name, n in n_max.items()}
    error = median(abs(sum(t(n) for t in latencies.values()) / us - 1) for n, us in own.items())
    return Beside(found, steps, error)


def _times_of(part: Part, latency: Callable[[int], float], is_constant: bool) -> Callable[[int], float]:
    return lambda n: part.count * latency(1 if is_constant else n)


def _is_of_last_tokens(part: Part, case: Case) -> bool:
    """An extended prefix has logits for the last token of each request alone."""
    return part.name == "head" and case.backend.framework != "transformers" and case.kernel != DRAFTS


def steps_apart(a: tuple[int, int | None], b: tuple[int, int | None], grid: Sequence[int]) -> int:
    """Steps of the grid from one interval to another; 0 where they overlap."""
    (_, last), (low, _) = sorted((a, b), key=lambda interval: interval[0])
    if last is None or low <= last:
        return 0
    return 1 + sum(last < n < low for n in grid)


def _times(part: Part, grid: Sequence[int], base: int, device: Device, seed: int, model_us: float) -> dict[int, float]:
    """Microseconds of a part at each N, its count included. model_us: the model's T(N0)."""
    try:
        prepared = prepare_on(device, part.case, seed)
        wrong = prepared.check(base) if prepared.check is not None else ""
    except (Unsupported, *REFUSALS) as reason:
        raise NotComposed(f"its {part.name} can't be measured alone: {reason}") from reason
    if wrong:
        raise NotComposed(f"its {part.name} computes something else alone: {wrong}")
    for _ in range(ATTEMPTS):
        found = sweep_module(prepared, grid, device, base, seed)
        if not found.invalid:
            break
    known = [p.latency_us for p in found.points if p.positions == base]
    if found.invalid and (not known or part.count * known[0] > SMALL * model_us):
        raise NotComposed(f"its {part.name} alone is not to be trusted: {found.invalid[0]}")
    times = {p.positions: part.count * p.latency_us for p in found.points}
    if base not in times:
        raise NotComposed(f"its {part.name} can't be measured alone: {found.unsupported.get(base, 'no time at N0')}")
    return times
