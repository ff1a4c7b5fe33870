"""The pictures of the gallery can be made again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import PROJECT
from .report.browser import chromium


@pytest.mark.network
def test_the_gallerys_pictures_are_made_by_its_command(tmp_path: Path) -> None:
    """Three pictures, those that the page shows."""
    chromium()
    command = [sys.executable, str(PROJECT / "docs" / "make_gallery.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (PROJECT / "docs" / "gallery.md").read_text(encoding="utf-8")
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert f"(gallery/{path.name})" in page
    assert len(list(tmp_path.iterdir())) == 3
