"""List stored baselines and prune them: which are unused, which are stale, which can't be read."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from pytest_nfp import catalog
from pytest_nfp.baselines.files import BaselineFile, path_of, stored_backends, write
from pytest_nfp.cases import BYTES_PER_ELEMENT, ROUTINGS, Backend, expand, read_key, variants
from pytest_nfp.catalog import UnknownName
from pytest_nfp.catalog.tiny import SUFFIX, tiny
from pytest_nfp.files import FileError, read_yaml
from pytest_nfp.principle.routing import POWER_LAW
from pytest_nfp.registry import MODULES

KEEP = 3
"""Releases of a framework to keep for a GPU and subject: the present one, its predecessor, and one more to compare."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A baseline file, and what is wrong with it."""

    path: Path
    """Where the file lies."""
    gpu: str
    """The GPU that its path names."""
    backend: Backend
    """The framework and release that its path names."""
    subject: str
    """The subject that its path names."""
    file: BaselineFile | None = None
    """Its content; None where it can't be read."""
    error: str = ""
    """Why it can't be read, or why its content does not belong to its path."""
    unknown: str = ""
    """A name in it that the catalog lacks.

    A run with --nfp-model=config.json may ask for it, which only that run can tell.
    """
    unused: list[str] = field(default_factory=list)
    """Keys of the cases that no suite asks for."""
    stale: str = ""
    """Why it is stale."""

    @property
    def is_fine(self) -> bool:
        """Whether the file can be read, is not stale, and has no unused case."""
        return not (self.error or self.unused or self.stale)


def stored(folder: Path, today: date, keep: int = KEEP, older_than: int | None = None) -> Iterator[Stored]:
    """Every baseline file of a folder, by GPU, framework, release and subject.

    keep: a file with so many newer releases is stale. older_than: a file with no commit for more than so many days is
    stale, where git knows the date.
    """
    for gpu in sorted(p.name for p in folder.glob("*/")):
        backends = stored_backends(folder, gpu)
        for at, backend in enumerate(backends):
            later = [b for b in backends[at + 1 :] if b.framework == backend.framework]
            for path in sorted(path_of(folder, gpu, backend, "x").parent.glob("*.yaml")):
                newer = [b for b in later if path_of(folder, gpu, b, path.stem).exists()]
                yield _examined(path, gpu, backend, [b.release for b in newer], today, keep, older_than)


def _examined(
    path: Path, gpu: str, backend: Backend, newer: list[str], today: date, keep: int, older_than: int | None
) -> Stored:
    try:
        file = read_yaml(path, BaselineFile)
    except FileError as error:
        return Stored(path, gpu, backend, path.stem, error=str(error))
    named = (file.gpu, file.backend, file.subject)
    if named != (gpu, str(backend), path.stem):
        wrong = f"it says {', '.join(named)}, its place says {gpu}, {backend}, {path.stem}"
        return Stored(path, gpu, backend, path.stem, file, error=wrong)
    stale = f"{len(newer)} newer releases have baselines: {', '.join(newer)}" if len(newer) >= keep else ""
    if older_than is not None and not stale and (day := committed(path)) is not None:
        days = (today - day).days
        stale = f"last changed on {day}, {days} days ago" if days > older_than else ""
    unknown, unused = _unused(file, gpu, backend)
    return Stored(path, gpu, backend, path.stem, file, unknown=unknown, unused=unused, stale=stale)


def committed(path: Path) -> date | None:
    """The day of the last commit that changed a file; None outside git.

    A date in the file itself would conflict in every merge.
    """
    command = ["git", "log", "-1", "--format=%cs", "--", path.name]
    try:
        completed = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False, timeout=30)
        return date.fromisoformat(completed.stdout.strip())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def _unused(file: BaselineFile, gpu: str, backend: Backend) -> tuple[str, list[str]]:
    """(a name that the catalog lacks, keys of the cases that no suite asks for)."""
    if backend.framework == "own":
        return "", []  # The user's own test asks for these cases, which only a run can tell.
    is_cpu = gpu == "cpu" or gpu.startswith("cpu-")
    try:
        if not is_cpu:
            catalog.gpu(gpu)
        model = catalog.model(file.subject.removesuffix(SUFFIX))
    except UnknownName as error:
        return str(error).splitlines()[0], []
    subject = tiny(model) if file.subject.endswith(SUFFIX) else model
    known: set[str] = set()
    for module in MODULES:
        for dtype in BYTES_PER_ELEMENT:
            for case in expand("cpu" if is_cpu else gpu, backend, module, subject, (*ROUTINGS, "uniform"), dtype):  # type: ignore[arg-type]  # names of modules
                single = [replace(case, gemm=shape) for shape in case.gemms] if module == "dense" else []
                known |= {c.key for c in (case, *variants(case), *single)}
    # A case of a replayed trace names the trace's file. Batch, context and k can come from options.
    # Only a run can tell whether it asks for such cases.
    asked = {_without_grid(key) for key in known}
    experts = subject.moe.experts if subject.moe is not None else 0
    return "", [
        key
        for key in file.cases
        if (_without_grid(key) not in asked and "trace" not in key and POWER_LAW not in key)
        or ((read_key(key) or {}).get("top_k") or 0) > experts
    ]


def _without_grid(key: str) -> object:
    """The parts of a case's key other than b, L and k; the key itself where it can't be parsed."""
    key_fields = read_key(key)
    return (
        key
        if key_fields is None
        else (key_fields["module"], key_fields["dtype"], key_fields["variant"], key_fields["routing"])
    )


def prune(found: Stored) -> bool:
    """Remove a stale file, or the unused cases of a file. A file that can't be read stays.

    Returns whether anything was removed.
    """
    if found.error or found.file is None or found.is_fine:
        return False
    kept = {k: c for k, c in found.file.cases.items() if k not in found.unused}
    if found.stale or not kept:
        found.path.unlink()
        return True
    found.file.cases = kept
    write(found.path.parent.parent.parent, [(found.backend, found.file)])
    return True
