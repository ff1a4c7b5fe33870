"""The journal of a run. Each case is written as a line when it ends, so that a killed run keeps its finished cases.

The file holds JSON lines of four kinds: `run` (the settings that the numbers depend on), `machine` (one for each GPU),
`case`, and `update` (a baseline file with the entries that the run collected). A last line that the kill cut off is
ignored on reading.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ValidationError

from pytest_nfp import records
from pytest_nfp.files import FileError, parse_json, write_atomically
from pytest_nfp.records.schema import CaseRecord, Record

NAME = "journal.jsonl"
KINDS = ("run", "machine", "case", "update")
DEFAULTS: dict[str, Any] = {"tolerance": 0.2, "match_tolerance": 0.15, "protocol": "adaptive", "seed": 0}
"""Settings that a journal of an older release may lack, with their values."""


@dataclass(frozen=True, slots=True)
class Past:
    """The results of an earlier run."""

    run: dict[str, Any] = field(default_factory=dict)
    """Its settings, by name."""
    machines: dict[str, dict[str, Any]] = field(default_factory=dict)
    """GPU -> its machine."""
    cases: dict[str, CaseRecord] = field(default_factory=dict)
    """Id -> case."""
    updates: tuple[dict[str, Any], ...] = ()
    """Baseline files with the entries that the run collected, as plain data."""


class Journal:
    """A file that grows by one flushed line at a time. A new run begins a new file with the results that it resumes."""

    def __init__(self, path: Path, run: Mapping[str, Any], past: Past, lock: FileLock | None = None) -> None:
        self.path = path
        self._lock = lock
        self._machines = set(past.machines)
        # The earlier run's results are written at once and atomically: its journal may be the same file.
        lines: list[tuple[str, Any]] = [("run", dict(run))]
        lines += [("machine", {"gpu": gpu, **machine}) for gpu, machine in past.machines.items()]
        lines += [("case", case.model_dump(mode="json")) for case in past.cases.values()]
        lines += [("update", update) for update in past.updates]
        write_atomically(path, "".join(_text(kind, data) for kind, data in lines))
        self._file = path.open("a", encoding="utf-8")

    def append(self, collected: Mapping[str, Any]) -> None:
        """Append the result of Session.collected(): machines that are new, cases, and baseline files."""
        for gpu, machine in collected["machines"].items():
            if gpu not in self._machines:
                self._machines.add(gpu)
                self._line("machine", {"gpu": gpu, **machine})
        for case in collected["cases"]:
            self._line("case", case)
        for update in collected["updates"]:
            self._line("update", update)

    def close(self) -> None:
        """Close the file and release its lock, when the run has ended."""
        self._file.close()
        if self._lock is not None:
            self._lock.release()

    def _line(self, kind: str, data: Any) -> None:
        self._file.write(_text(kind, data))
        self._file.flush()
        os.fsync(self._file.fileno())


def begin(folder: Path, run: Mapping[str, Any], past: Past, resumed: Path | None) -> Journal:
    """The journal of a run that begins.

    The journal of an earlier run that this one does not resume is kept under another name.
    Two runs at once in one folder have a journal each. Raises OSError where the folder can't be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = folder / (NAME if number == 1 else f"journal-{number}.jsonl")
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        try:
            lock.acquire(blocking=False)
        except Timeout:  # Another run is writing this journal.
            continue
        break
    if path.exists() and not (resumed is not None and resumed.exists() and resumed.samefile(path)):
        path.replace(path.with_name(f"{path.stem}.before.jsonl"))
    return Journal(path, run, past, lock)


def _text(kind: str, data: Any) -> str:
    return json.dumps({kind: data}, allow_nan=False) + "\n"


def read(path: Path) -> Past:
    """The results in a journal or a record. Raises FileError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: can't be read: {error}; give a journal.jsonl or record.json") from error
    if path.suffix != ".jsonl":
        record = records.read(path)
        run = {n: getattr(record, n) for n in ("tolerance", "match_tolerance", "protocol", "seed")}
        return _dated(Past(run, {record.gpu: record.machine}, {c.id: c for c in record.cases}), record.started)
    lines = text.split("\n")
    past = Past()
    updates: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            ((kind, data),) = parse_json(line).items()
            if kind not in KINDS or not isinstance(data, dict):
                raise ValueError(f"a line is one of {', '.join(KINDS)}")
            if kind == "run":
                past.run.update(data)
            elif kind == "machine":
                past.machines[data.pop("gpu")] = data
            elif kind == "case":
                case = CaseRecord.model_validate(data)
                past.cases[case.id] = records.merge_case(past.cases.get(case.id), case)
            else:
                updates.append(data)
        except (ValueError, ValidationError, AttributeError, KeyError, TypeError) as error:
            if number == len(lines):  # The last line has no line end: the run was killed while it wrote it.
                continue
            raise FileError(f"{path}:{number}: not a line of a journal: {str(error).splitlines()[0]}") from error
    return _dated(replace(past, updates=tuple(updates)), past.run.get("started"))


def _dated(past: Past, started: str | None) -> Past:
    """Measured cases without a date get the start of their run, however late the run is resumed."""
    for case in past.cases.values():
        if case.kind == "measured" and case.measured_at is None:
            case.measured_at = started
    return past


def records_of(past: Past) -> list[Record]:
    """The results of a killed run as records, one a GPU. Each is marked partial."""
    settings = {name: past.run.get(name, value) for name, value in DEFAULTS.items()}
    partial_records = []
    for gpu in dict.fromkeys(c.gpu for c in past.cases.values()):
        cases = [c for c in past.cases.values() if c.gpu == gpu]
        machine = past.machines.get(gpu, {})
        partial_records.append(
            Record(
                schema=records.SCHEMA,
                tool=str(past.run.get("tool", "pytest-nfp")),
                gpu=gpu,
                started=str(past.run.get("started", "")),
                partial=True,
                machine=machine,
                cases=cases,
                **settings,
            )
        )
    return partial_records
