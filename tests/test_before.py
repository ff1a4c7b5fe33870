"""Files that were written before the packages of this project moved are read as before.

tests/before/ has a record, a journal, a certificate, a baseline and a calibration of pytest-nfp at commit 922eb7a: one simulated case,
and a calibration of recorded L40S curves.
"""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pytest_nfp import certificate, records
from pytest_nfp.baselines import files as baseline_files
from pytest_nfp.cases import Backend
from pytest_nfp.cli import main
from pytest_nfp.files import read_yaml
from pytest_nfp.predict import calibration_files, residuals
from pytest_nfp.records import journal

from .conftest import PROJECT

BEFORE = PROJECT / "tests" / "before"
CASE = "h20-torch==2.13.0-dense-ffn-2048x6144-dense-bf16-b1"
NOW = datetime(2026, 12, 4, tzinfo=UTC)
"""A day on which the certificate holds."""


def test_a_record_of_before_is_read_and_rendered(tmp_path: Path) -> None:
    """Its one case with outcome and boundary; its report is written anew from it."""
    record = records.read(BEFORE / "record.json")
    (case,) = record.cases
    assert (case.id, case.outcome, case.n_max, case.kind) == (CASE, "PASS", 16, "measured")
    assert main(["report", str(BEFORE / "record.json"), "--output", str(tmp_path)]) == 0
    assert "dense-ffn-2048x6144" in (tmp_path / "index.html").read_text(encoding="utf-8")


def test_a_record_of_before_is_compared_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing has changed."""
    path = str(BEFORE / "record.json")
    assert main(["compare", path, path]) == 0
    assert "PASS" in capsys.readouterr().out


def test_a_journal_of_before_can_be_gone_on_with(tmp_path: Path) -> None:
    """It has the machine and the case that were finished."""
    past = journal.read(BEFORE / "journal.jsonl")
    assert set(past.cases) == {CASE}
    assert past.machines["h20"]["title"] == "simulated"


def test_a_certificate_of_before_still_verifies() -> None:
    """Its signature, and the record's digest in it."""
    statement, is_signed = certificate.verify(
        BEFORE / "certificate.json", BEFORE / "record.json", BEFORE / "pub.pem", NOW
    )
    assert is_signed
    assert json.dumps(statement).count("dense-ffn-2048x6144")


def test_a_baseline_of_before_is_read(tmp_path: Path) -> None:
    """From the folder that it was written to, with its boundary."""
    folder = tmp_path / "h20" / "torch-2.13.0"
    folder.mkdir(parents=True)
    shutil.copy(BEFORE / "baseline.yaml", folder / "dense-ffn-2048x6144.yaml")
    baseline = baseline_files.load(tmp_path, "h20", Backend("torch", "2.13.0"), "dense-ffn-2048x6144")
    assert baseline is not None
    (case,) = baseline.cases.values()
    assert case.measured is not None
    assert case.measured.n_max == 16
    assert baseline_files.dump(baseline) == (BEFORE / "baseline.yaml").read_text(encoding="utf-8")


def test_a_calibration_of_before_is_read() -> None:
    """With its residuals, and it would be written in the same bytes."""
    path = BEFORE / "calibrations.yaml"
    (fitted,) = read_yaml(path, calibration_files.CalibrationsFile).calibrations
    assert fitted.key == ("l40s", "sglang", "triton", "bf16")
    assert calibration_files.text_of([fitted]) == path.read_text(encoding="utf-8")
    assert residuals.read(fitted.residuals_path(path)) is not None
