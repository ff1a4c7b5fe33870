"""What changed, on what, and whether it matters; the same over many releases."""

from __future__ import annotations

from pytest_nfp.compare.changes import changes, coverage, headline, pairs, view_of
from pytest_nfp.records import CaseRecord, TestResult
from pytest_nfp.report import history
from pytest_nfp.report.charts import curve_rows, strip_rows
from tests.report.made import BASELINE, FINE, GRANULARITY, case, record


def release(of: str, n_max: int, **changed: object) -> CaseRecord:
    told: dict[str, object] = {
        "id": f"h200-vllm=={of}-a", "backend": f"vllm=={of}", "n_max": n_max, "n_max_interval": (n_max, n_max),
    }  # fmt: skip
    return case("a", **told | changed)


def test_the_same_change_of_several_cases_is_told_once() -> None:
    """Where, what, the largest effect and of how many cases; what matters first."""
    one = case("a", granularity=GRANULARITY, baseline=BASELINE, n_max=32, n_max_interval=(32, 63))
    two = one.model_copy(
        update={"id": "other", "workload": "moe-bf16-b1-k2-balanced", "n_max": 128, "n_max_interval": (128, 200)}
    )
    calm = case("b", granularity=GRANULARITY, baseline={**BASELINE, "predicted": None, "n_max_interval": None})
    found = changes(pairs([record(calm, one, two)]))
    assert [(c.matters, len(c.cases)) for c in found] == [(True, 2), (False, 1)]
    assert found[0].where == "h200: vllm==0.9 to vllm==1, a moe"
    assert found[0].what == "16 to 64 rows from M=33"
    assert "N_max 512 to 32 (recorded, moe-bf16-b1-k8-balanced, and 1 more)" in found[0].effect
    assert "N_max 256 to 32 (principle" in found[0].effect
    assert found[1].effect == "no N_max moves"


def test_another_kernel_matters_and_an_unknown_one_is_undecided() -> None:
    """A kernel's name that differs is a change of its own; where one side does not know it, that is said."""
    same = {**BASELINE, "tiles": GRANULARITY["tiles"], "predicted": None, "n_max_interval": None}
    other = case("a", granularity=GRANULARITY, baseline={**same, "kernel": "flashinfer"})
    unknown = case("b", granularity=GRANULARITY, baseline={**same, "kernel": "unknown"})
    first, second = changes(pairs([record(other, unknown)]))
    assert (first.what, first.matters) == ("kernel flashinfer to triton", True)
    assert (second.what, second.matters) == ("granularity is undecided: which kernel runs is unknown before", True)


def test_a_move_is_what_the_judge_would_call_one() -> None:
    """Intervals that are apart by more than the match tolerance; curves of two kinds are not compared; an untrusted one says nothing."""

    def moves(
        interval: tuple[int, int | None], kind: str = "recorded", outcome: str = "PASS"
    ) -> tuple[tuple[str, int, int], ...]:
        held = {**BASELINE, "predicted": None, "n_max_interval": interval, "kind": kind}
        now = case("a", granularity=GRANULARITY, baseline=held, n_max_interval=(64, 95), outcome=outcome, baseline_positions=1,
                   curve=[(1, 1.0), (64, 1.1), (96, 1.3), (128, 1.4), (192, 2.0), (208, 2.1), (224, 2.2)])  # fmt: skip
        return pairs([record(now)])[0].n_max

    assert moves((95, 100)) == ()
    assert moves((120, 125)) == ()  # A sweep step away.
    assert moves((200, None)) == (("recorded", 512, 512),)
    assert moves((200, 210)) == (("recorded", 512, 512),)
    assert moves((200, 210), "measured") == ()
    assert moves((200, 210), outcome="INVALID") == ()


def test_two_timers_and_an_untrusted_boundary_are_not_compared() -> None:
    """As the judge has it: on either side, and where another test of the case fails."""
    old = record(case("a", timer="cuda-graph", curve=FINE, n_max=256, n_max_interval=(256, 319)))
    apart: dict[str, object] = {"curve": FINE, "n_max": 32, "n_max_interval": (32, 47)}
    broken = {"granularity": TestResult(outcome="FAIL"), "boundary": TestResult(outcome="INVALID")}
    assert pairs([record(case("a", timer="cuda-graph", **apart))], old)[0].n_max == (("recorded", 256, 32),)
    assert pairs([record(case("a", timer="cuda-events", **apart))], old)[0].n_max == ()
    untrusted = record(case("a", timer="cuda-graph", outcome="FAIL", tests=broken, **apart))
    assert pairs([untrusted], old)[0].n_max == ()
    assert pairs([old], untrusted)[0].n_max == ()


def test_what_was_not_compared_is_said() -> None:
    """Cases without a baseline, cases that are new, and cases that are gone; of several releases before, the nearest counts."""
    held = case("a", granularity=GRANULARITY, baseline=BASELINE)
    assert coverage(view_of([record(case("b"))])) == "No case has a baseline: nothing was compared."
    assert coverage(view_of([record(held, case("b"))])) == "1 of 2 cases are new to a baseline."
    assert coverage(view_of([record(held)])) == ""
    old = record(release("0.9.1", 256), release("0.10.0", 64), case("gone"))
    said = coverage(view_of([record(release("0.11.0", 64), case("new"))], old))
    assert (
        said
        == "1 of 2 cases are new to the earlier record. 1 cases of the earlier record are not in this one, such as h200-vllm==1-gone."
    )
    nearest = pairs([record(release("0.11.0", 64), release("0.9.2", 64))], old)
    assert [p.before.name for p in nearest if p.before] == ["vllm==0.10.0", "vllm==0.9.1"]


def test_the_headline_is_the_verdict() -> None:
    """Failures first, then measurements that can't be trusted, then what is open; a run that was cut short says so first."""
    passed, failed, broken, still = (case(o, outcome=o) for o in ("PASS", "FAIL", "INVALID", "UNDECIDED"))
    assert headline([record(passed, failed)], []) == "1 of 2 cases fail."
    assert headline([record(passed, broken)], []) == "Nothing fails, and 1 of 2 measurements are not to be trusted."
    assert headline([record(passed, still)], []) == "Nothing fails: 1 of 2 cases pass, the others are open."
    assert headline([record(passed, partial=True)], []) == "Partial, the run was interrupted: the one case passes."


def test_history_orders_releases_and_marks_what_changed() -> None:
    """0.9 before 0.10; measured and predicted are rows of their own, and moves are those of the judge; a case of one release has
    no history, nor has a curve that is not to be trusted; the newest record counts.
    """
    old = record(release("0.10.0", 512, curve=FINE), case("alone"), started="2026-01-02T00:00:00+00:00")
    older = record(release("0.9.1", 256), release("0.10.0", 1), started="2026-01-01T00:00:00+00:00")
    terms = {"tile_roofline": {"n_max": 64, "limiting": "moe"}}
    newest = record(
        release("0.11.0", 2, outcome="INVALID"), release("0.12.0", 513, n_max_interval=(500, 600), predicted=terms)
    )
    (table,) = history.tables([old, older, newest])
    assert table["releases"] == ["0.9.1", "0.10.0", "0.11.0", "0.12.0"]
    rows = {r["kind"]: r["cells"] for r in table["rows"]}
    assert rows["recorded"] == [("256 [256, 256]", False), ("512 [512, 512]", True), None, ("513 [500, 600]", False)]
    assert rows["predicted"] == [("512", False), ("512", False), ("512", False), ("64", True)]
    ((said, svg),) = history.figures([table])
    assert "1: a moe-bf16-b1-k8-balanced, recorded" in said
    assert "<svg" in svg


def test_charts_hold_what_the_record_holds() -> None:
    """Ratios to T(N0), cut where the axis ends; intervals; the baseline's curve over its own T(N0); the strip cut where it changed."""
    c = case("a", granularity=GRANULARITY, baseline=BASELINE, ratios=[(512, 1.08, 1.12)], curve=[(32, 100.0), (64, 110.0), (512, 280.0), (768, 400.0), (1024, 500.0)])  # fmt: skip
    pair = pairs([record(c)])[0]
    rows = curve_rows(c, 0.2, pair.before)
    assert rows is not None
    assert [(p["n"], p["ratio"], p["within"]) for p in rows["points"]] == [
        (32, 1.0, True), (64, 1.1, True), (512, 2.8, False), (768, 3.0, False),
    ]  # fmt: skip
    assert [(p["low"], p["high"]) for p in rows["points"]][2] == (1.08, 1.12)
    assert rows["before"][1] == {"n": 64, "ratio": 420.5 / 410}
    strip = strip_rows(pair.before, pair.after, pair.tiles)
    assert strip is not None
    assert [(r["side"], r["first"], r["last"], r["tile"], r["changed"]) for r in strip["strip"]] == [
        ("before", 1, 32, 16, False),
        ("before", 33, 512, 16, True),
        ("now", 1, 32, 16, False),
        ("now", 33, 512, 64, True),
    ]
