"""The record of a run: everything a report needs, one JSON schema. Also how runs of several workers become one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pytest_nfp.files import FileError, write_atomically
from pytest_nfp.verdict import Outcome, worst

SCHEMA = "https://pytest-nfp/record/1"
Kind = Literal["measured", "predicted", "recorded"]
Whole = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
"""What was seen, which can be nothing."""
Question = Literal["granularity", "prediction", "boundary"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TestResult(_Strict):
    """One of a case's three tests."""

    __test__ = False  # not a test class, whatever its name says to pytest
    outcome: Outcome
    reasons: list[str] = []


class CaseRecord(_Strict):
    """One case. n_idle is None where idle compute sets no bound (`n_idle_unbounded`)."""

    id: str
    gpu: str
    backend: str
    module: str
    subject: str
    workload: str
    kind: Kind
    outcome: Outcome
    reasons: list[str] = []
    tests: dict[Question, TestResult] = {}
    n_idle: float | None = None
    n_idle_unbounded: bool = False
    predicted: dict[str, Any] | None = None
    basis: str | None = None
    granularity: dict[str, Any] | None = None
    baseline_positions: Whole | None = None
    n_max: Whole | None = None
    n_max_interval: tuple[Whole, Whole | None] | None = None
    n_first_exit: Whole | None = None
    curve: list[tuple[Whole, float]] = []
    ratios: list[tuple[Whole, float, float]] = []
    sensitivity: dict[str, Whole] = {}
    source: str | None = None
    kernel: str | None = None
    counts: dict[str, Any] = {}
    trust: dict[str, Any] = {}
    timer: str = ""
    kernels: dict[Whole, str] = {}
    modes: dict[Whole, str] = {}
    padded: dict[Whole, Whole] = {}
    settings: dict[Whole, str] = {}
    active_experts: dict[Whole, Count] = {}
    proof: dict[Whole, tuple[Count, Count]] = {}
    steps: dict[Whole, float] = {}
    floor_us: float | None = None
    composed: dict[str, Any] | None = None
    plateaus: list[tuple[Whole, Whole, float]] = []
    samples: dict[Whole, list[float]] = {}
    log: list[str] = []


class Record(_Strict):
    """One run on one GPU. machine: identity and versions, for measured cases where it was measured."""

    schema_: Literal["https://pytest-nfp/record/1"] = Field(alias="schema")
    tool: str
    gpu: str
    started: str
    partial: bool
    tolerance: float
    match_tolerance: float
    protocol: str
    seed: int
    machine: dict[str, Any]
    cases: list[CaseRecord]


def merge_case(known: CaseRecord | None, new: CaseRecord) -> CaseRecord:
    """Two tests of one case as one record: what is measured or recorded stands before what is predicted."""
    if known is None:
        return new
    base, other = (new, known) if new.curve or not known.curve else (known, new)
    merged = base.model_copy(deep=True)
    merged.tests = known.tests | new.tests
    for name in ("predicted", "n_idle", "granularity", "basis"):
        if getattr(merged, name) is None:
            setattr(merged, name, getattr(other, name))
    merged.n_idle_unbounded = known.n_idle_unbounded or new.n_idle_unbounded
    return summarise(merged)


def summarise(case: CaseRecord) -> CaseRecord:
    """Outcome and reasons of a case from its tests."""
    case.outcome = worst([t.outcome for t in case.tests.values()])
    case.reasons = list(
        dict.fromkeys(
            r for q in ("granularity", "prediction", "boundary") if q in case.tests for r in case.tests[q].reasons
        )
    )
    return case


def identity_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, before, after) of whatever decides kernels and speed and differs between two records' machines."""
    was, now = (machine.get("identity", {}) for machine in (before, after))
    return [(n, was.get(n), now.get(n)) for n in sorted({*was, *now}) if was.get(n) != now.get(n)]


def finite(value: float) -> float | None:
    """A number that JSON can hold: None for infinity."""
    return round(value, 2) if math.isfinite(value) else None


def dump(record: Record) -> str:
    """The record as JSON text: no NaN, no infinity."""
    return json.dumps(record.model_dump(mode="json", by_alias=True), indent=1, allow_nan=False) + "\n"


def write(path: Path, record: Record) -> None:
    """Write a record atomically."""
    write_atomically(path, dump(record))


def read(path: Path) -> Record:
    """A record from a file. Raises FileError with file and field."""
    try:
        return Record.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path}: can't be read: {error}") from error
    except ValidationError as error:
        e = error.errors(include_url=False)[0]
        raise FileError(f"{path}: {'.'.join(str(p) for p in e['loc']) or 'file'}: {e['msg']}") from error


def totals(cases: Iterable[CaseRecord]) -> dict[str, int]:
    """Cases per outcome, those that occur."""
    counts: dict[str, int] = {}
    for case in cases:
        counts[case.outcome] = counts.get(case.outcome, 0) + 1
    return counts
