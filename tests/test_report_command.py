"""nfp report: from records and journals of anywhere; and what a run does when its folder has no room."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from _pytest.pytester import Pytester

from pytest_nfp import records
from pytest_nfp.cli import main
from pytest_nfp.report import files

from .report.made import FINE, case, record
from .test_plugin import run, suite


def test_records_of_several_machines_become_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any number of them, an earlier one beside, and N_max over releases; the page, Markdown and JUnit in one folder."""
    old = case("a", id="h200-vllm==0.9-a", backend="vllm==0.9", n_max=256, n_max_interval=(256, 319), curve=FINE)
    new = case("a", n_max=32, n_max_interval=(32, 47), curve=FINE)
    other = record(case("b", gpu="cpu", id="cpu-b"), gpu="cpu")
    for name, one in (("old", record(old)), ("new", record(new)), ("cpu", other)):
        records.write(tmp_path / f"{name}.json", one)
    paths = [str(tmp_path / f"{name}.json") for name in ("new", "cpu", "old")]
    assert main(["report", *paths, "-o", str(tmp_path / "all"), "--history"]) == 0
    assert "3 cases of 3 records" in capsys.readouterr().out
    page = (tmp_path / "all" / "index.html").read_text(encoding="utf-8")
    assert "N_max over releases" in page
    assert {p.name for p in (tmp_path / "all").iterdir()} == {"index.html", "summary.md", "junit.xml"}
    assert main(["report", paths[0], "--against", paths[2], "-o", str(tmp_path / "upgrade")]) == 0
    assert "N\\_max 256 to 32" in (tmp_path / "upgrade" / "summary.md").read_text(encoding="utf-8")
    earlier = [f"--against={p}" for p in (paths[2], paths[1])]
    assert main(["report", paths[0], paths[1], *earlier, "-o", str(tmp_path / "both")]) == 0
    both = (tmp_path / "both" / "summary.md").read_text(encoding="utf-8")
    assert "N\\_max 256 to 32" in both
    assert "new to" not in both
    assert "h200: a machine; cpu: a machine" in (tmp_path / "both" / "index.html").read_text(encoding="utf-8")


def test_a_run_that_was_killed_is_rendered_as_partial(pytester: Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    """From its journal, whose last line was cut off."""
    suite(pytester, "prediction")
    run(pytester, "--nfp-gpu=h20", "--nfp-backend=vllm==0.9.1", "--nfp-model=llada-2.1-mini", "--nfp-report=out")
    journal = pytester.path / "out" / "journal.jsonl"
    text = journal.read_text(encoding="utf-8")
    journal.write_text(text[: text.rindex("\n", 0, -1) + 40], encoding="utf-8")
    assert main(["report", str(journal), "-o", str(pytester.path / "again")]) == 0
    page = (pytester.path / "again" / "summary.md").read_text(encoding="utf-8")
    assert "Partial, the run was interrupted" in page
    assert "pytest\\-nfp 0.1.0" in page


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.json", None, "can't be read"),
        ("cut.json", '{"schema": "https://pytest-nfp/record/2", "tool', "not JSON, or cut short"),
        (
            "other.json",
            '{"schema": "https://pytest-nfp/record/3", "tool": "pytest-nfp 9"}',
            "record/3', written by pytest-nfp 9",
        ),
        ("empty.jsonl", "", "that run ended before its first case did; run it again"),
    ],
)
def test_what_is_no_record_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, message: str
) -> None:
    """With its path and what to do; exit 2 and nothing written."""
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert main(["report", str(tmp_path / name), "-o", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """As docs/record.schema.json publishes it."""
    assert main(["report", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == records.json_schema()
    assert main(["report"]) == 2


def test_a_folder_that_can_not_be_written_ends_the_run_before_it_begins(
    pytester: Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in its place, and a place without rights: said before anything is measured."""
    suite(pytester, "prediction")
    pytester.makefile(".txt", file="x")
    result = run(pytester, "--nfp-gpu=h20", "--nfp-report=file.txt/reports")
    result.stderr.fnmatch_lines(["*--nfp-report=*file.txt/reports: *file.txt is not a folder; give another folder"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    real = os.access
    monkeypatch.setattr(os, "access", lambda p, mode, **k: False if mode == os.W_OK else real(p, mode, **k))
    result = run(pytester, "--nfp-gpu=h20", "--nfp-report=new/reports")
    result.stderr.fnmatch_lines(["*can't be written to; give another folder"])


def test_a_full_disk_loses_no_record(pytester: Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report's folder fails at the end: the run fails, and says where the record was saved instead."""
    suite(pytester, "prediction")

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device", "out")

    monkeypatch.setattr(files, "write_page", full)
    result = run(
        pytester, "--nfp-gpu=h20", "--nfp-backend=vllm==0.9.1", "--nfp-model=llada-2.1-mini", "--nfp-report=out"
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    line = next(line for line in result.outlines if line.startswith("ERROR: the report can't be written"))
    assert "No space left on device" in line
    saved = Path(line.rpartition("saved in ")[2]) / "h20" / "record.json"
    assert records.read(saved).cases


def test_an_update_shows_what_it_changes_before_it_writes(pytester: Pytester) -> None:
    """In meaning, by file; nothing where nothing changes."""
    suite(pytester, "prediction")
    pytester.mkdir("b")
    given = ("--nfp-gpu=h20", "--nfp-baselines=b", "--nfp-backend=vllm==0.9.1", "--nfp-model=llada-2.1-mini")
    result = run(pytester, *given, "--nfp-update=missing")
    result.stdout.fnmatch_lines(
        ["*= baselines =*", "*llada-2.1-mini.yaml", "  moe-bf16-b1-k8-balanced: new, principle *"]
    )
    result = run(pytester, *given, "--nfp-update=all")
    result.stdout.no_fnmatch_line("*= baselines =*")
