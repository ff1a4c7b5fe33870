"""A release's files from a local archive, and what is refused."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp.granularity import archive_members, artifacts
from pytest_nfp.granularity.maps import RuleUnknown

from . import releases

WANTED = re.compile(r"\.py$")


pytestmark = pytest.mark.usefixtures("offline")


@pytest.mark.parametrize("make", [releases.sdist, releases.wheel])
def test_an_archive_is_read_by_name_and_version(tmp_path: Path, make: object) -> None:
    """Wheels and source archives hold the same names; the sha256 is the archive's."""
    make(tmp_path, "vllm", "99.1", {"vllm/a.py": "x = 1", "vllm/b.txt": "no"})  # type: ignore[operator]
    a = artifacts.open_release("vllm", "99.1", WANTED, tmp_path)
    assert a.names == {"vllm/a.py"}
    assert a.read("vllm/a.py") == "x = 1"
    assert re.fullmatch(r"[0-9a-f]{64}", a.sha256)


def test_what_is_nowhere_names_every_place(tmp_path: Path) -> None:
    """Not installed, no archive, no index: all three are said."""
    with pytest.raises(RuleUnknown, match=r"vllm is not installed; no archive of vllm 99.9 in .*; pip is configured"):
        artifacts.open_release("vllm", "99.9", WANTED, tmp_path)


def test_a_truncated_archive_is_a_reason(tmp_path: Path) -> None:
    """Half a download does not raise through."""
    path = releases.sdist(tmp_path, "vllm", "99.1", {"vllm/a.py": "x = 1" * 10000})
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(RuleUnknown, match=r"vllm-99.1.tar.gz can't be read"):
        artifacts.open_release("vllm", "99.1", WANTED, tmp_path)


@pytest.mark.parametrize("make", [releases.sdist, releases.wheel])
@given(data=st.data())
def test_a_damaged_archive_is_a_reason_or_reads_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, make: Any, data: st.DataObject
) -> None:
    """Cut short or with bytes turned anywhere: never another error than unknown."""
    folder = tmp_path_factory.mktemp("damaged")
    path = make(folder, "vllm", "99.1", {"vllm/a.py": "x = 1\n" * 200, "vllm/b.py": "y = 2\n"})
    whole = bytearray(path.read_bytes())
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=4)):
        whole[at] = value
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with contextlib.suppress(RuleUnknown):
        a = artifacts.open_release("vllm", "99.1", WANTED, folder)
        for name in a.names:
            a.read(name)


def test_a_wheel_that_declares_fewer_bytes_than_it_has_is_refused(tmp_path: Path) -> None:
    """Bytes are counted as they come: the size in the header is its maker's word."""
    path = releases.wheel(tmp_path, "vllm", "99.1", {"vllm/a.py": "x" * (archive_members.MAX_MEMBER_BYTES + 10)})
    true, declared = (n.to_bytes(4, "little") for n in (archive_members.MAX_MEMBER_BYTES + 10, 100))
    path.write_bytes(path.read_bytes().replace(true, declared))
    with pytest.raises(RuleUnknown, match=r"more bytes than it declares|can't be read"):
        artifacts.open_release("vllm", "99.1", WANTED, tmp_path).read("vllm/a.py")


@pytest.mark.parametrize(
    ("cap", "files", "reason"),
    [
        ("MAX_WANTED_BYTES", {f"vllm/{i}.py": "x" * 500 for i in range(3)}, "its rules and tuned files have more than"),
        ("MAX_ARCHIVE_BYTES", {"vllm/a.txt": "x" * 2000, "vllm/a.py": "x"}, "it unpacks to more than"),
    ],
)
def test_an_archive_bomb_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cap: str, files: dict[str, str], reason: str
) -> None:
    """All that is kept, and all that is passed over, has an end."""
    monkeypatch.setattr(archive_members, cap, 1000)
    releases.sdist(tmp_path, "vllm", "99.1", files)
    with pytest.raises(RuleUnknown, match=reason):
        artifacts.open_release("vllm", "99.1", WANTED, tmp_path)


def test_the_nearest_releases_surround_the_missing_one() -> None:
    """In version order, not by letters."""
    assert artifacts.nearest("0.9.5", ["0.9.1", "0.9.2", "0.10.0", "0.10.2", "0.33.0"]) == [
        "0.9.1",
        "0.9.2",
        "0.10.0",
        "0.10.2",
    ]
    assert artifacts.nearest("9", ["0.1", "0.2", "0.3", "0.4", "0.5"]) == ["0.2", "0.3", "0.4", "0.5"]
