"""What no release would hold is refused: names that lead out or repeat, links, two formats at once, bombs."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from pytest_nfp.granularity import archive_members
from pytest_nfp.granularity.archive_members import members_of
from pytest_nfp.granularity.maps import RuleUnknown

from . import releases

WANTED = re.compile(r"\.py$")


def tar(path: Path, *members: tarfile.TarInfo, text: bytes = b"x = 1\n") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            if member.isfile():
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text))
            else:
                archive.addfile(member)
    return path


def info(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


@pytest.mark.parametrize("name", ["../evil.py", "/abs.py", "vllm/../../evil.py", "vllm\\evil.py"])
@pytest.mark.parametrize("is_wheel", [True, False])
def test_a_name_that_leads_out_refuses_the_archive(tmp_path: Path, name: str, is_wheel: bool) -> None:
    """Whatever else it holds: no release has one."""
    if is_wheel:
        path = releases.wheel(tmp_path, "vllm", "99.1", {name: "x", "vllm/a.py": "x"})
    else:
        path = tar(
            tmp_path / "vllm-99.1.tar.gz",
            info("vllm-99.1/a.py"),
            info(name if name[0] == "/" else f"vllm-99.1/../{name}"),
        )
    with pytest.raises(RuleUnknown, match="which leads out of it"):
        members_of(path, WANTED)


@pytest.mark.parametrize("is_wheel", [True, False])
def test_a_name_that_repeats_refuses_the_archive(tmp_path: Path, is_wheel: bool) -> None:
    """Two readers may see two files."""
    path = tmp_path / ("a.whl" if is_wheel else "a.tar.gz")
    if is_wheel:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("vllm/a.py", "x = 1")
            with pytest.warns(UserWarning, match="Duplicate name"):
                archive.writestr("vllm/a.py", "x = 2")
    else:
        tar(path, info("vllm-99.1/a.py"), info("vllm-99.1/a.py"))
    with pytest.raises(RuleUnknown, match=r"members (with|for) the name"):
        members_of(path, WANTED)


def test_a_member_without_a_name_is_refused(tmp_path: Path) -> None:
    """zipfile cuts a name at its first NUL: of "\\0" nothing is left."""
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "1")
        archive.writestr("vllm/a.py", "1")
    data = path.read_bytes()
    at = data.rindex(b"PK\x01\x02", 0, data.rindex(b"PK\x01\x02")) + 46
    assert data[at : at + 1] == b"x"
    path.write_bytes(data[:at] + b"\0" + data[at + 1 :])
    with pytest.raises(RuleUnknown, match="it has a member without a name"):
        members_of(path, WANTED)


@pytest.mark.parametrize("name", ["vllm//a.py", "vllm/./a.py", "./vllm/a.py"])
@pytest.mark.parametrize("is_wheel", [True, False])
def test_another_spelling_of_a_name_is_refused(tmp_path: Path, name: str, is_wheel: bool) -> None:
    """It would stand beside the name proper, and two readers may take two files."""
    if is_wheel:
        path = releases.wheel(tmp_path, "vllm", "99.1", {name: "x", "vllm/a.py": "x"})
    else:
        path = tar(tmp_path / "vllm-99.1.tar.gz", info("vllm-99.1/vllm/a.py"), info(f"vllm-99.1/{name}"))
    with pytest.raises(RuleUnknown, match="another spelling of a name"):
        members_of(path, WANTED)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_a_link_or_device_for_a_rule_is_refused(tmp_path: Path, kind: bytes) -> None:
    """Links elsewhere are passed over: source archives have them."""
    with pytest.raises(RuleUnknown, match="is a link or a device"):
        members_of(tar(tmp_path / "a.tar.gz", info("vllm-1/a.py", kind, "/etc/passwd")), WANTED)
    names, _ = members_of(tar(tmp_path / "b.tar.gz", info("vllm-1/a.txt", kind, "b"), info("vllm-1/a.py")), WANTED)
    assert names == {"a.py"}


def test_a_link_in_a_wheel_is_refused_when_it_is_read(tmp_path: Path) -> None:
    """Its mode says so."""
    entry = zipfile.ZipInfo("vllm/a.py")
    entry.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr(entry, "/etc/passwd")
    _, read = members_of(tmp_path / "a.whl", WANTED)
    with pytest.raises(RuleUnknown, match="is a link"):
        read("vllm/a.py")


def test_a_file_that_is_two_formats_at_once_is_refused(tmp_path: Path) -> None:
    """A line of Python before a wheel, bytes after one, an uncompressed tar, a zip behind a gzip, a second zip inside the first."""
    wheel = releases.wheel(tmp_path, "vllm", "99.1", {"vllm/a.py": "x"}).read_bytes()
    packed = tar(tmp_path / "a.tar.gz", info("vllm-1/a.py")).read_bytes()
    plain = gzip.decompress(packed)
    cases = {
        "line.whl": (b"import os\n" + wheel, "does not begin as a zip"),
        "after.whl": (wheel + b"import os\n", "does not end as a zip|bytes after the end"),
        "comment.whl": (wheel[:-2] + b"\x05\x00hello", None),
        "twice.whl": (wheel + wheel, "not where the zip archive says"),
        "plain.tar.gz": (plain, "does not begin as a gzip"),
        "line.tar.gz": (b"import os\n" + packed, "does not begin as a gzip"),
        "zip.tar.gz": (packed + wheel, "two formats at once"),
    }
    for name, (data, reason) in cases.items():
        (tmp_path / name).write_bytes(data)
        if reason is None:
            assert members_of(tmp_path / name, WANTED)[0] == {"vllm/a.py"}
        else:
            with pytest.raises(RuleUnknown, match=reason):
                members_of(tmp_path / name, WANTED)


@pytest.mark.parametrize("digits", [9000, 400_000])
def test_a_long_header_is_refused_before_it_is_read(tmp_path: Path, digits: int) -> None:
    """The library takes quadratic time for a pax header of digits."""
    header = info("x", tarfile.XHDTYPE)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        header.size = digits
        archive.addfile(header, io.BytesIO(b"1" * digits))
    with pytest.raises(RuleUnknown, match="a header asks for"):
        members_of(tmp_path / "a.tar.gz", WANTED)


def test_members_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty ones count: each costs its header's time."""
    monkeypatch.setattr(archive_members, "MAX_MEMBERS", 5)
    path = tar(tmp_path / "a.tar.gz", *(info(f"vllm-1/{i}", tarfile.DIRTYPE) for i in range(9)))
    with pytest.raises(RuleUnknown, match="more than 5 members"):
        members_of(path, WANTED)


def test_two_top_folders_with_one_name_are_refused(tmp_path: Path) -> None:
    """Without them both are the same file."""
    with pytest.raises(RuleUnknown, match="several members for the name"):
        members_of(tar(tmp_path / "a.tar.gz", info("a/rule.py"), info("b/rule.py")), WANTED)


def test_a_header_that_asks_for_a_gigabyte_is_refused(tmp_path: Path) -> None:
    """A pax header is read whole by the library, whatever its size: here it may have no more than a member."""
    member = info("vllm-1/a.py")
    member.pax_headers = {"comment": "x" * (archive_members.MAX_MEMBER_BYTES + 1024)}
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(member)
    with pytest.raises(RuleUnknown, match="a header asks for"):
        members_of(tmp_path / "a.tar.gz", WANTED)


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compression_whose_output_has_no_bound_is_refused(tmp_path: Path, kind: int) -> None:
    """Wheels are stored or deflated."""
    with zipfile.ZipFile(tmp_path / "a.whl", "w", kind) as archive:
        archive.writestr("vllm/a.py", "x" * 1000)
    _, read = members_of(tmp_path / "a.whl", WANTED)
    with pytest.raises(RuleUnknown, match="compressed in a way that no wheel has"):
        read("vllm/a.py")


def test_an_index_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads it whole: its size is looked at first."""
    monkeypatch.setattr(archive_members, "MAX_INDEX_BYTES", 100)
    path = releases.wheel(tmp_path, "vllm", "99.1", {f"vllm/{i}.py": "x" for i in range(9)})
    with pytest.raises(RuleUnknown, match="more than a release can have"):
        members_of(path, WANTED)
