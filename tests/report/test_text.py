"""Markdown, JUnit and the terminal: what they say, and that nothing in a name can steer who reads them."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp.compare.changes import view_of
from pytest_nfp.records import TestResult
from pytest_nfp.records.shown import shown
from pytest_nfp.report.junit import junit
from pytest_nfp.report.markdown import escaped, markdown
from pytest_nfp.report.terminal import summary_lines

from .made import BASELINE, GRANULARITY, case, record

ALLOWED = {
    "testsuites": set(),
    "testsuite": {"name", "tests", "failures", "errors", "skipped", "time", "timestamp"},
    "testcase": {"classname", "name", "time"},
    "failure": {"message", "type"},
    "error": {"message", "type"},
    "skipped": {"message"},
}
"""Of the schemas that JUnit's readers have in common."""
HOSTILE = "https://x.y www.x.y #12 $x$ :boom: a|b `c` <script> @all [x](y) \x1b[31m \u202eright \n# head"


def failing() -> TestResult:
    return TestResult(outcome="FAIL", reasons=["granularity changed"])


def test_markdown_says_the_verdict_the_changes_and_what_did_not_pass() -> None:
    """In that order, then a table with a row a case, cut where a pull request would drown."""
    changed = case("a", outcome="FAIL", reasons=["granularity changed"], granularity=GRANULARITY, baseline=BASELINE)
    text = markdown(view_of([record(changed, *(case(f"c{i}") for i in range(60)))]))
    lines = text.splitlines()
    assert lines[0] == "## Near\\-free parallelism: h200"
    assert lines[2].startswith("**1 of 61 cases fail; ")
    assert lines[4].startswith("- **Matters** h200: vllm==0.9 to vllm==1, a moe: 16 to 64 rows from M=33")
    assert "- FAIL h200\\-vllm==1\\-a: granularity changed" in lines
    rows = [line for line in lines if line.startswith("| h200")]
    assert len(rows) == 50
    assert rows[0].startswith("| h200\\-vllm==1\\-a | FAIL | recorded | 512 |")
    assert "11 more cases stand in the HTML report." in lines


def test_markdown_shows_hostile_names_as_text() -> None:
    """No cell ends, no markup, link, mention or heading begins, no line is broken."""
    c = case(HOSTILE, subject=HOSTILE, outcome="FAIL", reasons=[HOSTILE])
    lines = markdown(view_of([record(c, machine={"title": HOSTILE})])).splitlines()
    row = next(line for line in lines if line.startswith("| h200"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 9
    for line in lines:
        assert not line.startswith("# ")
        assert not re.search(r"<script|(?<!\\)`|@\w|(?<!\\)\[", line)
        assert not re.search("[\x00-\x1f\u202e]", line)
        assert not re.search(r"://|www\.|#\d|\$x|:boom", line)


@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cf", "Zl", "Zp"))))
def test_escaped_text_reads_as_it_was(text: str) -> None:
    """Taking the backslashes and entities away again gives the text."""
    plain = escaped(text).replace("<!-- -->", "")
    assert html.unescape(re.sub(r"\\(.)", r"\1", plain)) == text


def test_junit_has_what_every_reader_knows_and_no_more() -> None:
    """Elements and attributes of the common schema; counts that add up; a failure, an error and a skip with their reasons."""
    cases = [
        case("a", tests={"boundary": failing(), "prediction": TestResult(outcome="PASS")}, outcome="FAIL"),
        case("b", tests={"boundary": TestResult(outcome="INVALID", reasons=["drift"])}, outcome="INVALID"),
        case("c", tests={"boundary": TestResult(outcome="UNDECIDED", reasons=["noise"])}, outcome="UNDECIDED"),
        case(HOSTILE, tests={"boundary": failing()}, outcome="FAIL"),
    ]
    root = ET.fromstring(junit(view_of([record(*cases)])))
    for element in root.iter():
        assert set(element.attrib) <= ALLOWED[element.tag]
    (suite,) = root
    assert {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "5", "failures": "2", "errors": "1", "skipped": "1",
    }  # fmt: skip
    assert suite.get("timestamp") == "2026-01-01T00:00:00"
    named = {t.get("name"): t for t in suite}
    failed = named["a-moe-bf16-b1-k8-balanced boundary"]
    assert (failed.get("classname"), failed[0].tag, failed[0].get("message")) == (
        "h200.vllm==1", "failure", "granularity changed",
    )  # fmt: skip
    assert len(named["a-moe-bf16-b1-k8-balanced prediction"]) == 0


def test_the_terminal_is_not_steered() -> None:
    """An escape sequence or a line end of a name stands there as text."""
    lines = summary_lines(record(case(HOSTILE, outcome="FAIL", reasons=[HOSTILE])))
    assert not any(re.search("[\x00-\x1f\u202e]", line) for line in lines)
    assert any("\\u001b[31m \\u202eright \\n# head" in line for line in lines)


@given(st.text(max_size=30))
def test_a_record_as_it_is_shown_has_nothing_that_steers(text: str) -> None:
    """Whatever text: no control, separator or direction mark is left, and the rest is unchanged."""
    text = text.encode("utf-8", "ignore").decode("utf-8")
    found = shown(record(case("a", reasons=[text]))).cases[0].reasons[0]
    assert not re.search("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufffe\uffff]", found)
    if not re.search("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufffe\uffff]", text):
        assert found == text
