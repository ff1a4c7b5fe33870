"""What --nfp-update stores: baseline files as they will be, until the run ends and writes them."""

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
    """Whether --nfp-update asks for an entry: where none is stored of exactly this release, where it failed, or always."""
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
    """Where baselines lie."""
    files: dict[Key, BaselineFile] = field(default_factory=dict)
    _fresh: dict[Key, None] = field(default_factory=dict)

    def file_of(self, gpu: str, case: Case) -> BaselineFile:
        """The file of a case, to be changed. gpu: its folder's name."""
        key = (gpu, case.backend, case.subject.name)
        if key not in self.files:
            self.files[key] = load(self.folder, *key) or new_file(*key)
        self._fresh[key] = None
        return self.files[key]

    def case_of(self, gpu: str, case: Case) -> CaseBaseline:
        """The entry of a case in its file, to be changed."""
        entries = self.file_of(gpu, case).cases
        return entries.setdefault(case.key, CaseBaseline(baseline_positions=case.baseline_positions))

    def collected(self) -> list[dict[str, Any]]:
        """The files that changed since this was last asked, as plain data."""
        fresh = [self.files[key].model_dump(mode="json", by_alias=True) for key in self._fresh]
        self._fresh.clear()
        return fresh

    def absorb(self, files: Sequence[dict[str, Any]]) -> None:
        """Take over what a worker or an earlier run collected: its entries are added to those already here."""
        for data in files:
            framework, _, release = data["backend"].partition("==")
            file = BaselineFile.model_validate(data)
            mine = self.files.setdefault((file.gpu, Backend(framework, release), file.subject), file)
            mine.granularity |= file.granularity
            mine.provenance |= file.provenance
            for key, entry in file.cases.items():
                known = mine.cases.setdefault(key, entry)
                known.predicted = entry.predicted or known.predicted
                known.measured = entry.measured or known.measured

    def write(self) -> list[Path]:
        """Write the files; the paths whose text changed. Raises OSError."""
        return write(self.folder, [(backend, file) for (_, backend, _), file in self.files.items()])

    def changes(self) -> list[str]:
        """What `write` is about to change, in meaning, by file."""
        lines = []
        for (gpu, backend, subject), file in self.files.items():
            if changes := difference(load(self.folder, gpu, backend, subject), file):
                lines.append(str(path_of(self.folder, gpu, backend, subject)))
                lines += [f"  {change}" for change in changes]
        return lines
