"""What a session asks, measures and looks up, without pytest around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from pytest_nfp import backends, baselines, catalog
from pytest_nfp.backends import Prepared
from pytest_nfp.baselines import BaselineFile, CaseBaseline
from pytest_nfp.cases import Backend, Case, expand
from pytest_nfp.catalog import UnknownName
from pytest_nfp.curves import Curve
from pytest_nfp.devices import Forward
from pytest_nfp.files import FileError, read_yaml
from pytest_nfp.granularity import artifacts, granularity_of
from pytest_nfp.measure.grid import positions_to_measure
from pytest_nfp.measure.sweep import Interrupted
from pytest_nfp.predict import datasheet, predict_case
from pytest_nfp.run import confirmation, measuring, selection
from pytest_nfp.run.inputs import Inputs
from pytest_nfp.run.questions import reach_of
from pytest_nfp.run.session import Session
from pytest_nfp.settings import Settings
from pytest_nfp.testing import Noise, Simulated, staircase
from pytest_nfp.verdict import Verdict
from tests.calibration.test_own_cpu import Cpu
from tests.conftest import PROJECT

pytestmark = pytest.mark.usefixtures("offline")


CPU_DENSE = list(expand("cpu", Backend("torch", "2.13.0"), "dense", catalog.model("dense-ffn-2048x6144")))


def session(**changed: object) -> Session:
    return Session(Settings(**changed), PROJECT)  # type: ignore[arg-type]


def session_on(machine: Simulated, **changed: object) -> Session:
    """A session that finds this machine for every GPU, with its forwards."""
    settings = Settings(**changed)  # type: ignore[arg-type]
    return Session(settings, PROJECT, find_device=lambda gpu, timer: (machine.device(gpu=gpu), ""))


def test_without_options_the_device_here_is_tested() -> None:
    """auto: no GPU, so the CPU."""
    assert selection.gpus(Settings()) == ["cpu"]
    assert selection.gpus(Settings(gpu=("NVIDIA H20", "h20", "h800"))) == ["h20", "h800"]


def test_backends_default_to_those_with_baselines() -> None:
    """Not installed: the baselines' releases; a framework without a release means the same."""
    s = session(gpu=("h20",))
    assert selection.backends_for(s.inputs, "h20", "moe") == [Backend("vllm", "0.9.1"), Backend("sglang", "0.5.9")]
    assert selection.backends_for(session(gpu=("h20",), backend=("sglang",)).inputs, "h20", "moe") == [
        Backend("sglang", "0.5.9")
    ]


def test_an_installed_framework_is_what_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate of a version bump installs the new release and asks nothing else."""
    monkeypatch.setattr(artifacts, "installed_release", lambda f: "0.33.0" if f == "vllm" else None)
    assert selection.backends_for(session().inputs, "h20", "moe") == [
        Backend("vllm", "0.33.0"),
        Backend("sglang", "0.5.9"),
    ]


def test_one_case_asks_for_each_map_and_every_case_for_its_prediction() -> None:
    """The rule does not look at routing: granularity is asked once, prediction for both."""
    s = session(gpu=("h20",), model=("llada-2.1-mini",), backend=("vllm==0.9.1",))
    assert len(s.select("granularity", "moe")) == 1
    assert [c.routing for c in s.select("prediction", "moe")] == ["balanced", "skewed"]
    assert [c.routing for c in s.select("boundary", "moe", routing=["skewed"])] == ["skewed"]
    assert s.select("granularity", "dense", models=["qwen3-8b"]) == []


def test_a_recorded_dense_ffn_is_asked_for_as_its_gemms() -> None:
    """The tables hold GEMMs: up and down of the FFN, at each batch."""
    s = session(gpu=("h200",), model=("qwen3-8b",), backend=("vllm==0.24.0",), measure="recorded")
    assert {c.gemm for c in s.select("boundary", "dense")} == {(12288, 4096), (4096, 12288)}
    s = session(gpu=("h200",), model=("qwen3-8b",), backend=("vllm==0.24.0",), measure="none")
    assert {c.gemm for c in s.select("boundary", "dense")} == {None}


def test_the_grid_holds_n0_and_both_sides_of_every_edge() -> None:
    """Edge and edge + 1 of the map, within the range that is measured."""
    cases = expand("h20", Backend("vllm", "0.9.1"), "moe", catalog.model("llada-2.1-mini"))
    balanced = next(cases)
    grid = positions_to_measure(balanced, granularity_of(balanced))
    assert {1, 2, 4, 32, 256, 257} <= set(grid)
    assert grid == sorted(set(grid))
    attention = next(expand("cpu", Backend("torch", "2"), "attention", catalog.model("attention-mha-16x128")))
    assert {1, 32, 33, 191, 192} <= set(positions_to_measure(attention, granularity_of(attention)))


def test_a_release_on_no_index_is_an_error_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The nearest are named; with archives of one's own it may exist after all; out of reach is not unknown."""
    session(backend=("vllm==0.33.5",)).check_names()
    monkeypatch.setattr(artifacts, "known_releases", lambda f: ["0.9.1", "0.32.0", "0.33.0"])
    with pytest.raises(UnknownName, match=r"unknown release '0.33.5' of vllm; the nearest are 0.9.1, 0.32.0, 0.33.0"):
        session(backend=("vllm==0.33.5",)).check_names()
    session(backend=("vllm==0.33.5",), artifacts=tmp_path).check_names()


def test_a_boundary_of_another_release_is_no_baseline_for_this_one() -> None:
    """Granularity and prediction are held to the nearest release, a curve to its own alone."""
    s = session(gpu=("h200",))
    case = Case(
        "h200", Backend("vllm", "0.25.0"), "moe", catalog.model("llada-2.1-mini"), "bf16", top_k=8, routing="balanced"
    )
    stored = s.inputs.baseline(case)
    assert stored is not None
    assert (stored.name, stored.is_exact) == ("the baseline of vllm==0.24.0", False)


def test_what_two_workers_found_of_one_file_is_joined_whatever_comes_first() -> None:
    """One worker saw the map and its archive, the other the prediction."""
    whole = {
        "schema": 1,
        "gpu": "h20",
        "backend": "vllm==1",
        "subject": "m",
        "granularity": {
            "moe-bf16": {
                "kernel": "triton",
                "source": "default rule",
                "parameters": None,
                "choice": None,
                "tiles": [[1, 9, 16]],
            }
        },
        "cases": {"c": {"baseline_positions": 1, "predicted": None, "measured": None}},
        "provenance": {"tool": "t", "artifact": "a.whl", "sha256": "0"},
    }
    tiles_only = whole | {"cases": {}}
    case_only = whole | {"granularity": {}, "provenance": {"tool": "t"}}
    for order in ([tiles_only, case_only], [case_only, tiles_only]):
        s = session()
        s.results.updates.absorb(order)
        assert [f.model_dump(mode="json", by_alias=True) for f in s.results.updates.files.values()] == [whole]


def test_the_reach_of_a_map_is_where_its_last_measured_boundary_was_decided() -> None:
    """Recorded H200: 512 within and 768 beyond; one case that was never measured leaves the reach unknown."""
    s = session(gpu=("h200",))
    case = Case(
        "h200", Backend("vllm", "0.24.0"), "moe", catalog.model("llada-2.1-mini"), "bf16", top_k=8, routing="balanced"
    )
    held = s.inputs.baseline(case)
    assert held is not None
    stored = held.file
    granularity = s.inputs.granularity(case)
    assert reach_of(stored, case, granularity) is None
    stored.cases = {k: c for k, c in stored.cases.items() if c.measured is not None}
    assert reach_of(stored, case, granularity) == 768
    own = next(c for key, c in stored.cases.items() if key == "moe-bf16-b1-k8-balanced")
    stored.cases["moe-bf16-b8-k8-balanced"] = own
    assert reach_of(stored, case, granularity) == 8 * 768
    # Another k, another dtype, and what is never measured of them, are of other maps.
    stored.cases["moe-bf16-b1-k2-balanced"] = CaseBaseline(baseline_positions=1)
    stored.cases["moe-bf16-block-b1-k8-balanced"] = CaseBaseline(baseline_positions=1)
    assert reach_of(stored, case, granularity) == 8 * 768
    assert reach_of(stored, replace(case, top_k=2), granularity) is None
    packed = Case(
        "h20", Backend("flashinfer-python", "0.5.3"), "attention", catalog.model("qwen3-8b"), "bf16", context=512
    )
    stored.cases = {"attention-bf16-b4-L512": own}
    rows = s.inputs.granularity(packed)
    assert rows.packed
    assert reach_of(stored, packed, rows) == 4 * 768


@pytest.mark.parametrize(
    ("tiles", "any_change", "boundary"),
    [
        ([(1, 256, 16), (257, 4000, 64), (4001, 4096, 128)], "FAIL", "PASS"),
        ([(1, 128, 16), (129, 4096, 64)], "FAIL", "FAIL"),
        ([(1, 256, 16), (257, 4096, 64)], "PASS", "PASS"),
    ],
)
def test_the_gate_may_look_at_the_boundary_alone(
    tmp_path: Path, tiles: list[tuple[int, int, int]], any_change: str, boundary: str
) -> None:
    """A tile that changed far past every predicted N_max is a warning by --nfp-gate=boundary; one that moves it fails."""
    stored = baselines.load(PROJECT / "baselines", "h20", Backend("vllm", "0.9.1"), "llada-2.1-mini")
    assert stored is not None
    stored.granularity = {k: t.model_copy(update={"tiles": tiles}) for k, t in stored.granularity.items()}
    moved = tiles[0][1] != 256
    for entry in stored.cases.values():
        if moved and entry.predicted is not None and entry.predicted.principle is not None:
            entry.predicted.principle.n_max = 128
    baselines.write(tmp_path, [(Backend("vllm", "0.9.1"), stored)])
    for gate, outcome in (("any", any_change), ("boundary", boundary)):
        s = session(gpu=("h20",), model=("llada-2.1-mini",), backend=("vllm==0.9.1",), baselines=tmp_path, gate=gate)
        verdict = s.check_granularity(s.select("granularity", "moe")[0])
        assert verdict.outcome == outcome, verdict
        if gate == "boundary" and any_change != boundary:
            assert verdict.reasons[0].startswith("warning, as it moves no predicted boundary: granularity changed")


DENSE = next(expand("cpu", Backend("torch", "2.13.0"), "dense", catalog.model("dense-ffn-2048x6144")))
MOE = next(
    c
    for c in expand("cpu", Backend("torch", "2.13.0"), "moe", catalog.model("moe-ffn-32x1024x768"))
    if c.routing == "balanced"
)


def simulated(
    monkeypatch: pytest.MonkeyPatch, machines: Sequence[Simulated], tmp_path: Path, **changed: object
) -> Session:
    """A session whose every measurement runs on the next machine."""
    turn = cycle(machines)

    def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
        return Prepared(next(turn).forward, 1, 100, "simulated", 1)

    # A predictor that does not describe the kernel: what counts is the baseline.
    figures = replace(datasheet(1e12, 1e11), describes=False, cause="simulated")
    monkeypatch.setattr(Inputs, "figures", lambda self, case, granularity: figures)
    machines[0].prepare = prepare
    (tmp_path / "baselines").mkdir(exist_ok=True)
    settings = Settings(gpu=("cpu",), protocol="quick", baselines=tmp_path / "baselines", **changed)  # type: ignore[arg-type]
    return Session(settings, PROJECT, find_device=lambda gpu, timer: (machines[0].device(), ""))


def test_a_measured_baseline_holds_the_spread_of_its_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three runs with fresh forwards; on a machine with two states the next run is undecided, not failed."""
    steady, other = Simulated(staircase(16)), Simulated(staircase(4))
    s = simulated(monkeypatch, [steady, other, steady], tmp_path, update="missing")
    assert s.check_boundary(DENSE).outcome == "PASS"
    s.results.updates.write()
    file = next((tmp_path / "baselines").rglob("*.yaml"))
    stored = read_yaml(file, BaselineFile).cases[DENSE.key].measured
    assert stored is not None
    assert [n for n, _ in stored.runs] == [16, 4, 16]
    assert stored.timer == "simulated"
    v = simulated(monkeypatch, [other], tmp_path).check_boundary(DENSE)
    assert v.outcome == "UNDECIDED"
    assert any("the baseline's own runs gave N_max 4, 16" in r for r in v.reasons)


def steady_baseline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stored boundary of 16 whose own runs agree."""
    s = simulated(monkeypatch, [Simulated(staircase(16))], tmp_path, update="missing")
    s.check_boundary(DENSE)
    s.results.updates.write()


def test_a_fail_that_a_second_measurement_repeats_is_confirmed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Twice 4 where the baseline has 16: FAIL, and the reasons say that it was measured once more."""
    steady_baseline(monkeypatch, tmp_path)
    v = simulated(monkeypatch, [Simulated(staircase(4))], tmp_path).check_boundary(DENSE)
    assert v.outcome == "FAIL"
    assert "measured once more, N_max is 4: confirmed" in v.reasons


def test_a_fail_that_does_not_come_back_is_undecided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """4, then 16 with fresh inputs and weights: the machine has two states, and both are told."""
    steady_baseline(monkeypatch, tmp_path)
    machines = [Simulated(staircase(4)), Simulated(staircase(16))]
    v = simulated(monkeypatch, machines, tmp_path).check_boundary(DENSE)
    assert v.outcome == "UNDECIDED"
    assert (
        v.reasons[0]
        == "not confirmed: measured once more, N_max is 16, which does not fail (this machine has several states)"
    )
    assert any("N_max shrank against the baseline: 16 to 4" in r for r in v.reasons)


def test_a_fail_of_which_the_second_measurement_can_not_be_trusted_is_undecided(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Drift in the second run: its reason stands in the place of a confirmation."""
    steady_baseline(monkeypatch, tmp_path)
    s = simulated(monkeypatch, [Simulated(staircase(4))], tmp_path)

    def drifted(inputs: Inputs, case: Case, granularity: object) -> Curve:
        curve = measuring.curve_of(inputs, DENSE, None).curve
        assert curve is not None
        return replace(curve, invalid=("T(N0) drifted",))

    monkeypatch.setattr(confirmation, "measured_beside", drifted)
    v = s.check_boundary(DENSE)
    assert v.outcome == "UNDECIDED"
    assert "(T(N0) drifted)" in v.reasons[0]


@pytest.mark.parametrize("is_whole_machine", [True, False])
def test_a_fail_stands_where_the_shapes_of_the_calibration_are_still_met(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_whole_machine: bool
) -> None:
    """After the calibration more rows became slower: on every shape, which is the machine; or on the tested one alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    case = next(c for c in CPU_DENSE if c.kernel == "onednn-packed" and c.batch == 1)
    is_moved = False

    def slower(one: Case, positions: int) -> float:
        is_met = is_moved and (is_whole_machine or one.subject == case.subject)
        return 1.6 if is_met and positions > 2 else 1.0

    cpu = Cpu(slower)
    settings = Settings(gpu=("cpu",), protocol="quick", baselines=tmp_path / "baselines")
    s = Session(settings, PROJECT, find_device=lambda gpu, timer: (cpu.device, ""))
    s.inputs.predicted(case)
    is_moved = True
    v = s.check_boundary(case)
    if is_whole_machine:
        assert v.outcome == "UNDECIDED"
        assert v.reasons[0].startswith("this machine is not as it was calibrated: gemm-")
    else:
        assert v.outcome == "FAIL"
        assert "shapes of the calibration are met beside it" in v.reasons


def test_what_failed_is_kept_where_its_confirmation_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C in the second measurement: the first curve stands in the record, as interrupted, and the run ends."""
    steady_baseline(monkeypatch, tmp_path)
    s = simulated(monkeypatch, [Simulated(staircase(4))], tmp_path)

    def interrupted(inputs: Inputs, case: Case, granularity: object) -> Curve:
        curve = measuring.curve_of(inputs, DENSE, None).curve
        assert curve is not None
        raise Interrupted(replace(curve, points=curve.points[:1]))

    monkeypatch.setattr(confirmation, "measured_beside", interrupted)
    with pytest.raises(Interrupted):
        s.check_boundary(DENSE)
    kept = s.results.cases[DENSE.id]
    assert len(kept.curve) > 1
    assert kept.counts["interrupted"] and s.results.is_partial


def test_a_clock_that_falls_is_measured_again_with_rests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second time the device rests between rounds, and its clock holds."""
    noise = Noise(0.005, throttle=0.25, throttle_after_s=0.4)
    machine = Simulated(staircase(4, base_us=2000.0), noise)
    s = simulated(monkeypatch, [machine], tmp_path)
    said: list[str] = []
    s.inputs.say = said.append
    s.check_boundary(DENSE)
    assert any("the clock went from" in text and "measured again" in text for text in said)
    assert not any("clock" in r for r in s.results.cases[DENSE.id].reasons)


def test_a_wrong_result_is_invalid_and_never_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However fast: the position, the kernel, and how far it is off."""
    machine = Simulated(staircase(16))
    s = simulated(monkeypatch, [machine], tmp_path)
    asked: list[int] = []

    def check(positions: int) -> str:
        asked.append(positions)
        return "the result is 1.0e-01 off" if positions > 1 else ""

    def timed(positions: int) -> Callable[[], object]:
        raise AssertionError("a wrong forward was built to be timed")

    machine.prepare = lambda case, seed, cache: Prepared(timed, 1, 100, "kernel", 1, check)
    v = s.check_boundary(DENSE)
    assert v == Verdict("INVALID", ("N=64: kernel computes something else: the result is 1.0e-01 off",))
    assert asked == [1, 64]
    assert not s.results.cases[DENSE.id].curve


def test_a_grid_that_is_asked_for_takes_the_catalogs_place() -> None:
    """--nfp-batch, --nfp-context and --nfp-top-k, for every module that has one; a k above E is refused with both numbers."""
    asked: dict[str, object] = {"gpu": ("h200",), "backend": ("vllm==0.24.0",), "measure": "none"}
    grid: dict[str, object] = {"batch": (1, 4), "context": (8192,), "top_k": (2, 32)}
    s = session(model=("llada-2.1-mini",), **asked, **grid)
    moe = s.select("boundary", "moe")
    assert [(c.batch, c.top_k) for c in moe if c.routing == "skewed"] == [(1, 2), (1, 32), (4, 2), (4, 32)]
    dense = session(model=("qwen3-8b",), **asked, **grid).select("prediction", "dense")
    assert [c.batch for c in dense] == [1, 4]
    flash = session(model=("qwen3-8b",), gpu=("h200",), backend=("flash-attn==2.8.3",), context=(640, 1280))
    assert [c.context for c in flash.select("prediction", "attention")] == [640, 1280]
    batched = session(model=("qwen3-8b",), gpu=("h200",), backend=("flash-attn==2.8.3",), batch=(2, 8), context=(640,))
    assert [c.batch for c in batched.select("prediction", "attention")] == [2, 8]


def test_a_k_above_e_is_refused_where_the_model_was_named() -> None:
    """With both numbers; of the models that nobody named, those take part that have so many experts; a module without k is asked as ever."""
    asked: dict[str, object] = {"gpu": ("h200",), "backend": ("vllm==0.24.0",), "measure": "none"}
    with pytest.raises(UnknownName, match="--nfp-top-k=512: mixtral-8x7b has 8 experts"):
        session(model=("mixtral-8x7b",), **asked, top_k=(2, 512)).select("boundary", "moe")
    with pytest.raises(UnknownName, match="--nfp-top-k=16: mixtral-8x7b has 8 experts"):
        session(**asked, top_k=(16,)).select("boundary", "moe", models=["mixtral-8x7b"])
    found = session(**asked, top_k=(2, 32, 512)).select("prediction", "moe")
    ks = {name: {c.top_k for c in found if c.subject.name == name} for name in ("mixtral-8x7b", "llada-2.1-mini")}
    assert ks == {"mixtral-8x7b": {2}, "llada-2.1-mini": {2, 32}}
    assert "mixtral-8x7b" not in {c.subject.name for c in session(**asked, top_k=(32,)).select("prediction", "moe")}
    assert session(model=("mixtral-8x7b",), **asked, top_k=(512,)).select("prediction", "dense") == []


def test_a_gate_does_not_pass_by_having_no_case() -> None:
    """Under --nfp-require-device an engine that nothing but its boundary is asked of needs its device; a k that no model has is refused."""
    asked: dict[str, object] = {"gpu": ("h200",), "backend": ("vllm==0.24.0",)}
    assert session(**asked).select("boundary", "model") == []
    with pytest.raises(UnknownName, match="--nfp-require-device: model by vllm on h200 is measured alone: "):
        session(**asked, require_device=True).select("boundary", "model")
    with pytest.raises(UnknownName, match="--nfp-top-k=512: no model that is asked for has so many experts"):
        session(**asked, top_k=(512,)).select("prediction", "moe")
    # A dense model has no k to be wrong about, and other suites of the same run have cases for it.
    assert session(**asked, top_k=(2,), model=("qwen3-8b",)).select("prediction", "moe") == []


def test_a_skipped_test_says_why_there_is_no_case() -> None:
    """The device that is not here, MLA, else what was asked."""
    asked: dict[str, object] = {"gpu": ("h200",), "backend": ("vllm==0.24.0",)}
    assert session(**asked).why_nothing("boundary", "model").startswith("model by vllm on h200 is measured alone: ")
    mla = session(**asked, model=("deepseek-v3",)).why_nothing("boundary", "model")
    assert mla.startswith("deepseek-v3: no whole model with MLA")
    other = session(**asked, model=("qwen3-8b",)).why_nothing("granularity", "moe", routing=("skewed",))
    assert other.startswith("no case for module=moe, question=granularity, routing=('skewed',) with")


def test_another_k_has_a_map_of_its_own() -> None:
    """A rule may look at k: what is asked for by --nfp-top-k is held to no map of the model's own k, and writes over none."""
    asked: dict[str, object] = {"gpu": ("a100",), "backend": ("vllm==0.24.0",), "measure": "none", "dtype": "fp8"}
    mini = {"model": ("llada-2.1-mini",)}
    assert [c.map_key for c in session(**asked, **mini).select("granularity", "moe")] == ["moe-fp8"]
    swept = session(**asked, **mini, top_k=(2, 8, 64)).select("granularity", "moe")
    assert [c.map_key for c in swept] == ["moe-fp8-k2", "moe-fp8", "moe-fp8-k64"]
    one = session(**asked, model=("moe-ffn-256x4096x1024",), top_k=(8,)).select("granularity", "moe")
    assert [c.map_key for c in one] == ["moe-fp8-k8"]


def test_drawn_and_replayed_routing_are_cases_when_asked_for(tmp_path: Path) -> None:
    """--nfp-routing: their own cases, held to no closed form; a trace by its file, and a name that is none is refused."""
    trace = tmp_path / "t.csv"
    trace.write_text("".join(f"{i},{i % 32},{(i + 1) % 32},{(i + 2) % 32},{(i + 3) % 32}\n" for i in range(64)))
    asked: dict[str, object] = {"gpu": ("cpu",), "model": ("moe-ffn-32x1024x768",), "measure": "none"}
    s = session(routing=("uniform", f"trace:{trace}"), **asked)
    cases = s.select("boundary", "moe")
    assert [c.key for c in cases if c.backend.framework == "torch"] == [
        "moe-fp32-grouped_mm-b1-k4-uniform",
        f"moe-fp32-grouped_mm-b1-k4-{cases[-1].routing}",
    ]
    assert max(positions_to_measure(cases[-1], None)) == 64
    assert {c.baseline_positions for c in cases} == {1}
    for case in cases:
        predicted = predict_case(case, datasheet(1e12, 1e11), None)
        assert (predicted.principle, predicted.n_idle) == (None, None)
        assert set(predicted.as_dict()) == {"tile_roofline"}
    with pytest.raises(UnknownName, match="for mixtral-8x7b: the trace routes to expert 31: the model has 8"):
        session(routing=(f"trace:{trace}",), gpu=("h200",), model=("mixtral-8x7b",)).select("boundary", "moe")
    with pytest.raises(UnknownName, match="--nfp-routing: unknown routing 'random'"):
        session(routing=("random",), **asked).check_names()
    with pytest.raises(FileError, match=r"nowhere\.csv: can't be read"):
        session(routing=("trace:nowhere.csv",), **asked).check_names()


def test_a_measured_curve_holds_its_active_experts_and_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What one forward read, and what the framework's selector gave, at every N that was measured."""
    machine = Simulated(staircase(4))
    s = simulated(monkeypatch, [machine], tmp_path)
    prepared = Prepared(machine.forward, 1, 100, "kernel", 1, None, lambda n: {"BLOCK_SIZE_M": 16 * n}, lambda n: 4 * n)
    machine.prepare = lambda case, seed, cache: prepared
    s.check_boundary(DENSE)
    record = s.results.cases[DENSE.id]
    assert record.active_experts == {n: 4 * n for n, _ in record.curve}
    assert record.settings[2] == "BLOCK_SIZE_M=32"


def test_a_position_that_the_check_can_not_run_is_left_to_the_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A kernel that refuses N = 64 caps N_max there; it does not end the case."""
    machine = Simulated(staircase(16))
    s = simulated(monkeypatch, [machine], tmp_path)

    def check(positions: int) -> str:
        if positions == 64:
            raise NotImplementedError("head_dim 512 with 64 positions")
        return ""

    prepared = Prepared(machine.forward, 1, 100, "kernel", 1, check)
    machine.prepare = lambda case, seed, cache: prepared
    s.check_boundary(DENSE)
    assert s.results.cases[DENSE.id].n_max == 16


def test_experts_that_are_all_streamed_claim_no_n_max(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """T(1) with 4 of 32 experts costs what T(N0) costs with all of them."""
    v = simulated(monkeypatch, [Simulated(staircase(64))], tmp_path).check_boundary(MOE)
    assert v.outcome == "INVALID"
    assert "all experts are streamed whatever N" in v.reasons[0]


def test_one_position_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The case is INVALID with the reason, and the next goes on."""

    def slow(n: int) -> float:
        time.sleep(5)
        return 100.0

    v = simulated(monkeypatch, [Simulated(slow)], tmp_path, case_timeout=0.2).check_boundary(DENSE)
    assert v == Verdict("INVALID", ("the measurement took longer than 0.2 s (--nfp-case-timeout) and was given up",))


def test_samples_are_in_the_record_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And kernels, timer and plateaus always."""
    s = simulated(monkeypatch, [Simulated(staircase(16))], tmp_path, samples=True)
    s.check_boundary(DENSE)
    found = s.results.cases[DENSE.id]
    assert found.samples[1][0] == 100.0
    assert found.timer == "simulated"
    assert found.plateaus[0] == (1, 16, 100.0)
    assert simulated(monkeypatch, [Simulated(staircase(16))], tmp_path).check_boundary(DENSE)


def on_a_device(monkeypatch: pytest.MonkeyPatch, gpu: str, **changed: object) -> Session:
    machine = Simulated(staircase(16), Noise(0.01), 1)
    monkeypatch.setattr(
        backends,
        "prepare",
        lambda case, seed, cache_bytes: Prepared(machine.forward, 100, 10**9, "simulated", 1),
    )
    return session_on(machine, gpu=(gpu,), **changed)


def test_kernels_without_a_rule_are_measured_where_a_device_is_and_asked_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's attention on a GPU: no case without the device; with it a boundary, UNDECIDED with the reason, and its curve."""
    asked = {"backend": ("vllm==0.33.0",), "model": ("attention-mha-32x128",)}
    assert session(gpu=("h200",), **asked).select("boundary", "attention") == []
    s = on_a_device(monkeypatch, "h200", **asked)
    assert s.select("granularity", "attention") == []
    assert s.select("prediction", "attention") == []
    case = s.select("boundary", "attention")[0]
    verdict = s.check_boundary(case)
    assert verdict.outcome == "UNDECIDED"
    assert "vllm's attention kernels on a GPU publish no tile rule" in verdict.reasons[-1]
    assert s.results.cases[case.id].n_max == 16
    assert set(s.results.cases[case.id].modes.values()) == {"eager"}


def test_variants_of_a_kernel_are_measured_where_a_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer with the decode kernel at one position; nothing more is asked of a GPU that is not here."""
    asked = {"backend": ("flashinfer-python==0.5.3",), "model": ("attention-mha-32x128",)}
    assert {c.kernel for c in session(gpu=("h20",), **asked).select("boundary", "attention")} == {None}
    s = on_a_device(monkeypatch, "h20", **asked)
    assert {c.kernel for c in s.select("boundary", "attention")} == {None, "decode-at-1"}
    assert {c.kernel for c in s.select("prediction", "attention")} == {None}


def test_another_dtype_makes_cases_of_it() -> None:
    """BF16 on a CPU, FP8 experts on a GPU."""
    s = session(gpu=("cpu",), dtype="bf16", model=("dense-ffn-2048x6144",))
    cases = s.select("boundary", "dense")
    assert {c.dtype for c in cases} == {"bf16"}
    assert {
        c.dtype for c in session(gpu=("h20",), dtype="fp8", backend=("vllm==0.9.1",)).select("prediction", "moe")
    } == {"fp8"}


def test_a_release_that_moved_its_arguments_is_no_crash() -> None:
    """The forward raises what Python raises of a moved argument: INVALID with its words, and the next case goes on."""

    def forward(n: int) -> Forward:
        raise AttributeError("module 'kernels' has no attribute 'fused_experts'")

    machine = Simulated(staircase(16))
    machine.prepare = lambda case, seed, cache: Prepared(forward, 100, 10**9, "k", 1)
    s = session_on(machine, gpu=("h20",), backend=("vllm==0.9.1",), model=("llada-2.1-mini",))
    verdict = s.check_boundary(s.select("boundary", "moe")[0])
    assert verdict.outcome == "INVALID"
    assert "T(N0 = 32) can't be measured: AttributeError: module 'kernels' has no attribute" in verdict.reasons[0]
    assert s.check_boundary(s.select("boundary", "moe")[1]).outcome == "INVALID"


def test_a_selector_that_answers_nothing_costs_its_answer_alone() -> None:
    """The curve stands without configurations."""
    machine = Simulated(staircase(64), Noise(0.01), 1)

    def selector(n: int) -> dict[str, int]:
        raise TypeError("try_get_optimal_moe_config() takes 4 positional arguments")

    one = Prepared(machine.forward, 100, 10**9, "k", 1, setting=selector)
    machine.prepare = lambda case, seed, cache: one
    s = session_on(machine, gpu=("h20",), backend=("vllm==0.9.1",), model=("llada-2.1-mini",))
    case = s.select("boundary", "moe")[0]
    s.check_boundary(case)
    assert s.results.cases[case.id].n_max is not None
    assert s.results.cases[case.id].settings == {}
