"""nfp judge on the facts of real reports, and nfp compare on two records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_nfp.cli import main
from pytest_nfp.records import CaseRecord, TestResult, write
from tests.report.made import record as one_record


def judge(capsys: pytest.CaptureFixture[str], path: Path, text: str, *more: str) -> tuple[int, dict[str, Any]]:
    (path / "curve.csv").write_text(text)
    code = main(["judge", str(path / "curve.csv"), "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def said(answer: dict[str, Any], part: str) -> bool:
    return any(part in r for r in answer["reasons"])


def test_the_json_has_the_documented_fields(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And a decided curve passes with 0."""
    code, a = judge(capsys, tmp_path, "n,latency_us\n1,100\n2,101\n3,150\n")
    assert code == 0
    assert a == {
        "n_max": 2,
        "n_max_interval": [2, 2],
        "n_first_exit": 2,
        "plateaus": [[1, 2, 101.0]],
        "outcome": "PASS",
        "reasons": ["cliff at N=3: 1.49x T(2)"],
    }


def test_decode_to_prefill_at_two_positions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The kernel changes at N=2, ten times slower: N_max is 1 and the cause is the kernel, not bandwidth."""
    text = "n,latency_us,kernel\n1,30,batch decode\n2,300,FA3 prefill (tile 128)\n4,301,FA3 prefill (tile 128)\n"
    _, a = judge(capsys, tmp_path, text)
    assert a["n_max"] == 1
    assert said(
        a,
        "The kernel changes at N=2: batch decode to FA3 prefill (tile 128). That is another kernel's latency, not bandwidth",
    )


def test_a_cliff_then_a_plateau_where_splitting_ends(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """1.4 ms whatever the query length from 2 on: one cliff, one plateau, and the cause by the kernel's name."""
    text = "n,latency_us,kernel\n1,61,split-KV\n2,1391,no split\n4,1400,no split\n8,1410,no split\n"
    _, a = judge(capsys, tmp_path, text)
    assert a["n_max_interval"] == [1, 1]
    assert a["plateaus"] == [[2, 8, 1400.0]]
    assert said(a, "cliff at N=2: 22.80x T(1)")
    assert said(a, "split-KV to no split")


def test_what_lies_between_two_measured_n_is_an_interval(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """33 us at one position, 1279 at four: N_max is 1 to 3."""
    _, a = judge(capsys, tmp_path, "q,us\n1,33\n4,1279\n")
    assert (a["n_max"], a["n_max_interval"]) == (1, [1, 3])


def test_cliffs_at_nine_and_thirty_three(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A dense model's latencies: two or three positions, three was not measured."""
    rows = zip((1, 2, 4, 8, 9, 16, 32, 33), (31.0, 36.2, 42.3, 68.7, 106.9, 118.7, 146.1, 190.9), strict=True)
    _, a = judge(capsys, tmp_path, "n,latency_ms\n" + "".join(f"{n},{t}\n" for n, t in rows))
    assert a["n_max_interval"] == [2, 3]
    assert [r.split(":")[0] for r in a["reasons"] if r.startswith("cliff")] == ["cliff at N=9", "cliff at N=33"]
    assert said(a, "what lies between was not measured")


def test_a_variant_that_is_not_compiled_caps_the_curve(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Four tokens fit, five to eight raise: capped at 4 with the reason, no NaN, and not a failure."""
    text = "n,latency_us,error\n1,50,\n2,50,\n3,51,\n4,51,\n5,nan,64-row variant is not compiled\n6,,64-row variant is not compiled\n"
    code, a = judge(capsys, tmp_path, text)
    assert (code, a["outcome"], a["n_max"], a["n_max_interval"]) == (0, "UNSUPPORTED", 4, [4, 4])
    assert said(a, "N=5 unsupported: 64-row variant is not compiled")
    assert said(a, "capped at 4 by what the kernel refuses")
    assert "NaN" not in json.dumps(a)


def test_mixed_graph_modes_have_no_n_max(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Full graphs at multiples of three, piecewise elsewhere: nothing is claimed."""
    rows = "".join(
        f"{n},{100 + n},{'full' if n % 3 == 0 else 'piecewise'}\n" for n in (1, 2, 3, 4, 6, 8, 9, 16, 18, 24)
    )
    code, a = judge(capsys, tmp_path, "n,latency_us,graph_mode\n" + rows)
    assert (code, a["outcome"], a["n_max"], a["n_max_interval"]) == (1, "INVALID", None, None)
    assert said(a, "full at N = 3, 6, 9, 18, 24")


def test_no_block_pays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Throughput of block drafts is below that without: the advice is off, and device and host time are kept apart."""
    rates = {1: 32.5, 2: 16.6, 4: 27.2, 6: 30.9, 8: 31.5, 10: 31.0, 16: 27.9}
    rows = "".join(f"{n},{30 + n * 8.75},{32 if n == 8 else 1},{rate}\n" for n, rate in rates.items())
    _, a = judge(capsys, tmp_path, "n,latency_ms,host_ms,tokens_per_s\n" + rows)
    assert said(a, "by throughput no N pays: off, at N=1, gives 32.5 tokens/s")
    assert said(a, "N_max is of device time; with the host's time a step has N_max")


def test_weight_traffic_of_more_experts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """51 to 112 ms from one to two positions of a mixture of 8 in 256: N_max is 1."""
    _, a = judge(capsys, tmp_path, "n,latency_ms\n1,51\n2,112\n")
    assert a["n_max_interval"] == [1, 1]


def test_a_latency_that_does_not_depend_on_n_claims_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Sixty-four positions for the price of one."""
    code, a = judge(capsys, tmp_path, "n,us\n1,100\n2,100\n8,100.2\n64,100.1\n")
    assert (code, a["outcome"], a["n_max"]) == (1, "INVALID", None)


def test_noise_on_the_limit_is_undecided(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Exit 3, and the interval."""
    code, a = judge(capsys, tmp_path, "n,latency_us,low,high\n1,100,99,101\n2,119,112,126\n3,180,175,185\n")
    assert (code, a["outcome"], a["n_max_interval"]) == (3, "UNDECIDED", [1, 2])


@pytest.mark.parametrize(("expect", "code"), [("2", 0), ("3", 1)])
def test_an_expected_n_max_decides(capsys: pytest.CaptureFixture[str], tmp_path: Path, expect: str, code: int) -> None:
    """--expect makes a gate of it."""
    assert judge(capsys, tmp_path, "n,us\n1,100\n2,110\n3,150\n", "--expect", expect)[0] == code


def test_tolerance_and_baseline_positions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """N0 of balanced routing, and another epsilon."""
    text = "n,us\n1,10\n32,100\n64,104\n96,115\n"
    assert judge(capsys, tmp_path, text, "--baseline-positions", "32")[1]["n_max_interval"] == [96, None]
    assert judge(capsys, tmp_path, text, "--baseline-positions", "32", "--tolerance", "0.1")[1]["n_max_interval"] == [
        64,
        95,
    ]


def test_bad_input_exits_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On standard error, with the file; the text form of a good one is for people."""
    assert main(["judge", str(tmp_path / "nowhere.csv")]) == 2
    assert "nowhere.csv: can't be read" in capsys.readouterr().err
    (tmp_path / "c.csv").write_text("n,us\n1,100\n2,101\n3,150\n")
    assert main(["judge", str(tmp_path / "c.csv")]) == 0
    out = capsys.readouterr().out
    assert "PASS: N_max 2, first exit 2, N0 1" in out
    assert "plateau 1..2: 101.0 us; sweet spot N=2" in out


def record(path: Path, release: str = "1", **changed: Any) -> Path:
    identity = {"gpu": "NVIDIA H20", "driver": changed.pop("driver", "570")}
    clock = changed.pop("clock", 1980)
    case: dict[str, Any] = {
        "id": f"h20-vllm=={release}-m-w",
        "gpu": "h20",
        "backend": f"vllm=={release}",
        "module": "moe",
        "subject": "m",
        "workload": "w",
        "kind": "measured",
        "outcome": "PASS",
        "tests": {"boundary": TestResult(outcome="PASS")},
        "baseline_positions": 1,
        "n_max": 16,
        "n_max_interval": (16, 16),
        "n_first_exit": 16,
        "curve": [(1, 100.0), (16, 105.0), (17, 150.0)],
        "ratios": [(16, 1.04, 1.06), (17, 1.48, 1.52)],
        "timer": "cuda-events",
        "kernel": "triton",
    }
    machine = {"title": "NVIDIA H20", "identity": identity, "recorded": {"clock": clock}}
    write(path, one_record(CaseRecord(**case | changed)).model_copy(update={"gpu": "h20", "machine": machine}))
    return path


def compare(
    capsys: pytest.CaptureFixture[str], folder: Path, old: dict[str, Any], new: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    code = main(["compare", str(record(folder / "old.json", **old)), str(record(folder / "new.json", **new)), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_an_unchanged_boundary_passes_across_releases_and_clocks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Cases match without the release; a clock is recorded, not compared; a driver is."""
    code, d = compare(capsys, tmp_path, {"clock": 1980}, {"release": "2", "clock": 1750})
    assert (code, d["outcome"], d["machine"]) == (0, "PASS", [])
    _, d = compare(capsys, tmp_path, {}, {"driver": "580"})
    assert d["machine"] == ["driver: 570 to 580"]


@pytest.mark.parametrize(("interval", "n_max", "way"), [((8, 8), 8, "shrank"), ((64, 64), 64, "grew")])
def test_a_changed_boundary_fails_both_ways(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, interval: tuple[int, int], n_max: int, way: str
) -> None:
    """Exit 1, so that a pipeline can stop on it."""
    new = {"n_max": n_max, "n_max_interval": interval, "ratios": []}
    code, d = compare(capsys, tmp_path, {}, new)
    assert code == 1
    assert d["cases"][0]["reasons"][0] == f"N_max {way}: 16 to {n_max}"


def test_a_speed_up_that_shrinks_n_max_is_reported_as_such(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """T(1) halved: the boundary shrank, nothing became slower."""
    new = {"n_max": 8, "n_max_interval": (8, 8), "ratios": [], "curve": [(1, 50.0), (8, 55.0), (9, 70.0)]}
    _, d = compare(capsys, tmp_path, {}, new)
    assert "a speed-up of T(N0) alone shrinks N_max" in d["cases"][0]["reasons"]


def test_two_timers_are_not_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Exit 3."""
    code, d = compare(capsys, tmp_path, {}, {"timer": "cuda-graph"})
    assert code == 3
    assert d["cases"][0]["reasons"] == ["measured by cuda-events and by cuda-graph: two timers are not compared"]


def test_a_record_that_is_far_slower_than_now_warns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Twice the latency then: the older figure is stale."""
    slow = {"curve": [(1, 200.0), (16, 210.0), (17, 300.0)]}
    code, d = compare(capsys, tmp_path, slow, {})
    assert code == 0
    assert d["cases"][0]["reasons"] == [
        "warning: T(N0) was 200.0 us and is 100.0 us: the older record is far slower than now"
    ]


def test_samples_of_both_are_ranked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """3% is a change where the samples say so, and none where they don't."""
    old = {"samples": {1: [100 + i % 3 for i in range(30)]}}
    same = {"samples": {1: [100 + (i + 1) % 3 for i in range(30)]}}
    moved = {"samples": {1: [103 + i % 3 for i in range(30)]}, "curve": [(1, 104.0), (16, 105.0), (17, 150.0)]}
    assert compare(capsys, tmp_path, old, same)[1]["cases"][0]["reasons"] == []
    assert "(rank test)" in compare(capsys, tmp_path, old, moved)[1]["cases"][0]["reasons"][0]


def test_noise_missing_cases_and_invalid_curves_are_undecided(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each with its reason, exit 3."""
    noisy = {"n_max_interval": (4, 40), "ratios": [(8, 1.1, 1.3), (40, 1.1, 1.3)]}
    for new, reason in (
        (noisy, "noise is too large"),
        ({"subject": "other"}, "there is no curve"),
        ({"outcome": "INVALID", "reasons": ["drift"]}, "the curve after is not to be trusted: drift"),
    ):
        code, d = compare(capsys, tmp_path, {}, new)
        assert code == 3
        assert reason in d["cases"][0]["reasons"][0]


def test_compare_in_words_and_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A row a case; a file that is no record exits 2."""
    old, new = record(tmp_path / "old.json"), record(tmp_path / "new.json", "2")
    assert main(["compare", str(old), str(new)]) == 0
    assert "PASS       h20 vllm m w: N_max 16 to 16" in capsys.readouterr().out
    (tmp_path / "bad.json").write_text("{}")
    assert main(["compare", str(old), str(tmp_path / "bad.json")]) == 2


def test_a_latency_of_hundreds_of_digits_is_bad_input(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Named with its file, and no traceback."""
    for huge in ("9" * 400, "9" * 5000):
        for name, text in (("a.json", f"[[1, {huge}], [2, 3]]"), ("a.csv", f"n,latency_us\n1,{huge}\n2,3\n")):
            (tmp_path / name).write_text(text, encoding="utf-8")
            assert main(["judge", str(tmp_path / name)]) == 2
            assert name in capsys.readouterr().err
