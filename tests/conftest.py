"""Shared by the project's own tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

# pytester restores sys.modules after each run inside the run: what one of them would load first must be here before,
# or a second copy of it meets objects of the first.
import pyarrow.parquet
import pypi_simple
import pytest
import remotezip
import requests
import torch
import tree_sitter_cpp
import vl_convert
from hypothesis import settings

import pytest_nfp.calibration.own_cpu
import pytest_nfp.report.files
import pytest_nfp.report.terminal
import pytest_nfp.run.session
from pytest_nfp.granularity import release
from pytest_nfp.predict import calibrations

__all__ = ["pyarrow", "pypi_simple", "remotezip", "requests", "torch", "tree_sitter_cpp", "vl_convert", "pytest_nfp"]

# Timing never decides a test: a slow machine is no failure.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
"""A quiet run in a process of its own, which leaves no cache behind."""
PROJECT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def no_own_calibrations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a developer measured on a GPU of his own decides no test."""
    monkeypatch.setattr(calibrations, "own_calibrations", lambda: tmp_path / "none.yaml")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As without a network: pip is told to use no index, and what was read from it before is forgotten."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    release.forget()
    yield
    release.forget()
