"""Reports say what the record says, open offline, and escape what others wrote."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pytest_nfp import records
from pytest_nfp.files import FileError
from pytest_nfp.records import CaseRecord, Record, TestResult
from pytest_nfp.report import write_reports
from pytest_nfp.report.html import render
from pytest_nfp.report.terminal import summary_lines

PREDICTED = {"principle": {"n_max": 32, "limiting": "branch"}, "tile_roofline": {"n_max": 512, "limiting": "moe"}}


def case(name: str, **changed: object) -> CaseRecord:
    fields: dict[str, object] = {
        "id": f"h200-vllm==1-{name}",
        "gpu": "h200",
        "backend": "vllm==1",
        "module": "moe",
        "subject": name,
        "workload": "moe-bf16-b1",
        "kind": "recorded",
        "outcome": "PASS",
        "predicted": PREDICTED,
        "n_idle": 1445.07,
        "baseline_positions": 32,
        "n_max": 512,
        "n_max_interval": (512, 767),
        "n_first_exit": 256,
        "curve": [(32, 400.0), (64, 410.5), (512, 440.25), (768, 700.0)],
    }
    return CaseRecord.model_validate(fields | changed)


def record(*cases: CaseRecord, partial: bool = False) -> Record:
    return Record(
        schema=records.SCHEMA,
        tool="pytest-nfp 0",
        gpu="h200",
        started="2026-01-01T00:00:00+00:00",
        partial=partial,
        tolerance=0.2,
        match_tolerance=0.15,
        protocol="adaptive",
        seed=0,
        machine={"title": "a machine"},
        cases=list(cases),
    )


class Cells(HTMLParser):
    """The cells of each case's row, by their field; and every address that the page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, dict[str, str]] = {}
        self.fetched: list[str] = []
        self._row: dict[str, str] = {}
        self._field: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if "data-case" in given:
            self._row = self.rows.setdefault(str(given["data-case"]), {})
        self._field = given.get("data-field") if tag == "td" else self._field
        self.fetched += [str(v) for k, v in attrs if k in ("src", "href") and not str(v).startswith(("#", "data:"))]

    def handle_data(self, data: str) -> None:
        if self._field:
            self._row[self._field] = self._row.get(self._field, "") + data.strip()

    def handle_endtag(self, tag: str) -> None:
        if tag == "td":
            self._field = None


def parsed(html: str) -> Cells:
    cells = Cells()
    cells.feed(html)
    return cells


def test_the_pages_numbers_are_the_records() -> None:
    """Every cell of a case's row, from the record alone."""
    row = parsed(render(record(case("a")))).rows["h200-vllm==1-a"]
    assert row == {
        "n_idle": "1445",
        "principle": "32 branch",
        "tile_roofline": "512 moe",
        "n_max": "512",
        "interval": "[512, 767]",
        "first_exit": "256",
        "kind": "recorded",
        "outcome": "PASS",
    }


def test_a_prediction_never_appears_as_a_measurement() -> None:
    """Without a curve the n_max cell is empty, in the page and on the terminal."""
    c = case(
        "a",
        kind="predicted",
        curve=[],
        n_max=32,
        n_max_interval=None,
        n_first_exit=None,
        n_idle=None,
        n_idle_unbounded=True,
    )
    row = parsed(render(record(c))).rows["h200-vllm==1-a"]
    assert (row.get("n_max", ""), row["kind"], row["n_idle"]) == ("", "predicted", "unbounded")
    header, line, *_ = summary_lines(record(c))
    assert header.split()[:2] == ["case", "N_idle"]
    assert line.split() == ["vllm==1-a", "unbounded", "32", "branch", "512", "moe", "predicted", "PASS"]


def test_the_page_fetches_nothing() -> None:
    """Offline: no address outside the file, no script."""
    html = render(record(case("a"), case("b", n_max_interval=(64, None))))
    assert parsed(html).fetched == []
    assert "<script" not in html
    assert "url(" not in html
    assert "[64, ..]" in html


def test_what_others_wrote_is_escaped() -> None:
    """A kernel's name or a reason can't become markup."""
    html = render(record(case("<b>x</b>", reasons=["<script>alert(1)</script>"], kernel="<i>k</i>")))
    assert "<script>alert" not in html
    assert "&lt;script&gt;" in html
    assert "<b>x</b>" not in html
    assert "<i>k</i>" not in html


def test_the_chart_marks_the_limit_n_max_and_both_predictions() -> None:
    """One point a measured N inside the plot; the outside ones in another class."""
    html = render(record(case("a")))
    assert len(re.findall(r'class="dot"', html)) == 3
    assert len(re.findall(r'class="out"', html)) == 1
    for label in ("n_max 512", "principle 32", "tile roofline 512"):
        assert f">{label}</text>" in html


def test_reports_lead_to_each_other(tmp_path: Path) -> None:
    """<gpu>/record.json, <gpu>/index.html, and an index over all of them; a second run keeps the first's report."""
    write_reports(tmp_path, [record(case("a"))])
    other = record(case("b", gpu="cpu")).model_copy(update={"gpu": "cpu"})
    written = write_reports(tmp_path, [other])
    assert written == [tmp_path / "cpu" / "index.html", tmp_path / "index.html"]
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert parsed(index).fetched == ["cpu/index.html", "h200/index.html"]
    assert records.read(tmp_path / "h200" / "record.json") == record(case("a"))


def test_the_summary_says_reasons_of_what_did_not_pass() -> None:
    """And those of known deviations; of the rest with -v."""
    cases = [
        case("a", outcome="FAIL", reasons=["they differ"]),
        case("b", reasons=["no baseline"]),
        case("c", reasons=["deviates, as the baseline says: x"]),
    ]
    text = "\n".join(summary_lines(record(*cases, partial=True)))
    assert "FAIL vllm==1-a: they differ" in text
    assert "no baseline" not in text
    assert "deviates, as the baseline says" in text
    assert "partial: the run was interrupted" in text
    assert text.endswith("3 cases: 1 FAIL, 2 PASS")
    assert "no baseline" in "\n".join(summary_lines(record(*cases), verbosity=1))


def test_a_record_survives_its_file_and_a_broken_one_is_named(tmp_path: Path) -> None:
    """Written, read, equal; a wrong field says file and field."""
    path = tmp_path / "record.json"
    r = record(case("a", tests={"boundary": TestResult(outcome="PASS")}))
    records.write(path, r)
    assert records.read(path) == r
    path.write_text(
        path.read_text(encoding="utf-8").replace('"kind": "recorded"', '"kind": "guessed"'), encoding="utf-8"
    )
    with pytest.raises(FileError, match=r"record.json: cases.0.kind: "):
        records.read(path)


def test_no_number_of_a_record_can_be_nan() -> None:
    """JSON without NaN or infinity."""
    with pytest.raises(ValueError, match="Out of range float"):
        records.dump(record(case("a", curve=[(32, float("nan"))])))


def test_merging_tests_of_one_case_keeps_the_curve() -> None:
    """Whatever the order in which the three tests came."""
    boundary = case("a", tests={"boundary": TestResult(outcome="FAIL", reasons=["x"])})
    prediction = case("a", kind="predicted", curve=[], n_max=32, tests={"prediction": TestResult(outcome="PASS")})
    for first, second in ((boundary, prediction), (prediction, boundary)):
        merged = records.merge_case(first, second)
        assert (merged.kind, merged.n_max, merged.outcome, merged.reasons) == ("recorded", 512, "FAIL", ["x"])
        assert set(merged.tests) == {"boundary", "prediction"}


def test_a_full_model_stands_beside_the_sum_of_its_modules() -> None:
    """Both intervals, the steps between them, forward and step at N0, and the forward over what reading its bytes takes."""
    composed = {
        "n_max": 3,
        "n_max_interval": [3, 3],
        "steps": 1,
        "limiting": "ffn up",
        "error": 0.034,
        "curve": [],
        "parts": {},
    }
    model = case(
        "m", kind="measured", baseline_positions=1, n_max=4, n_max_interval=(4, 5), curve=[(1, 13000.0), (4, 15000.0)],
        composed=composed, steps={1: 14000.0}, floor_us=8000.0,
    )  # fmt: skip
    lines = summary_lines(record(model, case("other")))
    at = next(i for i, line in enumerate(lines) if line.startswith("full model"))
    assert lines[at + 1].split() == [
        "vllm==1-m",
        "[4,",
        "5]",
        "[3,",
        "3]",
        "1",
        "ffn",
        "up",
        "3%",
        "13.0",
        "14.0",
        "1.6x",
    ]
    assert not any(line.startswith("full model") for line in summary_lines(record(case("other"))))
    failed = case("m", composed={"reason": "its q can't be measured alone"})
    assert not any(line.startswith("full model") for line in summary_lines(record(failed)))
