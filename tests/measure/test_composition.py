"""A model's curve against the sum of its measured modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp import catalog
from pytest_nfp.backends import Prepared, Unsupported
from pytest_nfp.cases import Backend, Case
from pytest_nfp.catalog.tiny import tiny
from pytest_nfp.curves.curve import Curve
from pytest_nfp.granularity import Granularity, RuleUnknown, granularity_of
from pytest_nfp.measure import composition, sweep
from pytest_nfp.measure.protocol import CALIBRATION
from pytest_nfp.predict import Figures, module_latency
from pytest_nfp.principle import Calibration
from pytest_nfp.testing import Simulated

DENSE = Case("cpu", Backend("transformers", "5"), "model", tiny(catalog.model("qwen3-8b")), "fp32", context=512)
MOE = Case(
    "cpu", Backend("vllm", "0.32.0"), "model", tiny(catalog.model("llada-2.1-mini")), "fp32", context=256,
    top_k=8, routing="skewed",
)  # fmt: skip
GRID = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]


def part_us(case: Case, n: int) -> float:
    """A kernel of its own for each part: GEMMs by their size, attention by its context with a step at 16."""
    if case.gemm is not None:
        return case.gemm[0] * case.gemm[1] / 1e5 * (1 + 0.01 * n)
    if case.module == "attention":
        return 50.0 * (1 + (n - 1) // 16)
    return 400.0 * (1 + 0.02 * n)


@pytest.fixture
def machine() -> Simulated:
    def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
        def forward(n: int) -> Callable[[], object]:
            return lambda: part_us(case, n)

        return Prepared(forward, 1, 100, "k", 1)

    return Simulated(lambda n: 1.0, prepare=prepare)


def model_curve(case: Case, machine: Simulated, extra: Callable[[int], float]) -> Curve:
    parts = composition.parts_of(case)

    def forward(n: int) -> Callable[[], object]:
        return lambda: sum(p.count * part_us(p.case, n) for p in parts) + extra(n)

    return sweep(forward, GRID, machine.device(), CALIBRATION)


@pytest.mark.parametrize("case", [DENSE, MOE], ids=["dense", "moe"])
def test_a_model_that_is_its_modules_and_a_constant_is_composed_exactly(case: Case, machine: Simulated) -> None:
    """T within 1%, the boundary no step away, and the constant is the rest."""
    curve = model_curve(case, machine, lambda n: 500.0)
    found = composition.measure(case, curve, machine.device(), 0.2, 0, lambda text: None)
    assert found.steps == 0
    assert found.error < 0.01
    assert found.rest_us == pytest.approx(500.0, rel=0.05)


def test_what_grows_between_the_modules_shows_as_a_difference(machine: Simulated) -> None:
    """A rest that triples at the second position: the sum is more than a step from the model."""
    curve = model_curve(DENSE, machine, lambda n: 500.0 if n == 1 else 30000.0)
    found = composition.measure(DENSE, curve, machine.device(), 0.2, 0, lambda text: None)
    assert found.steps > 1
    assert found.error > 0.2


def test_a_sum_that_ends_before_the_models_boundary_agrees_with_nothing(machine: Simulated) -> None:
    """Parts that take four positions at most, all within the tolerance; the model's own N_max is further out."""

    def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
        def forward(n: int) -> Callable[[], object]:
            if n > 4:
                raise Unsupported("the KV cache was made for 4 new positions")
            return lambda: 10.0

        return Prepared(forward, 1, 100, "k", 1)

    machine.prepare = prepare
    curve = sweep(lambda n: lambda: 1000.0, GRID, machine.device(), CALIBRATION)
    with pytest.raises(composition.NotComposed, match="its parts are known to N=4 alone, and the model's N_max is"):
        composition.measure(DENSE, curve, machine.device(), 0.2, 0, lambda text: None)


def test_the_part_that_grows_most_limits(machine: Simulated) -> None:
    """At the step of 16 positions attention, here in hundreds of layers."""
    many = replace(
        DENSE, subject=DENSE.subject.model_copy(update={"dense": catalog.Dense(width=16), "vocabulary": None})
    )
    curve = model_curve(many, machine, lambda n: 0.0)
    assert composition.measure(many, curve, machine.device(), 0.2, 0, lambda text: None).limiting == "attention"


def test_each_part_runs_the_kernel_that_its_engine_runs() -> None:
    """Transformers by torch, vLLM by its own CPU kernels, and on a GPU the vendor's GEMMs beside its own."""
    kernels = {p.name: (p.case.backend.framework, p.case.kernel) for p in composition.parts_of(DENSE)}
    assert kernels["attention"] == ("torch", "sdpa")
    assert kernels["q"] == ("torch", "matmul")
    assert {p.case.backend.framework for p in composition.parts_of(MOE)} == {"vllm"}
    on_gpu = replace(MOE, gpu="h200", dtype="bf16")
    found = {p.name: p.case.backend.framework for p in composition.parts_of(on_gpu)}
    assert (found["qkv"], found["experts"], found["attention"]) == ("torch", "vllm", "vllm")


def test_a_part_that_can_not_be_measured_is_named(machine: Simulated) -> None:
    """With the reason of its backend."""
    curve = model_curve(DENSE, machine, lambda n: 0.0)

    def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
        raise Unsupported("no such kernel")

    machine.prepare = prepare
    with pytest.raises(composition.NotComposed, match="its q can't be measured alone: no such kernel"):
        composition.measure(DENSE, curve, machine.device(), 0.2, 0, lambda text: None)


@given(st.integers(1, 60), st.integers(0, 30), st.integers(1, 60), st.integers(0, 30))
def test_steps_between_intervals_are_symmetric_and_none_where_they_overlap(
    a: int, wide: int, b: int, high: int
) -> None:
    """Whichever comes first; one step where they are neighbours on the grid."""
    x, y = (a, a + wide), (b, b + high)
    found = composition.steps_apart(x, y, GRID)
    assert found == composition.steps_apart(y, x, GRID)
    assert (found == 0) == (max(a, b) <= min(a + wide, b + high))
    assert composition.steps_apart((3, 3), (4, 5), GRID) == 1
    assert composition.steps_apart((1, 2), (4, 5), GRID) == 2
    assert composition.steps_apart((1, None), (64, 64), GRID) == 0


@pytest.mark.parametrize(("wrong", "trouble", "reason"), [
    ("N=1 is 1e-1 off", {}, "its q computes something else alone: N=1 is 1e-1 off"),
    ("", {"others": (4711,)}, "its q alone is not to be trusted: .*4711"),
])  # fmt: skip
def test_parts_are_trusted_as_models_are(
    machine: Simulated, wrong: str, trouble: dict[str, object], reason: str
) -> None:
    """A wrong result, and another process on the device: but for a part so small that its noise moves nothing."""
    curve = model_curve(DENSE, machine, lambda n: 0.0)
    machine.reading = trouble
    one = Prepared(lambda n: lambda: 5000.0 * n, 1, 100, "k", 1, lambda n: wrong)
    machine.prepare = lambda case, seed, cache_bytes: one
    with pytest.raises(composition.NotComposed, match=reason):
        composition.measure(DENSE, curve, machine.device(), 0.2, 0, lambda text: None)


FIGURES = Figures(1e11, 1e10, Calibration(1e11, 1e10), "a datasheet")


@pytest.mark.parametrize("case", [DENSE, MOE], ids=["dense", "moe"])
def test_both_predictors_stand_beside_what_was_measured(case: Case, machine: Simulated) -> None:
    """A model that is its parts' roofline has the tile roofline's N_max, no T off; the closed form is its smallest term; steps count
    from the measured interval.
    """

    def figures_of(part: Case) -> tuple[Figures, Granularity | None]:
        return FIGURES, None if part.module == "dense" else granularity_of(part)

    times = [(p.count, module_latency(p.case, *figures_of(p.case))) for p in composition.parts_of(case)]
    curve = sweep(lambda n: lambda: sum(count * t(n) for count, t in times), GRID, machine.device(), CALIBRATION)
    found = composition.predict(case, curve, 0.2, figures_of)
    assert found.error < 0.01
    assert found.steps["tile_roofline"] == 0
    terms = found.predicted.as_dict()
    of_model = curve.boundary(0.2)
    assert of_model is not None
    assert terms["tile_roofline"]["n_max"] <= (of_model.n_max_interval[1] or 10**9)
    assert found.predicted.principle is not None
    assert terms["principle"]["limiting"] in ("dense", "moe", "attention")
    assert (found.predicted.principle.dense is None) == (case.subject.moe is not None)


def test_the_prediction_is_of_what_the_engine_runs(machine: Simulated) -> None:
    """An extended prefix has logits of the last tokens alone, so its head does not grow with N; drawn routing has no closed form."""

    def figures_of(part: Case) -> tuple[Figures, Granularity | None]:
        # A head that costs what all the rest does: growing, it would end the model's N_max.
        share = 1e6 if part.gemm is not None and part.gemm[0] == case.subject.vocabulary else 1.0
        return Figures(
            1e11, 1e10, Calibration(1e11 / share, 1e10), "x"
        ), None if part.module == "dense" else granularity_of(part)

    case = replace(MOE, backend=Backend("vllm", "0.32.0"))
    curve = model_curve(case, machine, lambda n: 0.0)
    found = composition.predict(case, curve, 0.2, figures_of)
    assert found.predicted.tile_roofline is not None
    assert found.predicted.tile_roofline.limiting != "head"
    drawn = composition.predict(replace(case, routing="uniform"), curve, 0.2, figures_of)
    assert (drawn.predicted.principle, drawn.predicted.n_idle) == (None, None)


def test_a_part_whose_rule_is_unknown_leaves_no_prediction(machine: Simulated) -> None:
    """The reason reaches the record; nothing is guessed."""

    def unknown(part: Case) -> tuple[Figures, Granularity | None]:
        raise RuleUnknown("no rule")

    curve = model_curve(DENSE, machine, lambda n: 0.0)
    with pytest.raises(RuleUnknown, match="no rule"):
        composition.predict(DENSE, curve, 0.2, unknown)
