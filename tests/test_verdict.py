"""Outcomes: both ways, by the right predictor, with reasons that say what happened."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pytest_nfp import catalog
from pytest_nfp.baselines import CaseBaseline, Measured, PredictedTerms, Tiles, tiles_of
from pytest_nfp.cases import Backend, Case
from pytest_nfp.curves import Curve
from pytest_nfp.predict import Figures, Predicted, datasheet, predict_case
from pytest_nfp.principle import Boundary, Calibration, Point, closed_form, find_boundary
from pytest_nfp.verdict import Basis, Evidence, Verdict, judge_boundary, judge_granularity, judge_prediction, worst

from .granularity.test_maps import granularity

CASE = Case(
    "h200", Backend("vllm", "0.24.0"), "moe", catalog.model("llada-2.1-mini"), "bf16", top_k=8, routing="balanced"
)
OLD = Tiles(kernel="triton", source="default rule", tiles=[(1, 256, 16), (257, 4096, 64)])
NEW = granularity(*([16] * 32 + [32] * 64 + [64] * 416 + [128] * 3584))
H200 = catalog.gpu("h200")
SHEET = datasheet(H200.peak_flops, H200.bandwidth)


@pytest.fixture(autouse=True)
def an_exact_principle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the principle had met every recorded curve: what is tested here is what is made of a prediction."""
    monkeypatch.setattr(catalog, "datasheet_spread", lambda module, framework: (1.0, 1.0))


def curve(*points: tuple[int, float], **changed: object) -> Curve:
    c = Curve(tuple(Point(n, us) for n, us in points), 32, "recorded", "a table", "triton")
    return replace(c, **changed)  # type: ignore[arg-type]


def predicted(n: int, roofline: int | None = None) -> Predicted:
    p = predict_case(CASE, SHEET, NEW)
    assert p.tile_roofline is not None
    tile_roofline = replace(p.tile_roofline, boundary=Boundary(roofline or n, (n, n), n, (), 32))
    return replace(p, principle=closed_form(branch=n), tile_roofline=tile_roofline)


def judge(c: Curve, p: Predicted, measured: Measured | None = None, figures: Figures = SHEET) -> Verdict:
    b = find_boundary(c.points, 0.2, 32)
    baseline = CaseBaseline(baseline_positions=32, measured=measured)
    return judge_boundary(Evidence(CASE, c, b, Basis(p, NEW, figures), baseline))


FLAT = curve((32, 400), (64, 410), (128, 420), (256, 430), (512, 440), (768, 700))


def stored(n_max: int, interval: tuple[int, int | None], because: str | None = None, t0: float = 400) -> Measured:
    return Measured(
        kind="recorded",
        n_max=n_max,
        interval=interval,
        n_first_exit=n_max,
        prediction="deviates" if because else "agrees",
        because=because,
        source="a table",
        kernel="triton",
        curve=[(32, t0)],
    )


def test_a_boundary_where_it_is_predicted_passes() -> None:
    """Within one sweep step, one granule or 15%."""
    assert judge(FLAT, predicted(512)).outcome == "PASS"
    assert judge(FLAT, predicted(700)).outcome == "PASS"


def test_a_boundary_past_the_prediction_fails_and_names_the_free_switches() -> None:
    """tau = 32 against 512 recorded: sixteen times too low."""
    v = judge(FLAT, predicted(32))
    assert v.outcome == "FAIL"
    assert "recorded N_max 512 to 767, principle 32: they differ" in v.reasons[0]
    assert "16 to 32 rows at M=32, 32 to 64 rows at M=96: these switches are free here" in v.reasons[0]


def test_a_boundary_short_of_the_prediction_fails_too() -> None:
    """Both ways."""
    v = judge(curve((32, 400), (64, 600), (128, 900)), predicted(512))
    assert v.outcome == "FAIL"
    assert "T grows 1.50x from N=32 to 64" in v.reasons[0]


def test_a_known_deviation_passes_and_fails_when_it_goes_away() -> None:
    """The baseline's reason is repeated; agreement is news."""
    known = stored(512, (512, 767), because="the switches are free")
    v = judge(FLAT, predicted(32), known)
    assert v.outcome == "PASS"
    assert "deviates, as the baseline says: the switches are free" in v.reasons[0]
    gone = judge(FLAT, predicted(512), known)
    assert gone.outcome == "FAIL"
    assert "they agree, but the baseline says the prediction deviates" in gone.reasons[0]


@pytest.mark.parametrize(("n_max", "interval", "way"), [(64, (64, 79), "grew"), (4096, (4096, None), "shrank")])
def test_a_boundary_that_left_its_baseline_fails_both_ways(
    n_max: int, interval: tuple[int, int | None], way: str
) -> None:
    """A larger N_max is news as well: something changed."""
    v = judge(FLAT, predicted(512), stored(n_max, interval))
    assert v.outcome == "FAIL"
    assert any(f"N_max {way} against the baseline: {n_max} to 512 to 767" in r for r in v.reasons)


def test_a_speed_up_that_shrinks_n_max_is_reported_as_such() -> None:
    """T(N0) fell, so the same absolute curve leaves 20% earlier."""
    v = judge(curve((32, 300), (64, 310), (128, 420), (256, 430)), predicted(64), stored(512, (512, 767)))
    assert any("T(N0) fell from 400.0 to 300.0 us: a speed-up alone shrinks N_max" in r for r in v.reasons)


def test_noise_is_undecided_not_failed() -> None:
    """The interval reaches from the prediction to far past it."""
    points = (Point(32, 400, 1, 1), Point(64, 410, 1.0, 1.05), Point(512, 470, 1.1, 1.3), Point(768, 900, 2, 2.4))
    noisy = Curve(points, 32, "measured", "a GPU", "triton")
    v = judge(noisy, predicted(64))
    assert v.outcome == "UNDECIDED"
    assert "noise leaves N = 512 open" in v.reasons[0]


def test_the_calibrated_tile_roofline_is_what_counts() -> None:
    """Where the device is calibrated, the closed form is reported beside it and held to nothing."""
    calibrated = Figures(1e12, 1e12, Calibration(1e12, 1e12), "calibrated")
    assert judge(FLAT, predicted(32, 512), figures=calibrated).outcome == "PASS"
    assert judge(FLAT, predicted(512, 32), figures=calibrated).outcome == "FAIL"


def calibrated(interval: tuple[int, int | None], n: int) -> Predicted:
    """A prediction of 32 by the principle and `n` in this interval by a calibrated roofline."""
    p = predicted(32, n)
    assert p.tile_roofline is not None
    boundary = replace(p.tile_roofline.boundary, n_max_interval=interval)
    return replace(p, tile_roofline=replace(p.tile_roofline, boundary=boundary), is_interval=True)


GPU = replace(SHEET, basis="calibrated on ...", kernel="triton", residuals=object(), spread=(0.9, 1.1))  # type: ignore[arg-type]


def test_a_measured_boundary_is_held_to_the_calibrated_interval() -> None:
    """Inside it passes, outside it fails, and the interval is told."""
    mine = replace(FLAT, kind="measured")
    assert judge(mine, calibrated((384, 800), 600), figures=GPU).outcome == "PASS"
    v = judge(mine, calibrated((64, 128), 96), figures=GPU)
    assert v.outcome == "FAIL"
    assert "measured N_max 512 to 767, tile roofline 96 [64, 128]: they differ" in v.reasons[0]


def test_an_interval_that_holds_nearly_everything_decides_nothing() -> None:
    """Wider than eight times its beginning, or open: undecided with the held-out error, and the baseline alone counts."""
    measured_curve = replace(FLAT, kind="measured", timer="cuda-graph")
    for interval in ((64, 600), (64, None)):
        v = judge(measured_curve, calibrated(interval, 512), figures=GPU)
        assert v.outcome == "UNDECIDED"
        assert "the interval is wider than 8 times its beginning" in v.reasons[0]
        assert "was 0.9 to 1.1 of the measured one" in v.reasons[0]
        known = stored(512, (512, 767)).model_copy(update={"kind": "measured", "timer": "cuda-graph"})
        assert judge(measured_curve, calibrated(interval, 512), known, GPU).outcome == "PASS"
    assert judge(measured_curve, calibrated((96, 767), 512), figures=GPU).outcome == "PASS"


def test_the_principle_has_the_interval_of_its_errors_on_recorded_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from it by more than the match tolerance fails, inside it passes, and without recordings nothing is held to it."""
    monkeypatch.setattr(catalog, "datasheet_spread", lambda module, framework: (0.5, 2.0))
    assert judge(FLAT, predicted(256)).outcome == "PASS"
    far = judge(FLAT, predicted(64))
    assert far.outcome == "FAIL"
    assert "recorded N_max 512 to 767, principle 64 [32, 128]: they differ" in far.reasons[0]
    monkeypatch.setattr(catalog, "datasheet_spread", lambda module, framework: (0.5, 32.0))
    wide = judge(FLAT, predicted(64))
    assert wide.outcome == "UNDECIDED"
    assert (
        "wider than 8 times its beginning (95% of recorded N_max are 0.5 to 32 times the principle's)"
        in wide.reasons[0]
    )
    assert judge(FLAT, predicted(64), stored(512, (512, 767))).outcome == "PASS"
    monkeypatch.setattr(catalog, "datasheet_spread", lambda module, framework: None)
    unknown = judge(FLAT, predicted(64))
    assert unknown.outcome == "UNDECIDED"
    assert "no recorded curve tells how far the principle is off for moe" in unknown.reasons[0]


def test_a_recorded_curve_is_never_held_to_what_was_fitted_on_recordings() -> None:
    """It is held to the principle; so is a measured one where the calibration was carried over from another GPU."""
    v = judge(FLAT, calibrated((384, 800), 600), figures=GPU)
    assert "principle 32: they differ" in v.reasons[0]
    carried_over = replace(GPU, residuals=None)
    v = judge(replace(FLAT, kind="measured"), calibrated((384, 800), 600), figures=carried_over)
    assert "principle 32: they differ" in v.reasons[0]


@pytest.mark.parametrize(
    ("n", "interval", "outcome", "said"),
    [
        (600, (384, 800), "PASS", None),
        (590, (380, 800), "PASS", "warning: the prediction changed within its interval"),
        (96, (64, 128), "FAIL", "600 [384, 800] to 96 [64, 128] by the tile roofline"),
    ],
)
def test_a_calibrated_prediction_has_changed_where_it_left_its_interval(
    n: int, interval: tuple[int, int | None], outcome: str, said: str | None
) -> None:
    """Other tile parameters alone move it a little: that is a warning."""
    stored_terms = PredictedTerms.model_validate(calibrated((384, 800), 600).as_dict())
    baseline = CaseBaseline(baseline_positions=32, predicted=stored_terms)
    v = judge_prediction(calibrated(interval, n), baseline, "b", [])
    assert v.outcome == outcome
    assert judge_prediction(calibrated(interval, n), baseline, "b", ["33..96 tokens: 16 to 32 rows"]).outcome == outcome
    assert said is None or said in v.reasons[0]


def test_a_kernel_that_the_predictor_does_not_describe_is_held_to_its_baseline_alone() -> None:
    """Without one nothing is claimed, with the cause."""
    figures = Figures(1e12, 1e12, Calibration(1e12, 1e12), "calibrated", False, "T grows 2x from N=1 to 2")
    v = judge(FLAT, predicted(32), figures=figures)
    assert v.outcome == "UNDECIDED"
    assert "does not describe this kernel (T grows 2x from N=1 to 2)" in v.reasons[0]
    assert judge(FLAT, predicted(32), stored(512, (512, 767)), figures).outcome == "PASS"


def test_an_invalid_measurement_is_not_judged() -> None:
    """Its reasons stand alone."""
    assert judge(replace(FLAT, invalid=("drift",)), predicted(512)) == Verdict("INVALID", ("drift",))


def test_a_hole_is_reported() -> None:
    """Both readings, always."""
    v = judge(curve((32, 400), (64, 600), (128, 410), (256, 900)), predicted(128))
    assert any("the curve has a hole: it leaves 32 and is back within tolerance up to 128" in r for r in v.reasons)


def test_another_kernel_than_the_rules_is_the_cause() -> None:
    """The tile rule describes the Triton path."""
    v = judge(replace(FLAT, kernel="flashinfer_trtllm"), predicted(32))
    assert "What ran is flashinfer_trtllm; the tile rule describes the Triton path." in v.reasons[0]


def test_a_changed_map_says_range_tiles_and_effect() -> None:
    """Which tokens, from which tile to which, and what that does to N_max."""
    v = judge_granularity(NEW, OLD, "the baseline of vllm==0.9.1", "N_max 256 to 32 by the principle (branch limits)")
    assert v.outcome == "FAIL"
    assert v.reasons[0].startswith(
        "granularity changed against the baseline of vllm==0.9.1: 33..96 tokens: 16 to 32 rows; 97..256 tokens: 16 to 64 rows"
    )
    assert v.reasons[0].endswith("N_max 256 to 32 by the principle (branch limits)")


def test_equal_maps_pass_and_another_source_is_a_note() -> None:
    """Maps are compared, not file names; another kernel is a change."""
    same = granularity(*([16] * 256 + [64] * 3840))
    assert judge_granularity(same, OLD, "b", "") == Verdict("PASS")
    moved = OLD.model_copy(update={"source": "E=256.json"})
    assert "same tiles from another source" in judge_granularity(same, moved, "b", "").reasons[0]
    assert judge_granularity(replace(same, kernel="cutlass"), OLD, "b", "").outcome == "FAIL"
    assert judge_granularity(same, None, "", "").reasons[0].startswith("no baseline for this map")


def test_other_tile_parameters_are_a_warning() -> None:
    """BLOCK_SIZE_N 128 to 64 with the same rows: no change of granularity, but T(N0) may move."""
    was, now = (replace(granularity(*([16] * 4096)), parameters=((1, 4096, f"BLOCK_SIZE_N={n}"),)) for n in (128, 64))
    v = judge_granularity(now, tiles_of(was), "the baseline of vllm==1", "")
    assert v.outcome == "PASS"
    assert "a faster T(N0) alone can shrink N_max" in v.reasons[0]
    assert judge_granularity(was, tiles_of(was), "the baseline of vllm==1", "") == Verdict("PASS")


def test_a_change_past_a_measured_boundary_is_a_warning() -> None:
    """Tiles change from 65 tokens on, N_max is 1 before and after by a measured curve: warn, don't fail."""
    old = Tiles(kernel="triton", source="default rule", tiles=[(1, 4096, 16)])
    new = granularity(*([16] * 64 + [64] * 4032))
    v = judge_granularity(new, old, "the baseline of vllm==1", "", reach=2)
    assert v.outcome == "PASS"
    assert v.reasons[0].startswith("warning: granularity changed past the measured boundary")
    assert "65..4096 tokens: 16 to 64 rows" in v.reasons[0]
    assert judge_granularity(new, old, "the baseline of vllm==1", "", reach=65).outcome == "FAIL"
    assert judge_granularity(new, old, "the baseline of vllm==1", "").outcome == "FAIL"


def test_a_changed_prediction_gives_both_predictors_before_and_after() -> None:
    """And the tiles behind it."""
    p = predict_case(CASE, SHEET, NEW)
    old = CaseBaseline.model_validate(
        {
            "baseline_positions": 32,
            "predicted": {
                "principle": {"n_max": 256, "limiting": "branch"},
                "tile_roofline": {"n_max": 256, "limiting": "moe"},
            },
        }
    )
    v = judge_prediction(p, old, "the baseline of vllm==0.9.1", ["33..96 tokens: 16 to 32 rows"])
    assert v.outcome == "FAIL"
    assert "N_max 256 to 32 by the principle (branch limits)" in v.reasons[0]
    assert "because of 33..96 tokens: 16 to 32 rows" in v.reasons[0]
    same = CaseBaseline.model_validate({"baseline_positions": 32, "predicted": p.as_dict()})
    assert judge_prediction(p, same, "b", []) == Verdict("PASS")
    assert p.n_idle == math.inf


def test_the_worst_outcome_stands_for_several() -> None:
    """A failure before anything; skipped only if all are."""
    assert worst(["PASS", "FAIL", "UNDECIDED"]) == "FAIL"
    assert worst(["SKIPPED", "PASS"]) == "PASS"
    assert worst(["SKIPPED"]) == "SKIPPED"
    assert worst(["UNDECIDED", "INVALID"]) == "INVALID"


MINE = Case("cpu", Backend("own", ""), "own", catalog.model("qwen3-8b"), "any")


def own(c: Curve, measured: Measured | None = None) -> Verdict:
    b = c.boundary(0.2)
    assert b is not None
    baseline = CaseBaseline(baseline_positions=1, measured=measured)
    return judge_boundary(Evidence(MINE, c, b, baseline=baseline))


def measured(n_max: int, t0: float = 100.0, **changed: object) -> Measured:
    m = Measured(
        kind="measured", n_max=n_max, interval=(n_max, n_max), n_first_exit=n_max, prediction="agrees", source="here",
        kernel="k", timer="cuda-events", curve=[(1, t0)],
    )  # fmt: skip
    return m.model_copy(update=changed)


STEP = Curve(
    tuple(Point(n, 100.0 if n <= 16 else 160.0) for n in (1, 8, 16, 17, 32)),
    1,
    "measured",
    "here",
    "k",
    timer="cuda-events",
)


def test_two_timers_are_not_compared() -> None:
    """The timer is part of what a latency means."""
    assert own(STEP, measured(16)).outcome == "PASS"
    v = own(STEP, measured(64, timer="cuda-graph"))
    assert v.outcome == "UNDECIDED"
    assert "two timers are not compared (measure with --nfp-timer=cuda-graph" in v.reasons[0]


def test_a_baseline_of_a_machine_with_several_states_decides_nothing() -> None:
    """Its own runs gave 8 and 16: neither is a change; 64 is."""
    bimodal = measured(8, runs=[(8, 100.0), (16, 70.0), (8, 100.0)])
    v = own(STEP, bimodal)
    assert v.outcome == "UNDECIDED"
    assert "the baseline's own runs gave N_max 8, 16" in v.reasons[0]
    far = replace(STEP, points=tuple(Point(n, 100.0 if n <= 64 else 160.0) for n in (1, 2, 4, 8, 16, 32, 48, 64, 65)))
    assert own(far, bimodal).outcome == "FAIL"
    assert own(STEP, measured(16, runs=[(16, 100.0), (15, 101.0)])).outcome == "PASS"


def test_a_baseline_that_is_far_slower_than_now_warns() -> None:
    """The same N_max at half the latency: pass, and update it."""
    v = own(STEP, measured(16, t0=200.0))
    assert v.outcome == "PASS"
    assert v.reasons == ("warning: T(N0) was 200.0 us in the baseline and is 100.0 us now: update it",)


def test_a_change_of_kernel_is_the_cause() -> None:
    """Decode to prefill at N=2, not bandwidth."""
    kernels = {32: "decode", 64: "prefill"}
    c = replace(curve((32, 100), (64, 900)), kernels=kernels)
    v = judge(c, predicted(512))
    assert "The kernel changes at N=64: decode to prefill." in v.reasons[0]


def test_a_refused_position_is_unsupported_and_caps() -> None:
    """Four run, five raise: no failure against a longer prediction, and none against a baseline that knows the cap."""
    capped = replace(STEP, points=tuple(Point(n, 100.0) for n in (1, 2, 3, 4)), unsupported={5: "no variant"})
    v = own(capped)
    assert v.outcome == "UNDECIDED"
    assert "N=5 unsupported: no variant" in v.reasons
    assert own(capped, measured(4)).outcome == "PASS"
    refused = replace(FLAT, points=FLAT.points[:2], unsupported={96: "no variant"})
    b = refused.boundary(0.2)
    assert b is not None
    v = judge_boundary(Evidence(CASE, refused, b, Basis(predicted(512), NEW, SHEET)))
    assert v.outcome == "UNSUPPORTED"


def test_an_unknown_kernel_is_undecided_and_must_be_decided_where_the_baseline_knew_it() -> None:
    """Never a pass: not with the same tiles, not without a baseline; the same code on both sides is the same choice."""
    unknown = replace(NEW, kernel="unknown", kernel_reason="no stub", choice=(("f.py: choose", "1"),))
    known = tiles_of(NEW)
    v = judge_granularity(unknown, known, "the baseline", "")
    assert (v.outcome, v.must_decide) == ("UNDECIDED", True)
    assert "which kernel runs is unknown now (now: no stub)" in v.reasons[0]
    v = judge_granularity(NEW, tiles_of(unknown), "the baseline", "")
    assert (v.outcome, v.must_decide) == ("UNDECIDED", False)
    assert judge_granularity(unknown, None, "", "").outcome == "UNDECIDED"
    assert judge_granularity(unknown, tiles_of(unknown), "the baseline", "").outcome == "PASS"
    other = replace(unknown, choice=(("f.py: choose", "2"),))
    assert judge_granularity(other, tiles_of(unknown), "the baseline", "").outcome == "UNDECIDED"
