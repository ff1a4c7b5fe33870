"""Atomic writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nfp.files import write_atomically


def test_a_write_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """One file, the new text, readable by others."""
    path = tmp_path / "new" / "a.yaml"
    write_atomically(path, "one\n")
    write_atomically(path, "two\n")
    assert path.read_text(encoding="utf-8") == "two\n"
    assert [p.name for p in path.parent.iterdir()] == ["a.yaml"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_write_that_fails_keeps_the_old_text(tmp_path: Path) -> None:
    """A reader never sees half a file."""
    path = tmp_path / "a.yaml"
    write_atomically(path, "old\n")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text(encoding="utf-8") == "old\n"
    assert [p.name for p in tmp_path.iterdir()] == ["a.yaml"]
