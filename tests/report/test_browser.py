"""The report in a real browser: it opens, filters, sorts, expands, prints, and asks for nothing but itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Literal

import pytest

from pytest_nfp.compare.changes import view_of
from pytest_nfp.records import TestResult
from pytest_nfp.report.html import render

from .browser import Opened, opened
from .made import BASELINE, FINE, GRANULARITY, case, record

HOSTILE = "<img src=x onerror=alert(1)>\"'&\n\u202eabc\u2028</script><!--"


def many() -> str:
    """A page of 240 cases: two models, N_max from 1 to 240, every third failed, every fifth changed."""
    cases = []
    for i in range(240):
        outcome = "FAIL" if i % 3 == 0 else "PASS"
        cases.append(
            case(
                f"{'qwen' if i % 2 else 'llada'}-{i}",
                subject="qwen" if i % 2 else "llada",
                outcome=outcome,
                n_max=i + 1,
                n_max_interval=(i + 1, i + 2),
                tests={"boundary": TestResult(outcome=outcome, reasons=["it moved"] if i % 3 == 0 else [])},
                reasons=["it moved"] if i % 3 == 0 else [],
                granularity=GRANULARITY,
                baseline=BASELINE if i % 5 == 0 else None,
            )
        )
    return render(view_of([record(*cases)]))


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "index.html"
    path.write_text(many(), encoding="utf-8")
    return path


@pytest.fixture
def report(page_file: Path) -> Iterator[Opened]:
    with opened(page_file) as found:
        yield found
        assert found.complaints == []
        assert [r for r in found.requests if not r.startswith(("file:", "data:", "blob:"))] == []


def test_it_opens_filters_and_sorts(report: Opened) -> None:
    """A page of the table, a choice, words that must all occur, a column up and down, and all of it again; said to a screen reader."""
    page = report.page
    assert page.inner_text("#count") == "240 of 240 cases"
    assert len(report.row_names()) == 50
    page.click("#more")
    assert len(report.row_names()) == 240
    page.select_option("[data-facet=subject]", label="qwen (120)")
    assert page.inner_text("#count") == "120 of 240 cases"
    assert all("qwen" in name for name in report.row_names())
    page.select_option("[data-facet=outcome]", label="FAIL (80)")
    page.fill("#query", "QWEN-9 fail")
    assert report.row_names() == ["h200-vllm==1-qwen-9", "h200-vllm==1-qwen-93", "h200-vllm==1-qwen-99"]
    page.click("text=Show all")
    page.locator("#count", has_text="240 of 240 cases").wait_for()
    heading = page.locator("th[data-column=n_max]")
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert report.row_names()[0] == "h200-vllm==1-llada-0"
    heading.locator("button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    assert report.row_names()[0] == "h200-vllm==1-qwen-239"
    page.select_option("[data-facet=changed]", label="changed (48)")
    assert page.inner_text("#count") == "48 of 240 cases"
    report.shot("table")


def test_a_case_opens_by_keyboard_with_its_charts(report: Opened) -> None:
    """Tab reaches it, Enter opens and closes it: reasons, what changed, T(N), the map before and now, provenance."""
    page = report.page
    page.focus("#table tbody button >> nth=0")
    page.keyboard.press("Enter")
    page.wait_for_selector(".detail [data-chart=strip] svg")
    detail = page.inner_text(".detail")
    assert page.locator("#table tbody button >> nth=0").get_attribute("aria-expanded") == "true"
    for said in (
        "it moved",
        "tiles: 16 to 64 rows from M=33",
        "default rule",
        "N_max 32, limited by branch",
        "sha256 abab",
    ):
        assert said in detail
    charts = [page.text_content(f"[data-chart={kind}] svg") for kind in ("curve", "strip")]
    assert "tile roofline 512" in charts[0]
    assert "before" in charts[1] and "64" in charts[1]
    assert page.get_attribute("[data-chart=curve]", "role") == "img"
    assert "T(N) over N, recorded: n_max 1" in page.get_attribute("[data-chart=curve]", "aria-label")
    report.shot("case")
    page.keyboard.press("Enter")
    assert page.locator(".detail").count() == 0


def test_the_drawn_chart_is_the_static_one(tmp_path: Path) -> None:
    """The script's data are those that Python makes for the page without it: both drawings have the same shapes, place by place."""
    c = case(
        "a", granularity=GRANULARITY, ratios=[(64, 1.0, 1.05), (512, 1.08, 1.25)],
        baseline={**BASELINE, "curve": [(32, 380.0), (64, 400.0), (512, 800.0), (768, 1500.0)]},
        composed={"n_max": 64, "n_max_interval": [64, 95], "steps": 1, "limiting": "x", "error": 0.1, "curve": [[32, 410.0], [512, 470.0]]},
        curve=[(16, 380.0), (32, 400.0), (64, 410.5), (512, 440.25), (768, 1300.0), (1024, 1900.0)],
    )  # fmt: skip
    path = tmp_path / "index.html"
    path.write_text(render(view_of([record(c)])), encoding="utf-8")
    # Where a text stands depends on how its drawer measures fonts; where a shape stands does not.
    shapes = (
        "svg => [...svg.querySelectorAll('path[d], line, text')].map(e => e.tagName === 'text' ? e.textContent"
        " : ['d', 'transform', 'x2', 'y2', 'stroke'].map(a => e.getAttribute(a)).join())"
    )
    with opened(path) as found:
        found.page.click("#table tbody button")
        found.page.wait_for_selector(".detail [data-chart=strip] svg")
        for at, kind in enumerate(("curve", "strip")):
            drawn = found.page.eval_on_selector(f"[data-chart={kind}] svg", shapes)
            static = found.page.eval_on_selector(f".static figure svg >> nth={at}", shapes)
            assert len(drawn) > 20
            assert drawn == static


def test_a_long_curve_scrolls_inside_its_case(tmp_path: Path) -> None:
    """Forty points and a long name: the table's own width does not grow, so that nothing of a case lies outside the window."""
    c = case("a", curve=[(32 + n, 400.0 + n) for n in range(40)], kernel="k" * 300)
    path = tmp_path / "index.html"
    path.write_text(render(view_of([record(c)])), encoding="utf-8")
    with opened(path) as found:
        wide = "document.querySelector('#table').scrollWidth"
        before = found.page.evaluate(wide)
        found.page.click("#table tbody button")
        found.page.wait_for_selector(".detail [data-chart=curve] svg")
        assert found.page.evaluate(wide) == before
        assert found.page.evaluate("(e => e.scrollWidth > e.clientWidth)(document.querySelector('.detail .scroll'))")


def test_executed_work_stands_beside_what_the_map_predicts(tmp_path: Path) -> None:
    """FLOPs of every N, executed and predicted; it is a kind of its own, and no latency."""
    c = case("a", kind="executed", curve=[], n_max=None, n_max_interval=None, n_first_exit=None, executed={1: (2048, 2048), 17: (4096, 2048)})  # fmt: skip
    path = tmp_path / "index.html"
    path.write_text(render(view_of([record(c)])), encoding="utf-8")
    with opened(path) as found:
        assert found.page.inner_text("#table td[data-field=kind]") == "executed"
        assert found.page.inner_text("#table td[data-field=n_max]") == ""
        found.page.click("#table tbody button")
        rows = found.page.locator(".detail table tr")
        rows.first.wait_for()
        assert [r.split("\t") for r in rows.all_inner_texts()] == [
            ["N", "1", "17"], ["executed FLOPs", "2048", "4096"], ["predicted by the map", "2048", "2048"],
        ]  # fmt: skip


def test_without_script_and_on_paper_what_matters_stands_there(page_file: Path, tmp_path: Path) -> None:
    """Verdict, changes, failed cases first, their charts as they are; a PDF of it."""
    with opened(page_file, script=False) as plain:
        page = plain.page
        assert page.is_visible(".static")
        assert not page.is_visible("#live")
        assert page.inner_text("#verdict").startswith("80 of 240 cases fail; ")
        assert page.inner_text(".static tbody tr >> nth=0 >> td >> nth=0") == "FAIL"
        assert page.locator(".static figure svg").count() == 12
    with opened(page_file) as script:
        assert not script.page.is_visible(".static")
        script.page.emulate_media(media="print")
        assert script.page.is_visible(".static")
        assert not script.page.is_visible("#live")
        pdf = script.page.pdf(path=str(tmp_path / "report.pdf"))
        assert pdf.startswith(b"%PDF") and len(pdf) > 20_000


def test_what_is_found_stands_in_sight_and_a_case_is_as_wide_as_the_window(page_file: Path) -> None:
    """n_max before the columns that say what a case is; an opened case fits the window, wherever the table is scrolled to."""
    with opened(page_file) as found:
        page = found.page
        page.set_viewport_size({"width": 500, "height": 900})
        heads = page.eval_on_selector_all("#table thead th", "all => all.map((th) => th.dataset.column)")
        assert heads.index("n_max") < heads.index("subject")
        page.click("#table tbody button")
        page.wait_for_selector(".detail [data-chart=curve] svg")
        box = "() => { const b = document.querySelector('.panel').getBoundingClientRect(); return [b.left, b.right]; }"
        for left in (0, 400):
            page.evaluate(f"document.querySelector('#live .scroll').scrollLeft = {left}")
            low, high = page.evaluate(box)
            assert 0 <= low < high <= 500


def test_a_page_whose_data_are_broken_shows_what_it_can(tmp_path: Path) -> None:
    """Without its table the page is as it would be without script, and the browser's console says why."""
    path = tmp_path / "index.html"
    path.write_text(
        render(view_of([record(case("a"))])).replace('id="data-table">', 'id="data-table">AAAA'), encoding="utf-8"
    )
    with opened(path, ready=False) as found:
        found.page.wait_for_selector(".static table")
        assert found.page.inner_text(".static tbody th") == "h200-vllm==1-a"
        assert found.complaints


def test_an_upgrade_stands_before_and_after(tmp_path: Path) -> None:
    """Two records of two releases: the change of granularity on top, with what it does to N_max; both sides in the case."""
    old = case("a", id="h200-vllm==0.9-a", backend="vllm==0.9", n_max=256, n_max_interval=(256, 319), curve=FINE,
               granularity={**GRANULARITY, "tiles": [(1, 512, 16)], "edges": []})  # fmt: skip
    new = case("a", n_max=32, n_max_interval=(32, 47), n_first_exit=32, curve=FINE, granularity=GRANULARITY)
    path = tmp_path / "index.html"
    path.write_text(render(view_of([record(new)], record(old))), encoding="utf-8")
    with opened(path, scheme="dark") as found:
        top = found.page.inner_text(".changes li >> nth=0")
        assert top.startswith(
            "Matters h200: vllm==0.9 to vllm==1, a moe: 16 to 64 rows from M=33; N_max 256 to 32 (recorded"
        )
        found.page.click("#table tbody button")
        found.page.wait_for_selector(".detail [data-chart=strip] svg")
        assert "n_max before 256" in found.page.text_content("[data-chart=curve] svg")
        found.shot("upgrade")
        assert found.complaints == []


def test_hostile_names_are_text(tmp_path: Path) -> None:
    """Markup, quotes, line ends and marks of direction in every field that holds text: shown, never run, and turned nowhere."""
    granularity = {**GRANULARITY, "kernel": HOSTILE, "source": HOSTILE, "origin": HOSTILE, "warnings": [HOSTILE]}
    c = case(
        HOSTILE, subject=HOSTILE, workload=HOSTILE, routing=HOSTILE, backend=f"x=={HOSTILE}", reasons=[HOSTILE], outcome="FAIL",
        source=HOSTILE, kernel=HOSTILE, timer=HOSTILE, basis=HOSTILE, log=[HOSTILE], granularity=granularity,
        baseline={**BASELINE, "name": HOSTILE}, settings={32: HOSTILE}, modes={32: HOSTILE},
        counts={HOSTILE: HOSTILE}, trust={HOSTILE: HOSTILE}, tests={"boundary": TestResult(outcome="FAIL", reasons=[HOSTILE])},
        predicted={"principle": {"n_max": 32, "limiting": HOSTILE}},
    )  # fmt: skip
    one = record(c, gpu=HOSTILE, tool=HOSTILE, machine={"title": HOSTILE, "identity": {HOSTILE: HOSTILE}})
    path = tmp_path / "index.html"
    path.write_text(render(view_of([one, one]), with_history=True), encoding="utf-8")
    with opened(path) as found:
        page = found.page
        page.click("#table tbody button >> nth=0")
        page.wait_for_selector(".detail [data-chart=strip] svg")
        text = page.inner_text("body")
        assert found.complaints == []
        assert page.locator("img").count() == 0
        assert "<img src=x onerror=alert(1)>" in text
        assert "\\n\\u202eabc\\u2028</script>" in text
        assert not re.search("[\u202a-\u202e\u2028\u2066-\u2069]", text)


def test_every_text_has_its_contrast(page_file: Path) -> None:
    """WCAG AA, 4.5 to 1, for every colour of text on every ground that it stands on, light and dark."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        with opened(page_file, scheme=scheme) as found:
            colours = found.page.evaluate(
                "() => Object.fromEntries(['fg','bg','soft','card','pass','fail','open','curve','strip','changed','pred','before']"
                ".map(n => [n, getComputedStyle(document.documentElement).getPropertyValue('--' + n).trim()]))"
            )
        pairs = [
            *product(("fg", "soft", "pass", "fail", "open", "curve"), ("bg", "card")),
            ("fg", "strip"),
            ("fg", "changed"),
        ]
        for text, ground in pairs:
            high, low = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (scheme, text, ground)
