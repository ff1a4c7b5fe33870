"""The record of a run: one JSON schema with everything that a report needs.

The results of several workers are merged here too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from pytest_nfp.cases import read_key
from pytest_nfp.comparison import KnownBoundary, KnownMap
from pytest_nfp.files import FileError, parse_json, write_atomically
from pytest_nfp.granularity import UNKNOWN
from pytest_nfp.verdict import Outcome, worst

SCHEMA = "https://pytest-nfp/record/2"
FIRST = "https://pytest-nfp/record/1"
"""The previous schema. Its cases had no fields for dtype, batch, context, k and routing."""
Kind = Literal["measured", "predicted", "recorded", "executed"]
"""measured: the curve was measured in that run. recorded: it was recorded elsewhere. predicted: there is no curve.
executed: matrix products were counted under an interpreter, without times.
"""
Whole = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
"""A count that may be 0."""
Question = Literal["granularity", "prediction", "boundary"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class _Term(_Strict):
    """One predictor's answer."""

    n_max: Whole
    limiting: str
    interval: tuple[Whole, Whole | None] | None = None


class _Map(BaseModel):
    """The fields of a granularity map that every reader can rely on. Other fields are kept as they are."""

    kernel: str
    source: str
    origin: str
    tiles: list[tuple[Whole, Whole, Whole]]
    artifact: str | None = None
    sha256: str | None = None
    warnings: list[str] = []
    edges: list[Count] = []
    choice: str | None = None
    kernel_reason: str = ""


class _Sum(BaseModel):
    """The fields of a composed model that every reader can rely on."""

    n_max: Whole
    n_max_interval: tuple[Whole, Whole | None]
    steps: Count
    limiting: str
    error: float
    curve: list[tuple[Whole, float]] = []


def _terms(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """Predictions by predictor, unchanged. Raises ValidationError where they don't have the form of `_Term`."""
    if value is not None:
        _TERMS.validate_python(value)
    return value


_TERMS = TypeAdapter(dict[Literal["principle", "tile_roofline"], _Term])


class TestResult(_Strict):
    """One of a case's three tests."""

    __test__ = False  # not a test class, whatever its name says to pytest
    outcome: Outcome
    reasons: list[str] = []
    held_to: list[str] = []


class Held(_Strict):
    """What the baseline says that a case was held to: the map's tiles and kernel, the predictions, the curve's boundary.

    name: of its release. exact: it is of the case's own release. choice: a digest of the code that chooses an unknown kernel.
    """

    name: str
    exact: bool
    kernel: str | None = None
    tiles: list[tuple[Whole, Whole, Whole]] = []
    choice: str | None = None
    predicted: dict[str, Any] | None = None
    kind: Kind | None = None
    n_max: Whole | None = None
    n_max_interval: tuple[Whole, Whole | None] | None = None
    curve: list[tuple[Whole, float]] = []
    timer: str = ""

    @field_validator("predicted")
    @classmethod
    def _has_terms(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        return _terms(value)

    def known_map(self) -> KnownMap | None:
        """The map as it is compared; None without a map."""
        return KnownMap(self.kernel, tuple(self.tiles), self.choice) if self.kernel is not None else None

    def known_boundary(self) -> KnownBoundary | None:
        """The boundary as it is compared; None without an N_max."""
        if self.kind is None or self.n_max is None or self.n_max_interval is None:
            return None
        return KnownBoundary(self.n_max, self.n_max_interval, self.kind, self.timer, tuple(n for n, _ in self.curve))


class CaseRecord(_Strict):
    """One case. n_idle is None where idle compute sets no bound (`n_idle_unbounded`). executed: N -> FLOPs of the products that the
    kernel executed, and of those that its map predicts.
    """

    id: str
    gpu: str
    backend: str
    module: str
    subject: str
    workload: str
    dtype: str | None = None
    batch: Whole | None = None
    context: Whole | None = None
    top_k: Whole | None = None
    routing: str | None = None
    kind: Kind
    measured_at: str | None = None
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
    executed: dict[Whole, tuple[float, float]] = {}
    floor_us: float | None = None
    composed: dict[str, Any] | None = None
    plateaus: list[tuple[Whole, Whole, float]] = []
    samples: dict[Whole, list[float]] = {}
    log: list[str] = []
    baseline: Held | None = None

    @field_validator("predicted")
    @classmethod
    def _has_terms(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        return _terms(value)

    @field_validator("composed")
    @classmethod
    def _is_sum(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and "reason" not in value:
            _Sum.model_validate(value)
        return value

    @field_validator("granularity")
    @classmethod
    def _is_map(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            _Map.model_validate(value)
        return value


class Record(_Strict):
    """One run on one GPU. machine: identity and versions, for measured cases where it was measured."""

    schema_: Literal["https://pytest-nfp/record/2"] = Field(alias="schema")
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

    @field_validator("machine")
    @classmethod
    def _has_maps(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in ("identity", "recorded"):
            if not isinstance(value.get(name, {}), dict):
                raise ValueError(f"{name} must be an object")
        return value

    @field_validator("cases")
    @classmethod
    def _are_different(cls, value: list[CaseRecord]) -> list[CaseRecord]:
        ids: set[str] = set()
        for case in value:
            if case.id in ids:
                raise ValueError(f"two cases have the id {case.id!r}")
            ids.add(case.id)
        return value


def key_of(case: CaseRecord) -> str:
    """The part of a case that stays when its release changes: GPU, framework, subject and workload."""
    return f"{case.gpu} {case.backend.partition('==')[0]} {case.subject} {case.workload}"


def merge_case(known: CaseRecord | None, new: CaseRecord) -> CaseRecord:
    """Two records of one case as one. A curve, measured or recorded, takes precedence over a prediction."""
    if known is None:
        return new
    base, other = (new, known) if new.curve or not known.curve else (known, new)
    merged = base.model_copy(deep=True)
    merged.tests = known.tests | new.tests
    for name in ("predicted", "n_idle", "granularity", "basis", "baseline"):
        if getattr(merged, name) is None:
            setattr(merged, name, getattr(other, name))
    merged.n_idle_unbounded = known.n_idle_unbounded or new.n_idle_unbounded
    return summarise(merged)


def is_trusted(case: CaseRecord) -> bool:
    """Whether the case's curve can be trusted: neither the case nor its boundary test is INVALID."""
    boundary = case.tests.get("boundary")
    return case.outcome != "INVALID" and (boundary is None or boundary.outcome != "INVALID")


def known_boundary(case: CaseRecord, tolerance: float) -> KnownBoundary | None:
    """The boundary of a case's curve as it is compared; None without a curve or an N_max.

    tolerance: the record's epsilon. A curve is noisy where the interval of a ratio holds 1 + epsilon, at an N
    within the interval of N_max and above its lower end.
    """
    if not case.curve or case.n_max is None or case.n_max_interval is None:
        return None
    low, high = case.n_max_interval
    limit = 1 + tolerance
    noisy = any(a <= limit < b and low < n and (high is None or n <= high) for n, a, b in case.ratios)
    return KnownBoundary(case.n_max, (low, high), case.kind, case.timer, tuple(n for n, _ in case.curve), noisy)


def known_map(case: CaseRecord) -> KnownMap | None:
    """The map of a case as it is compared; None without a map."""
    g = case.granularity
    if g is None:
        return None
    why = str(g.get("kernel_reason", "")) if g["kernel"] == UNKNOWN else ""
    return KnownMap(g["kernel"], tuple((a, b, t) for a, b, t in g["tiles"]), g.get("choice"), why=why)


def summarise(case: CaseRecord) -> CaseRecord:
    """Set the outcome and reasons of a case from its tests."""
    case.outcome = worst([t.outcome for t in case.tests.values()])
    case.reasons = list(
        dict.fromkeys(
            r for q in ("granularity", "prediction", "boundary") if q in case.tests for r in case.tests[q].reasons
        )
    )
    return case


def identity_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, before, after) of each part of the machine's identity that differs between two records."""
    was, now = (machine.get("identity", {}) for machine in (before, after))
    return [(n, was.get(n), now.get(n)) for n in sorted({*was, *now}) if was.get(n) != now.get(n)]


def dump(record: Record) -> str:
    """The record as JSON text, without NaN and infinity."""
    return json.dumps(record.model_dump(mode="json", by_alias=True), indent=1, allow_nan=False) + "\n"


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a record's file, published as docs/record.schema.json."""
    schema = Record.model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA, **schema}


def write(path: Path, record: Record) -> None:
    """Write a record atomically."""
    write_atomically(path, dump(record))


def read(path: Path) -> Record:
    """A record from a file. A record of schema 1 is migrated. Raises FileError with file and field."""
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: can't be read: {error}") from error
    except ValueError as error:
        raise FileError(
            f"{path}: not JSON, or cut short: {error}; the run's journal.jsonl has what it finished"
        ) from error
    if not isinstance(data, dict) or "schema" not in data:
        raise FileError(f"{path}: not a record: it names no schema")
    if data["schema"] == FIRST:
        data = _migrated(data)
    elif data["schema"] != SCHEMA:
        raise FileError(
            f"{path}: its schema is {data['schema']!r}, written by {data.get('tool', 'an unnamed tool')}; this release reads"
            f" {FIRST} and {SCHEMA}: read it with the release that wrote it, or upgrade pytest-nfp"
        )
    try:
        return Record.model_validate_json(json.dumps(data))
    except ValidationError as error:
        e = error.errors(include_url=False)[0]
        raise FileError(f"{path}: {'.'.join(str(p) for p in e['loc']) or 'file'}: {e['msg']}") from error


def _migrated(data: dict[str, Any]) -> dict[str, Any]:
    """A record of schema 1 as one of schema 2: each case gets dtype, batch, context, k and routing of its workload."""
    cases = data.get("cases")
    for case in cases if isinstance(cases, list) else []:
        key_fields = read_key(str(case.get("workload", ""))) if isinstance(case, dict) else None
        if key_fields is not None:
            case |= {name: key_fields[name] for name in ("dtype", "batch", "context", "top_k", "routing")}
    return {**data, "schema": SCHEMA}


def totals(cases: Iterable[CaseRecord]) -> dict[str, int]:
    """Number of cases by outcome, for the outcomes that occur."""
    counts: dict[str, int] = {}
    for case in cases:
        counts[case.outcome] = counts.get(case.outcome, 0) + 1
    return counts
