"""The baseline files that --nfp-update changes. They are collected during the run and written at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pytest_nfp.baselines.files import BaselineFile, CaseBaseline, difference, load, new_file, path_of, write
from pytest_nfp.cases import Backend, Case

Update = Literal["missing", "changed", "all"]
Key = tuple[str, Backend, str]
"""GPU folder, backend, subject."""


def is_asked(update: Update | None, *, is_stored: bool, has_failed: bool) -> bool:
    """Whether --nfp-update asks to store an entry.

    missing: where none is stored of exactly this release.
    changed: where one is stored and the case failed.
    all: always.
    """
    match update:
        case "missing":
            return not is_stored
        case "changed":
            return is_stored and has_failed
        case "all":
            return True
        case None:
            return False


@dataclass
class Updates:
    """The files that a run changes."""

    folder: Path
    """The folder of the baselines."""
    files: dict[Key, BaselineFile] = field(default_factory=dict)
    """The files by key, with their changes."""
    _fresh: dict[Key, None] = field(default_factory=dict)
    """Keys of the files that were asked for since the last `collected`."""

    def file_of(self, gpu: str, case: Case) -> BaselineFile:
        """The file of a case, for the caller to change. gpu: the name of the GPU's folder."""
        key = (gpu, case.backend, case.subject.name)
        if key not in self.files:
            self.files[key] = load(self.folder, *key) or new_file(*key)
        self._fresh[key] = None
        return self.files[key]

    def case_of(self, gpu: str, case: Case) -> CaseBaseline:
        """The entry of a case in its file, for the caller to change."""
        entries = self.file_of(gpu, case).cases
        return entries.setdefault(case.key, CaseBaseline(baseline_positions=case.baseline_positions))

    def collected(self) -> list[dict[str, Any]]:
        """The files that changed since the last call, as plain data."""
        fresh = [self.files[key].model_dump(mode="json", by_alias=True) for key in self._fresh]
        self._fresh.clear()
        return fresh

    def absorb(self, files: Sequence[dict[str, Any]]) -> None:
        """Add the entries that a worker or an earlier run collected to those already here."""
        for data in files:
            framework, _, release = data["backend"].partition("==")
            file = BaselineFile.model_validate(data)
            target = self.files.setdefault((file.gpu, Backend(framework, release), file.subject), file)
            target.granularity |= file.granularity
            target.provenance |= file.provenance
            for key, entry in file.cases.items():
                known = target.cases.setdefault(key, entry)
                known.predicted = entry.predicted or known.predicted
                known.measured = entry.measured or known.measured

    def write(self) -> list[Path]:
        """Write the files. Returns the paths whose text changed. Raises OSError."""
        return write(self.folder, [(backend, file) for (_, backend, _), file in self.files.items()])

    def changes(self) -> list[str]:
        """The changes that `write` would make, as text, by file."""
        lines = []
        for (gpu, backend, subject), file in self.files.items():
            if changes := difference(load(self.folder, gpu, backend, subject), file):
                lines.append(str(path_of(self.folder, gpu, backend, subject)))
                lines += [f"  {change}" for change in changes]
        return lines
