"""Members of a wheel or source archive, read one by one and never extracted.

An archive that differs from what a release has is refused. The sizes that an archive declares are not trusted: bytes
are counted as they are read.
"""

from __future__ import annotations

import gzip
import re
import stat
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from pytest_nfp.granularity.maps import RuleUnknown

MAX_MEMBER_BYTES = 8 * 2**20
"""Largest size of one member: rules and tuned files are small."""
MAX_WANTED_BYTES = 64 * 2**20
"""Largest size of all wanted members of an archive together."""
MAX_ARCHIVE_BYTES = 1 << 30
"""Largest unpacked size of an archive without an index, which is read from end to end."""
MAX_MEMBERS = 100_000
"""Most members of an archive without an index, empty ones included. A release has some ten thousand files."""
MAX_INDEX_BYTES = 8 * 2**20
"""Largest index of a wheel, for the same number of files."""
MAX_HEADER_BYTES = 8 * 2**10
"""Largest header that carries a long name or further fields."""
DAMAGED = (
    *(OSError, EOFError, ValueError, NotImplementedError, RecursionError),
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error),
)
"""What reading a damaged archive raises: broken headers, lengths, checksums or texts, unknown compressions."""

_ZIP_START, _ZIP_END, _ZIP_END_BYTES, _MAX_COMMENT = b"PK\x03\x04", b"PK\x05\x06", 22, 1 << 16
_ZIP64, _ZIP64_BYTES = b"PK\x06\x07", 20
_GZIP_START = b"\x1f\x8b"
Members = tuple[frozenset[str], Callable[[str], str]]
"""(names of the wanted members, function that reads a member by its name)."""


def members_of(path: Path, wanted: re.Pattern[str]) -> Members:
    """The wanted members of a wheel (.whl) or source archive (.tar.gz). Raises RuleUnknown."""
    try:
        if path.suffix == ".whl":
            with path.open("rb") as file:
                check_zip(file)
            return zip_members(zipfile.ZipFile(path), wanted)
        with path.open("rb") as file:
            return tar_members(file, wanted)
    except DAMAGED as error:
        raise RuleUnknown(f"{path.name} can't be read: {error}") from error


def check_zip(file: IO[bytes]) -> None:
    """Refuse a file that is anything but one zip archive from its first byte to its last. Raises RuleUnknown.

    A zip archive with too large an index is refused too.
    """
    if file.read(len(_ZIP_START)) != _ZIP_START:
        raise RuleUnknown("it does not begin as a zip archive: it is none, or another format too")
    size = file.seek(0, 2)
    file.seek(max(0, size - _ZIP_END_BYTES - _MAX_COMMENT))
    tail = file.read()
    at = tail.rfind(_ZIP_END)
    if at < 0 or len(tail) - at < _ZIP_END_BYTES:
        raise RuleUnknown("it does not end as a zip archive: it was cut short")
    if tail[max(0, at - _ZIP64_BYTES) : at].startswith(_ZIP64):
        raise RuleUnknown("it has a second index for large archives, which no release of ours needs")
    end = tail[at : at + _ZIP_END_BYTES]
    index_bytes, index_at, comment = (int.from_bytes(end[a:b], "little") for a, b in ((12, 16), (16, 20), (20, 22)))
    if at + _ZIP_END_BYTES + comment != len(tail):
        raise RuleUnknown("it has bytes after the end of the zip archive: it is another format too")
    if index_at + index_bytes != size - len(tail) + at:
        raise RuleUnknown("its index is not where the zip archive says: it is another format too")
    if index_bytes > MAX_INDEX_BYTES:
        raise RuleUnknown(f"its index has {index_bytes} bytes, more than a release can have")


def zip_members(archive: zipfile.ZipFile, wanted: re.Pattern[str]) -> Members:
    """The wanted members of an opened zip archive. Raises RuleUnknown."""
    entries = archive.infolist()
    # ZipInfo.is_dir fails on an empty name, which an index may hold.
    _refuse_names(i.filename for i in entries if not i.filename.endswith("/"))
    wanted_bytes = 0
    wanted_entries = {i.filename: i for i in entries if wanted.search(i.filename) and not i.is_dir()}
    for name in wanted_entries:
        _refuse_spelling(name)

    def read(name: str) -> str:
        nonlocal wanted_bytes
        entry = wanted_entries[name]
        if stat.S_ISLNK(entry.external_attr >> 16):
            raise RuleUnknown(f"{name} is a link, which no release has for a rule")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise RuleUnknown(f"{name} is compressed in a way that no wheel has")
        if entry.flag_bits & 1:
            raise RuleUnknown(f"{name} is encrypted, which no release has")
        if entry.file_size > MAX_MEMBER_BYTES:
            raise RuleUnknown(f"{name} has {entry.file_size} bytes, more than a rule or a tuned file can have")
        try:
            with archive.open(entry) as member:
                data = member.read(MAX_MEMBER_BYTES + 1)
            if len(data) > MAX_MEMBER_BYTES:
                raise RuleUnknown(f"{name} has more bytes than it declares, and than a rule or a tuned file can have")
            wanted_bytes += len(data)
            if wanted_bytes > MAX_WANTED_BYTES:
                raise RuleUnknown(f"its rules and tuned files have more than {MAX_WANTED_BYTES >> 20} MiB")
            return data.decode()
        except (*DAMAGED, RuntimeError) as error:  # RuntimeError: the member's own header says encrypted
            raise RuleUnknown(f"{name} can't be read: {error}") from error

    return frozenset(wanted_entries), read


class _Entry(tarfile.TarInfo):
    """A tar member with small extra headers: tarfile reads these headers whole, and some in quadratic time."""

    def _checked(self) -> None:
        if not 0 <= self.size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header asks for {self.size} bytes")

    def _proc_gnulong(self, tar: tarfile.TarFile) -> Any:
        self._checked()
        return super()._proc_gnulong(tar)  # type: ignore[misc]  # the library's own hook

    def _proc_pax(self, tar: tarfile.TarFile) -> Any:
        self._checked()
        return super()._proc_pax(tar)  # type: ignore[misc]

    def _proc_sparse(self, tar: tarfile.TarFile) -> Any:
        raise tarfile.ReadError("a sparse file, which no release has")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = lambda self, *arguments: self._proc_sparse(
        arguments[0]
    )


def tar_members(file: IO[bytes], wanted: re.Pattern[str]) -> Members:
    """The wanted members of a source archive, named without its top folder.

    A compressed tar has no index: the wanted members are read in one pass. Raises RuleUnknown, or an error of DAMAGED.
    """
    if file.read(len(_GZIP_START)) != _GZIP_START:
        raise RuleUnknown("it does not begin as a gzip file: it is none, or another format too")
    if zipfile.is_zipfile(file):
        raise RuleUnknown("it ends as a zip archive: it is two formats at once")
    file.seek(0)
    texts: dict[str, str] = {}
    names: list[str] = []
    wanted_bytes = unpacked_bytes = 0
    with (
        gzip.GzipFile(fileobj=file) as unpacked,
        tarfile.open(fileobj=cast(IO[bytes], unpacked), mode="r:", tarinfo=_Entry) as tar,
    ):
        for number, member in enumerate(tar):
            if number >= MAX_MEMBERS:
                raise RuleUnknown(f"it has more than {MAX_MEMBERS} members, more than a release of sources can have")
            if member.size < 0:
                raise RuleUnknown("it has a member of less than no bytes")
            unpacked_bytes += member.size
            if unpacked_bytes > MAX_ARCHIVE_BYTES:
                raise RuleUnknown(
                    f"it unpacks to more than {MAX_ARCHIVE_BYTES >> 20} MiB, more than a release of sources can have"
                )
            if member.isdir():
                continue
            names.append(member.name)
            name = member.name.partition("/")[2]
            if not wanted.search(name):
                continue
            if not member.isfile():
                raise RuleUnknown(f"{name} is a link or a device, which no release has for a rule")
            if member.size > MAX_MEMBER_BYTES:
                continue
            wanted_bytes += member.size
            if wanted_bytes > MAX_WANTED_BYTES:
                raise RuleUnknown(f"its rules and tuned files have more than {MAX_WANTED_BYTES >> 20} MiB")
            _refuse_spelling(member.name)
            if name in texts:
                raise RuleUnknown(f"it has several members for the name {name!r}")
            handle = tar.extractfile(member)
            assert handle is not None
            texts[name] = handle.read(MAX_MEMBER_BYTES).decode(errors="replace")
    _refuse_names(names)
    return frozenset(texts), texts.__getitem__


def _refuse_spelling(name: str) -> None:
    """Refuse a wanted name that is not in its shortest form: a//b and a/./b also name a/b. Raises RuleUnknown."""
    if str(PurePosixPath(name)) != name:
        raise RuleUnknown(f"it has a member with the name {name!r}, which is another spelling of a name")


def _refuse_names(names: Iterable[str]) -> None:
    """Refuse an archive with a name that leads out of it or occurs twice. Raises RuleUnknown."""
    for name, count in Counter(names).items():
        if not name:
            raise RuleUnknown("it has a member without a name")
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
            raise RuleUnknown(f"it has a member with the name {name!r}, which leads out of it")
        if count > 1:
            raise RuleUnknown(f"it has {count} members with the name {name!r}")
