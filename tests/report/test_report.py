"""Reports say what the record says, open offline, and escape what others wrote."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pytest_nfp import records
from pytest_nfp.compare.changes import view_of
from pytest_nfp.files import FileError
from pytest_nfp.records import FIRST, Record, TestResult
from pytest_nfp.report import write_reports
from pytest_nfp.report.charts import bundle_text
from pytest_nfp.report.html import render
from pytest_nfp.report.terminal import headline, summary_lines
from tests.conftest import PROJECT

from .made import BASELINE, FINE, GRANULARITY, case, record


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


def test_no_script_runs_but_the_pages_own_and_none_evaluates_text() -> None:
    """The policy names every script that stands in the page by its sha256, and Vega's; it allows neither eval nor others."""
    page = render_one(record(case("a")))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    scripts = next(part for part in policy.split("; ") if part.startswith("script-src"))
    assert "unsafe" not in scripts
    own = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (*own, bundle_text())]
    assert len(own) == 2
    assert scripts.split()[1:] == [f"'sha256-{d}'" for d in digests]


def render_one(one: Record) -> str:
    return render(view_of([one]))


def parsed(html: str) -> Cells:
    cells = Cells()
    cells.feed(html)
    return cells


def test_the_pages_numbers_are_the_records() -> None:
    """Every cell of a case's row, from the record alone."""
    row = parsed(render_one(record(case("a")))).rows["h200-vllm==1-a"]
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
    row = parsed(render_one(record(c))).rows["h200-vllm==1-a"]
    assert (row.get("n_max", ""), row["kind"], row["n_idle"]) == ("", "predicted", "unbounded")
    header, line, *_ = summary_lines(record(c))
    assert header.split()[:2] == ["case", "N_idle"]
    assert line.split() == ["vllm==1-a", "unbounded", "32", "branch", "512", "moe", "predicted", "PASS"]


def test_the_page_fetches_nothing() -> None:
    """Offline: no address outside the file but names of XML, and a policy that would refuse one."""
    html = render_one(record(case("a"), case("b", n_max_interval=(64, None))))
    assert parsed(html).fetched == []
    assert "default-src 'none'" in html
    assert "url(" not in html.replace("url(#", "")
    assert "[64, ..]" in html


def test_what_others_wrote_is_escaped() -> None:
    """A kernel's name or a reason can't become markup."""
    html = render_one(record(case("<b>x</b>", reasons=["<script>alert(1)</script>"], kernel="<i>k</i>")))
    assert "<script>alert" not in html
    assert "&lt;script&gt;" in html
    assert "<b>x</b>" not in html
    assert "<i>k</i>" not in html


def test_the_chart_marks_the_limit_n_max_and_both_predictions() -> None:
    """One point a measured N; the outside ones in the colour of failure; the page's own colours alone."""
    html = render_one(record(case("a", granularity=GRANULARITY, baseline=BASELINE)))
    static = html[html.index('class="static"') :]
    points = re.findall(r'<path aria-label="[^"]*"[^>]*fill="(var\([a-z-]+\))"', static)
    assert [points.count(f"var(--{c})") for c in ("curve", "fail")] == [3, 1]
    for label in ("n_max 512", "principle 32", "tile roofline 512", "n_max before 512"):
        assert f">{label}</text>" in static
    drawn = "".join(re.findall(r"<svg.*?</svg>", static, re.S))
    colours = {c for _, c in re.findall(r'(fill|stroke)="([^"]+)"', drawn)} - {"none", "transparent", "currentColor"}
    assert all(c.startswith("var(--") for c in colours), colours


def test_a_report_of_few_cases_is_complete_without_its_script() -> None:
    """All charts of twenty cases, those of six of more: a curve and a map each."""
    for count, drawn in ((20, 20), (21, 6)):
        cases = [case(f"a{i}", id=f"a{i}", curve=FINE, granularity=GRANULARITY) for i in range(count)]
        text = render(view_of([record(*cases)]))
        static = text[text.index('class="static"') : text.index('id="runs"')]
        assert (static.count("<figure>"), static.count("<svg")) == (drawn, 2 * drawn)


def test_a_folder_has_a_report_a_gpu_and_one_over_all(tmp_path: Path) -> None:
    """<gpu>/ with record, page, Markdown and JUnit, and a page over all records; a second run keeps the first's."""
    write_reports(tmp_path, [record(case("a"))])
    alone = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert (
        alone == render(view_of([record(case("a"))])) == (tmp_path / "h200" / "index.html").read_text(encoding="utf-8")
    )
    other = record(case("b", gpu="cpu", id="cpu-vllm==1-b"), gpu="cpu")
    written = write_reports(tmp_path, [other])
    assert written == [tmp_path / "cpu" / "index.html", tmp_path / "index.html"]
    both = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert list(parsed(both).rows) == ["cpu-vllm==1-b", "h200-vllm==1-a"]
    assert sorted(p.name for p in (tmp_path / "h200").iterdir()) == [
        "index.html", "junit.xml", "record.json", "summary.md",
    ]  # fmt: skip
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


def test_a_record_of_schema_1_is_read_as_it_would_be_now(tmp_path: Path) -> None:
    """What its cases' workloads say together is said apart; a record of an unknown schema is refused by name."""
    path = tmp_path / "record.json"
    data = json.loads(records.dump(record(case("a"), case("b", workload="attention-fp8-block-contiguous-b2-L4096"))))
    for old in data["cases"]:
        for name in ("dtype", "batch", "context", "top_k", "routing", "baseline", "padded", "log"):
            del old[name]
    path.write_text(json.dumps({**data, "schema": FIRST}), encoding="utf-8")
    a, b = records.read(path).cases
    assert (a.dtype, a.batch, a.context, a.top_k, a.routing) == ("bf16", 1, None, 8, "balanced")
    assert (b.dtype, b.batch, b.context, b.top_k, b.routing) == ("fp8-block", 2, 4096, None, None)
    path.write_text(json.dumps({**data, "schema": "https://pytest-nfp/record/9", "tool": "pytest-nfp 7"}))
    with pytest.raises(FileError, match=r"record/9', written by pytest-nfp 7; this release reads .*upgrade pytest-nfp"):
        records.read(path)
    path.write_text('{"tool": "x"}', encoding="utf-8")
    with pytest.raises(FileError, match="names no schema"):
        records.read(path)
    path.write_text(records.dump(record(case("a")))[:200], encoding="utf-8")
    with pytest.raises(FileError, match=r"cut short.*journal.jsonl has what it finished"):
        records.read(path)


def test_the_published_schema_is_the_records(tmp_path: Path) -> None:
    """docs/record.schema.json is what the code checks, and a record that is written fits it."""
    import jsonschema

    published = json.loads((PROJECT / "docs" / "record.schema.json").read_text(encoding="utf-8"))
    assert published == records.json_schema(), "write it anew: nfp report --schema > docs/record.schema.json"
    written = json.loads(records.dump(record(case("a", granularity=GRANULARITY, baseline=BASELINE))))
    jsonschema.Draft202012Validator(published).validate(written)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(published).validate({**written, "gpu": 7})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"curve": [(32, float("nan"))]}, "finite number"),
        ({"predicted": {"tile_roofline": {"n_max": 3}}}, "limiting"),
        ({"granularity": {**GRANULARITY, "tiles": [(1, 2)]}}, "tiles"),
        ({"granularity": {"kernel": "triton"}}, "source"),
    ],
)
def test_a_case_that_no_report_can_show_is_refused(change: dict[str, object], message: str) -> None:
    """NaN, a prediction without its limiting module, tiles without rows, a map without its source."""
    with pytest.raises(ValueError, match=message):
        case("a", **change)


def test_a_record_has_a_case_once_and_its_machine_in_words() -> None:
    """Two cases of one id, and an identity that is a list, are refused."""
    with pytest.raises(ValueError, match="two cases have the id"):
        record(case("a"), case("a"))
    with pytest.raises(ValueError, match="identity must be an object"):
        record(case("a"), machine={"identity": []})


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
        "predicted": {"steps": {"principle": 2, "tile_roofline": 1}, "error": 0.25},
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
        "32",
        "branch",
        "2",
        "512",
        "moe",
        "1",
        "25%",
        "13.0",
        "14.0",
        "1.6x",
    ]
    assert not any(line.startswith("full model") for line in summary_lines(record(case("other"))))
    failed = case("m", composed={"reason": "its q can't be measured alone"})
    assert not any(line.startswith("full model") for line in summary_lines(record(failed)))


def test_the_headline_says_in_three_lines_what_was_found() -> None:
    """Counts of boundaries, what they agree with, what to do; a failure before what is undecided."""
    passed = case("a", tests={"boundary": TestResult(outcome="PASS", held_to=["prediction", "baseline"])})
    open_ = case("b", outcome="UNDECIDED", tests={"boundary": TestResult(outcome="UNDECIDED")})
    failed = case("c", outcome="FAIL", tests={"boundary": TestResult(outcome="FAIL")})
    found, held, to_do = headline(record(passed, open_))
    assert found.startswith("found: 2 boundaries on ")
    assert found.endswith(": 1 PASS, 1 UNDECIDED")
    assert held == "held to: prediction (1 agree), baseline (1 agree)"
    assert to_do.startswith("to do: nothing failed; --nfp-update=missing stores the 1 UNDECIDED")
    assert headline(record(passed))[2] == "to do: nothing"
    assert headline(record(open_))[1] == "held to: nothing that a boundary agrees with"
    assert (
        headline(record(passed, open_, failed))[2] == "to do: read the reasons of the 1 that FAIL or are INVALID, below"
    )
