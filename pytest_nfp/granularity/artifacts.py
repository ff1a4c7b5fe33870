"""The files of a framework release: installed, in a local archive, or on the package index.

A wheel on the index is read by byte ranges, a source archive is fetched once. What was read is kept in the platform's
cache folder, under the archive's sha256. Each file is written atomically, so that several processes can share the
cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import IO

from packaging.requirements import Requirement
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from pytest_nfp.files import write_atomically
from pytest_nfp.granularity.archive_members import DAMAGED, members_of, tar_members, zip_members
from pytest_nfp.granularity.maps import RuleUnknown
from pytest_nfp.granularity.remote_zip import open_zip

MAX_DOWNLOAD_BYTES = 256 * 2**20
"""Largest source archive that is fetched: it has no index, so it is fetched whole."""
TIMEOUT_S = 60


@dataclass(frozen=True)
class Artifact:
    """The files of one release, and a reader."""

    file: str
    """The source as reports cite it: name of an archive or file, or name and version of an installed framework."""
    sha256: str
    """Hex digest of the archive or file. Of an installed framework: of its file names and its sources."""
    origin: str
    """installed, archive, index, source tree or recorded rule."""
    names: frozenset[str]
    """Names of the files, as posix paths without the source archive's top folder."""
    read: Callable[[str], str]
    """Returns the text of a file by its name."""


def open_release(framework: str, release: str, wanted: re.Pattern[str], archives: Path | None = None) -> Artifact:
    """The files of a release from the first source that has them.

    The sources are the installed distribution, the folder `archives` and the package index, in this order. wanted:
    matches the names of the members that the caller may read. Raises RuleUnknown with the reason of every source.
    """
    reasons = []
    for source in (_installed, lambda f, r, w: _local(f, r, w, archives), _index):
        try:
            return source(framework, release, wanted)
        except RuleUnknown as reason:
            reasons.append(str(reason))
    raise RuleUnknown("; ".join(r for r in reasons if r))


def installed_release(framework: str) -> str | None:
    """The version of an installed framework, or None."""
    distribution = _distribution(framework)
    return distribution.version if distribution is not None else None


def _distribution(framework: str) -> metadata.Distribution | None:
    """The installed framework, by its own name or that of its CPU build, which has the same Python sources."""
    for name in (framework, f"{framework}-cpu"):
        try:
            return metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
    return None


_until: datetime | None = None
"""The package index is read as of this moment. None: as it is now."""


def read_index_until(moment: datetime | None) -> None:
    """Read the package index as it stood at a moment, without later uploads. None: as it is now.

    This is a setting of the process, for commands whose answer must not change when a release is published.
    """
    global _until  # noqa: PLW0603  # one command, one index
    _until = moment
    pinned_requirement.cache_clear()


def forget_index() -> None:
    """Forget what this process has read of the package index and of pip's configuration."""
    for cached in (_index_urls, _index_files, pinned_requirement):
        cached.cache_clear()


def known_releases(framework: str) -> list[str]:
    """Every release on the package index, oldest first. Raises RuleUnknown when the index can't be read."""
    return [str(v) for v in sorted({v for v, _ in _files_until(framework)})]


def _files_until(framework: str) -> list[tuple[Version, IndexFile]]:
    """The files of a project that were on the index at the chosen moment. Raises RuleUnknown."""
    files = list(_index_files(framework))
    if _until is None:
        return files
    if any(f.uploaded is None for _, f in files):
        raise RuleUnknown(
            f"the package index does not tell when the files of {framework} were uploaded: leave out --until"
        )
    earlier = [(v, f) for v, f in files if f.uploaded is not None and datetime.fromisoformat(f.uploaded) < _until]
    if not earlier:
        raise RuleUnknown(f"the package index had no {framework} before {_until:%Y-%m-%d}")
    return earlier


@lru_cache(maxsize=64)
def pinned_requirement(framework: str, release: str, requirement: str) -> str:
    """The version of a required distribution that a release's metadata on the index asks for.

    Raises RuleUnknown.
    """
    as_of = f"-{_until:%Y-%m-%d}" if _until is not None else ""
    cached = cache_folder("metadata") / f"{framework}-{release}-{requirement}{as_of}"
    if cached.exists():
        return cached.read_text(encoding="utf-8")
    wheels = [f for v, f in _files_until(framework) if v == Version(release) and f.filename.endswith(".whl")]
    for package in sorted(wheels, key=lambda f: ("linux" not in f.filename, "x86_64" not in f.filename, f.filename))[
        :1
    ]:
        artifact = _remote(package, re.compile(r"\.dist-info/METADATA$"))
        text = artifact.read(min(artifact.names))
        # A requirement may be written with other separators: flashinfer_python.
        written = re.sub(r"[-_.]+", "[-_.]+", requirement)
        for line in re.findall(rf"^Requires-Dist: ({written}\b[^;\n]*)", text, re.MULTILINE):
            wanted = Requirement(line).specifier
            exact = [s.version for s in wanted if s.operator == "=="]
            # A range takes the newest release that it admits, as an installer would.
            fitting = exact or [r for r in known_releases(requirement) if wanted.contains(r)]
            if fitting:
                _keep(cached, fitting[-1])
                return fitting[-1]
    raise RuleUnknown(f"{framework} {release} pins no {requirement}, by what the package index holds")


def _installed(framework: str, release: str, wanted: re.Pattern[str]) -> Artifact:
    distribution = _distribution(framework)
    if distribution is None:
        raise RuleUnknown(f"{framework} is not installed")
    version = distribution.version
    if version.split("+")[0] != release:
        raise RuleUnknown(f"installed is {framework} {version}")
    files = {str(f): f for f in distribution.files or () if wanted.search(str(f))}
    if not files:
        raise RuleUnknown(f"the installed {framework} {version} lists no file with the rule")

    def read(name: str) -> str:
        return Path(str(files[name].locate())).read_text(encoding="utf-8")

    digest = hashlib.sha256("".join(sorted(files)).encode())
    for name in sorted(files):
        if name.endswith((".py", ".h", ".cuh")):
            digest.update(read(name).encode())
    return Artifact(f"{framework} {version} (installed)", digest.hexdigest(), "installed", frozenset(files), read)


def _local(framework: str, release: str, wanted: re.Pattern[str], archives: Path | None) -> Artifact:
    if archives is None:
        raise RuleUnknown("")
    if archive := _archive_of(framework, release, archives):
        path, _ = archive
        names, read = members_of(path, wanted)
        with path.open("rb") as f:
            digest = hashlib.file_digest(f, "sha256").hexdigest()
        return Artifact(path.name, digest, "archive", names, read)
    raise RuleUnknown(f"no archive of {framework} {release} in {archives}")


def archived_release(framework: str, release: str, archives: Path) -> str | None:
    """The release as an archive in the folder writes it, such as 0.24.0 for 0.24. None if there is no such archive."""
    archive = _archive_of(framework, release, archives) if archives.is_dir() else None
    return str(archive[1]) if archive else None


def _archive_of(framework: str, release: str, archives: Path) -> tuple[Path, Version] | None:
    """The first archive of a release in a folder, with the version as its name writes it."""
    for path in sorted(archives.iterdir()):
        version = _file_version(framework, path.name)
        if version is not None and version == Version(release):
            return path, version
    return None


@dataclass(frozen=True, slots=True)
class IndexFile:
    """One file on the package index."""

    filename: str
    url: str
    sha256: str
    uploaded: str | None = None
    """Time of the upload in ISO 8601 with its time zone. None if the index does not give it."""


def _index(framework: str, release: str, wanted: re.Pattern[str]) -> Artifact:
    if known := _known_file(framework, release, wanted):
        return known
    files = [f for v, f in _files_until(framework) if v == Version(release)]
    if not files:
        when = f" before {_until:%Y-%m-%d}" if _until is not None else ""
        raise RuleUnknown(f"the package index has no {framework} {release}{when}")
    # Pure wheels first, then Linux ones (all hold the same Python and JSON), then the source archive.
    wheels = sorted(
        (f for f in files if f.filename.endswith(".whl")),
        key=lambda f: (not f.filename.endswith("none-any.whl"), "x86_64" not in f.filename, f.filename),
    )
    reasons = [f"no file of {framework} {release} on the package index holds the rule"]
    for package in [*wheels[:1], *(f for f in files if f.filename.endswith(".tar.gz"))]:
        try:
            artifact = _remote(package, wanted)
        except RuleUnknown as reason:
            reasons.append(f"{package.filename}: {reason}")
            continue
        record = {"filename": package.filename, "url": package.url, "sha256": package.sha256}
        _keep(_release_file(framework, release, wanted), json.dumps(record))
        return artifact
    raise RuleUnknown("; ".join(reasons))


def is_cached(framework: str, release: str) -> bool:
    """Whether this release was read from the index before. It then exists, and reading it again needs no network."""
    if _until is not None:
        return False  # Only the index tells whether it was there at that moment.
    try:
        return any(cache_folder("releases").glob(f"{framework}-{release}-*.json"))
    except ImportError:
        return False


def _release_file(framework: str, release: str, wanted: re.Pattern[str]) -> Path:
    return (
        cache_folder("releases")
        / f"{framework}-{release}-{hashlib.sha256(wanted.pattern.encode()).hexdigest()[:8]}.json"
    )


def _known_file(framework: str, release: str, wanted: re.Pattern[str]) -> Artifact | None:
    """The files of a release that was read before, as the cache records them.

    None if there is no record, if the index is read as of a moment, or under pip's no-index.
    """
    if _until is not None:
        return None
    try:
        path = _release_file(framework, release, wanted)
    except ImportError:
        return None
    if not path.exists() or os.environ.get("PIP_NO_INDEX"):
        return None
    return _remote(IndexFile(**json.loads(path.read_text(encoding="utf-8"))), wanted)


def _remote(package: IndexFile, wanted: re.Pattern[str]) -> Artifact:
    """A file on the index. Its members are read on demand and kept in the cache."""
    sha256 = package.sha256
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise RuleUnknown("the index gives no sha256, so the file can't be identified")
    folder = cache_folder("artifacts") / sha256
    # A listing holds the names that one rule wants: each rule has its own listing.
    listing = folder / f"names-{hashlib.sha256(wanted.pattern.encode()).hexdigest()[:8]}.json"
    session = _Remote(package.url, package.filename, sha256, wanted)
    if listing.exists():
        names = frozenset(json.loads(listing.read_text(encoding="utf-8")))
    else:
        names = session.names()
        if not any(wanted.search(n) for n in names):
            raise RuleUnknown("it holds no file with the rule")
        _keep(listing, json.dumps(sorted(names)))
    matching = frozenset(n for n in names if wanted.search(n))
    if not matching:
        raise RuleUnknown("it holds no file with the rule")

    def read(name: str) -> str:
        if name not in matching:
            raise KeyError(name)
        # The name comes from a foreign archive. Its digest names the cached file, so no path can lead outside.
        cached = folder / hashlib.sha256(name.encode()).hexdigest()
        if not cached.exists():
            text = session.read(name)
            _keep(cached, text)
            return text
        return cached.read_text(encoding="utf-8")

    return Artifact(package.filename, sha256, "index", matching, read)


class _Remote:
    """One file on the index. It is opened at the first use, so that a cached release needs no network."""

    def __init__(self, url: str, filename: str, sha256: str, wanted: re.Pattern[str]) -> None:
        self._url, self._filename, self._sha256, self._wanted = url, filename, sha256, wanted
        self._names: frozenset[str] | None = None
        self._reader: Callable[[str], str] | None = None

    def names(self) -> frozenset[str]:
        self._open()
        assert self._names is not None
        return self._names

    def read(self, name: str) -> str:
        self._open()
        from remotezip import RemoteZipError

        assert self._reader is not None
        try:
            return self._reader(name)
        except RemoteZipError as error:
            raise RuleUnknown(f"reading {name} from the package index failed: {error}") from error

    def _fetch(self, chunks: Iterable[bytes], kept: IO[bytes]) -> None:
        """Write a whole file to `kept`, and count and hash it as it arrives.

        Raises RuleUnknown for a file that is too large, or that is another than the index names.
        """
        digest, fetched = hashlib.sha256(), 0
        for chunk in chunks:
            fetched += len(chunk)
            if fetched > MAX_DOWNLOAD_BYTES:
                raise RuleUnknown(
                    f"it has more than {MAX_DOWNLOAD_BYTES >> 20} MiB, more than a release of sources can have"
                )
            digest.update(chunk)
            kept.write(chunk)
        if digest.hexdigest() != self._sha256:
            raise RuleUnknown("the download does not have the sha256 that the index gives")
        kept.seek(0)

    def _open(self) -> None:
        if self._reader is not None:
            return
        try:
            import requests
            from remotezip import RemoteZipError
        except ImportError:
            raise RuleUnknown(_NEEDS_EXTRA) from None
        try:
            if self._filename.endswith(".whl"):
                self._names, self._reader = zip_members(open_zip(self._url, TIMEOUT_S), self._wanted)
            else:
                with (
                    requests.get(self._url, timeout=TIMEOUT_S, stream=True) as response,
                    tempfile.TemporaryFile() as kept,
                ):
                    response.raise_for_status()
                    self._fetch(response.iter_content(1 << 16), kept)
                    self._names, self._reader = tar_members(kept, self._wanted)
        except (RemoteZipError, *DAMAGED) as error:  # requests' own errors are OSError's
            raise RuleUnknown(f"reading it from the package index failed: {error}") from error


_NEEDS_EXTRA = "reading the package index needs the extra 'artifacts': pip install 'pytest-nfp[artifacts]'"


@lru_cache(maxsize=64)
def _index_files(framework: str) -> tuple[tuple[Version, IndexFile], ...]:
    """(version, file) of a project on all configured indexes. Raises RuleUnknown."""
    try:
        import requests
        from pypi_simple import NoSuchProjectError, PyPISimple, UnsupportedContentTypeError
    except ImportError:
        raise RuleUnknown(_NEEDS_EXTRA) from None
    urls = _index_urls()
    if not urls:
        raise RuleUnknown("pip is configured to use no package index (no-index)")
    files, reasons = [], []
    for url in urls:
        try:
            with PyPISimple(endpoint=url) as client:
                page = client.get_project_page(framework, timeout=TIMEOUT_S)
        except NoSuchProjectError:
            reasons.append(f"{framework} is not on the package index")
            continue
        except (requests.RequestException, UnsupportedContentTypeError, ValueError) as error:
            reasons.append(f"the package index is out of reach ({type(error).__name__}: {str(error)[:120]})")
            continue
        for package in page.packages:
            version = _file_version(framework, package.filename)
            if version is not None:
                uploaded = package.upload_time.isoformat() if package.upload_time is not None else None
                sha256 = package.digests.get("sha256", "")
                files.append((version, IndexFile(package.filename, package.url, sha256, uploaded)))
    if not files:
        raise RuleUnknown("; ".join(dict.fromkeys(reasons)) or f"{framework} is not on the package index")
    return tuple(files)


@lru_cache(maxsize=1)
def _index_urls() -> tuple[str, ...]:
    """The index URLs of pip's own configuration: index-url and extra-index-url over http(s). None under no-index."""
    settings: dict[str, str] = {}
    try:
        listed = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        listed = ""
    # pip's order, where the later one wins: [global], a command's own section, the environment.
    for section in ("global", "install", ":env:"):
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            if name.startswith(section + "."):
                settings[name.removeprefix(section + ".")] = value.strip("'\"")
    for name in ("index_url", "extra_index_url", "no_index"):
        if override := os.environ.get(f"PIP_{name.upper()}"):
            settings[name.replace("_", "-")] = override
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return ()
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    urls = [settings.get("index-url", PYPI_SIMPLE_ENDPOINT), *settings.get("extra-index-url", "").split()]
    return tuple(u for u in urls if u.startswith(("http://", "https://")))


def cache_folder(name: str) -> Path:
    """A folder of this package in the platform's cache."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("pytest-nfp", appauthor=False)) / name


def _keep(path: Path, text: str) -> None:
    """Write a text to the cache. If there is no room it is not kept, and it is read again next time."""
    with suppress(OSError):
        write_atomically(path, text)


def _file_version(framework: str, filename: str) -> Version | None:
    try:
        if filename.endswith(".whl"):
            name, version, _, _ = parse_wheel_filename(filename)
        elif filename.endswith(".tar.gz"):
            name, version = parse_sdist_filename(filename)
        else:
            return None
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None
    return version if name == framework else None


def nearest(release: str, releases: Iterable[str], count: int = 4) -> list[str]:
    """The releases around a version that does not exist, oldest first."""
    ordered = sorted(releases, key=Version)
    try:
        at = sum(Version(r) < Version(release) for r in ordered)
    except InvalidVersion:
        return ordered[-count:]
    start = max(0, min(at - count // 2, len(ordered) - count))
    return ordered[start : start + count]
