"""Full models in a session: proof of N, the engine's own clock, the sum of the modules, and the end of the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_nfp import backends
from pytest_nfp.backends import Prepared, PreparedEngine, Proof
from pytest_nfp.cases import Case
from pytest_nfp.measure import composition
from pytest_nfp.predict import Figures
from pytest_nfp.principle import Calibration
from pytest_nfp.records import Record, dump
from pytest_nfp.run import selection, whole_model
from pytest_nfp.run.inputs import Inputs
from pytest_nfp.run.measuring import ENGINE_TIMER
from pytest_nfp.run.session import Session
from pytest_nfp.settings import Settings
from pytest_nfp.testing import Simulated
from tests.conftest import PROJECT

pytestmark = pytest.mark.usefixtures("offline")


FIGURES = Figures(1e11, 1e10, Calibration(1e11, 1e10), "a datasheet")


def part_us(case: Case, n: int) -> float:
    if case.gemm is not None:
        return case.gemm[0] * case.gemm[1] / 1e5 * (1 + 0.05 * n)
    return 300.0 * (1 + 0.05 * n)


class Engine:
    """An engine whose forward is the sum of its parts, and `extra` beyond; what it is seen to process can be wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.extra: Callable[[int], float] = lambda n: 100.0
        self.tokens: Callable[[int], int] = lambda n: n
        self.cached: Callable[[int], int] = lambda context: context
        self.active: Callable[[int], int] | None = None
        self.closed = 0
        self.machine = Simulated(lambda n: 1.0, prepare=self.prepare)
        self.part: Callable[[Case], Prepared] = lambda case: Prepared(
            lambda n: lambda: part_us(case, n), 1, 10**9, "k", 1
        )
        monkeypatch.setattr(
            selection, "_installed", lambda framework: "5.19.0" if framework == "transformers" else None
        )
        monkeypatch.setattr(whole_model, "_floor_us", lambda inputs, case: 123.0)
        monkeypatch.setattr(Inputs, "figures", lambda self, case, granularity: FIGURES)

    def session(self, **changed: Any) -> Session:
        """A session on this machine."""
        settings = Settings(**{"gpu": ("cpu",), "model": ("qwen3-8b",), **changed})
        return Session(settings, PROJECT, find_device=lambda gpu, timer: (self.machine.device(), ""))

    def prepare(self, case: Case, seed: int, cache_bytes: int) -> Prepared:
        """The engine's forwards, and those of a part that is measured alone."""
        if case.module != "model":
            return self.part(case)
        parts = composition.parts_of(case)
        seen: dict[int, Proof] = {}

        def forward(n: int) -> Callable[[], object]:
            def run() -> float:
                seen[n] = Proof(self.tokens(n), self.cached(case.context or 0))
                took = sum(p.count * part_us(p.case, n) for p in parts) + self.extra(n)
                self.machine.seconds += took / 1e6
                return took

            return run

        def close() -> None:
            self.closed += 1

        return PreparedEngine(
            forward, 1, 10**9, "engine", 1,
            proof=lambda: dict(seen),
            host=lambda: {n: 1000.0 * n for n in seen},
            own_timer=True,
            active=self.active,
            close=close,
        )  # fmt: skip


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    return Engine(monkeypatch, tmp_path)


def case_of(s: Session) -> Case:
    found = s.select("boundary", "model")
    assert found
    return found[0]


def test_a_whole_model_is_swept_over_the_k_that_are_asked_for(engine: Engine) -> None:
    """On a CPU its own k alone, until --nfp-top-k; a dense model has none."""
    own = {"model": ("llada-2.1-mini",), "context": (256,)}
    assert [c.top_k for c in engine.session(**own).select("boundary", "model")] == [8, 8]
    swept = engine.session(**own, top_k=(2, 8, 32), batch=(2,)).select("boundary", "model")
    assert {(c.batch, c.context) for c in swept} == {(2, 256)}
    assert [c.top_k for c in swept if c.routing == "balanced"] == [2, 8, 32]
    assert [c.baseline_positions for c in swept if c.routing == "balanced"] == [64, 16, 4]
    assert [c.top_k for c in engine.session(top_k=(2,), context=(64,)).select("boundary", "model")] == [None]


def test_a_cpu_runs_tiny_models_and_says_so(engine: Engine) -> None:
    """A dense one and one with experts; --nfp-scale=full runs the model itself; module shapes have no case."""
    s = engine.session(model=())
    assert {c.subject.name for c in s.select("boundary", "model")} == {"qwen3-8b~tiny", "llada-2.1-mini~tiny"}
    assert {c.subject.name for c in engine.session(scale="full").select("boundary", "model")} == {"qwen3-8b"}
    assert engine.session(model=("dense-ffn-4096x9216",)).select("boundary", "model") == []
    assert s.select("prediction", "model") == []
    assert {c.routing for c in engine.session(model=("llada-2.1-mini",)).select("boundary", "model")} == {
        "balanced",
        "skewed",
    }


def test_a_model_that_its_modules_add_up_to_passes_and_its_record_proves_n(engine: Engine) -> None:
    """b * N tokens over L at each N, the step beside the forward, the byte floor, the parts; the engine is ended."""
    s = engine.session()
    case = case_of(s)
    verdict = s.check_boundary(case)
    assert verdict.outcome == "PASS", verdict.reasons
    assert "composed of its modules N_max" in verdict.reasons[0]
    record = s.results.cases[case.id]
    assert record.proof[8] == (8, case.context)
    # The step is its forward and what was taken beside it: never shorter than the forward.
    assert record.steps == {n: pytest.approx(us + 1000.0 * n, abs=0.2) for n, us in record.curve}
    assert (record.timer, record.floor_us) == (ENGINE_TIMER, 123.0)
    assert record.composed is not None
    assert (record.composed["steps"], record.composed["error"] < 0.02) == (0, True)
    assert record.predicted is not None
    assert set(record.predicted) == set(record.composed["predicted"]["steps"]) == {"principle", "tile_roofline"}
    assert record.predicted["principle"]["n_max"] == 20  # rho s / 2 = 20, under the 32 rows of torch's query split.
    assert set(record.composed["parts"]) == {"q", "k and v", "attention", "o", "ffn up", "ffn down", "head"}
    assert engine.closed == 1


def test_a_model_that_is_more_than_its_modules_is_undecided(engine: Engine) -> None:
    """What lies between the modules grows: nothing else is known to hold the model to."""
    engine.extra = lambda n: 100.0 if n == 1 else 10**5
    s = engine.session()
    verdict = s.check_boundary(case_of(s))
    assert verdict.outcome == "UNDECIDED"
    assert "steps from the measured one" in verdict.reasons[0]


def test_a_point_that_can_not_prove_its_positions_is_invalid(engine: Engine) -> None:
    """The engine processed one token more than was asked for."""
    engine.tokens = lambda n: n + 1
    s = engine.session()
    case = case_of(s)
    verdict = s.check_boundary(case)
    assert verdict.outcome == "INVALID"
    assert f"N=1: 2 over {case.context} cached tokens were processed, not 1 over {case.context}" in verdict.reasons[0]
    assert engine.closed == 1


def test_nothing_that_was_cached_is_written_and_read_again(engine: Engine) -> None:
    """An engine that processed the prefix anew: INVALID, and the record holds the nothing that was seen."""
    engine.cached = lambda context: 0
    s = engine.session()
    case = case_of(s)
    assert s.check_boundary(case).outcome == "INVALID"
    (record,) = s.results.records()
    again = Record.model_validate_json(dump(record))
    assert again.cases[0].proof[1] == (1, 0)


def test_dummy_weights_that_send_all_tokens_to_the_same_experts_are_refused(engine: Engine) -> None:
    """Balanced routing reads 8 more experts with every token; here 8 were read, whatever N."""
    engine.active = lambda n: 8
    s = engine.session(model=("llada-2.1-mini",), routing=("balanced",))
    verdict = s.check_boundary(case_of(s))
    assert verdict.outcome == "INVALID"
    assert "8 experts were read" in verdict.reasons[0]
    assert "are those of balanced routing" in verdict.reasons[0]


def test_a_part_that_can_not_be_measured_leaves_the_boundary_as_it_is(engine: Engine) -> None:
    """UNDECIDED without a baseline; the record says which part and why."""

    def part(case: Case) -> Prepared:
        raise backends.Unsupported("no such kernel")

    engine.part = part
    s = engine.session()
    case = case_of(s)
    verdict = s.check_boundary(case)
    assert verdict.outcome == "UNDECIDED"
    assert "not composed of its modules: its q can't be measured alone" in verdict.reasons[-1]
    assert s.results.cases[case.id].composed == {"reason": "its q can't be measured alone: no such kernel"}


def test_an_engine_that_breaks_is_ended_and_the_next_case_goes_on(engine: Engine) -> None:
    """It raises at every N: INVALID with its words, and the engine of the next case is another one."""

    def broken(n: int) -> int:
        raise RuntimeError("the engine core died: no space left")

    engine.tokens = broken
    s = engine.session()
    cases = s.select("boundary", "model")
    verdicts = [s.check_boundary(c) for c in cases[:2]]
    assert [v.outcome for v in verdicts] == ["INVALID", "INVALID"]
    assert "the engine core died: no space left" in verdicts[0].reasons[0]
    assert engine.closed == 2
