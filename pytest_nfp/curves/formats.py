"""Curves from anywhere: CSV and JSON of positions with samples or a median, nvbench's JSON, triton's perf_report CSV.

A table has a column of positions and one of latencies; other columns that are known are taken along, the rest is ignored.
Several rows of one N are its samples. Latencies are in the unit that their column names, microseconds without one: N_max
does not depend on it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pytest_nfp.curves.curve import Curve, make_point
from pytest_nfp.files import FileError, parse_json
from pytest_nfp.principle import Point

POSITIONS = ("positions", "n", "num_positions", "query_len", "qlen", "q", "tokens", "num_tokens", "m")
LATENCY = ("latency", "median", "time", "t", "mean", "duration", "device")
UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
NOT_LATENCY = re.compile(
    r"flops|[gt]i?b/s|bandwidth|tokens?_per|tok/s|throughput|speedup|host|min|max|low|high|spread|std", re.I
)
NVBENCH_TIME = ("nv/cold/time/gpu/median", "nv/cold/time/gpu/mean", "nv/batch/time/gpu/mean", "nv/cold/time/cpu/mean")
NORMAL_95 = 1.96
MAX_BYTES = 64 * 2**20
SHORTEST, LONGEST = 1e-12, 1e15
"""Of a latency in any unit: beyond, a ratio of two may have no value."""


@dataclass(frozen=True, slots=True)
class Table:
    """A curve as a file tells it. host_us and throughput (tokens per second) where the file has them, by N."""

    curve: Curve
    host_us: dict[int, float] = field(default_factory=dict)
    throughput: dict[int, float] = field(default_factory=dict)


def read_curve(path: Path, baseline_positions: int = 1, column: str | None = None) -> Table:
    """The curve of a file. column: the latencies' column where a table has several. Raises FileError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise FileError(f"{path}: has more than {MAX_BYTES // 2**20} MiB, which no curve needs")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: can't be read: {error}") from error
    rows = _json_rows(path, text) if text.lstrip()[:1] in ("{", "[") else _csv_rows(path, text)
    return _table(path, rows, baseline_positions, column)


Row = dict[str, Any]


def _csv_rows(path: Path, text: str) -> list[Row]:
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    names = [n.strip() for n in reader.fieldnames or () if n is not None]
    if len(names) < 2:
        raise FileError(f"{path}:1: a table needs a header with a column of positions and one of latencies")
    rows = []
    for line in reader:
        if None in line:
            raise FileError(f"{path}:{reader.line_num}: has more values than the header has columns")
        rows.append(
            {k.strip(): (v or "").strip() for k, v in line.items() if k is not None} | {"line": reader.line_num}
        )
    return rows


def _json_rows(path: Path, text: str) -> list[Row]:
    try:
        data = parse_json(text)
    except ValueError as error:
        at = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise FileError(f"{path}{at}: broken JSON: {error}") from error
    if isinstance(data, dict) and "benchmarks" in data:
        return _nvbench_rows(path, data)
    if isinstance(data, dict):
        data = next((data[k] for k in ("points", "curve", "rows", "data") if isinstance(data.get(k), list)), data)
    if isinstance(data, dict):  # {"1": 31.0, "2": [31.2, 31.1]}
        data = [{"positions": n, "samples": v} for n, v in data.items()]
    rows = []
    for i, item in enumerate(data):
        if isinstance(item, dict):
            rows.append({**item, "line": f"item {i + 1}"})
        elif isinstance(item, list) and len(item) in (2, 3, 4):
            row = dict(zip(("positions", "latency", "low", "high"), item, strict=False))
            rows.append(row | {"line": f"item {i + 1}"})
        else:
            raise FileError(
                f"{path}: item {i + 1}: must be an object, or [positions, latency, low, high], got {str(item)[:40]}"
            )
    return rows


def _nvbench_rows(path: Path, data: Mapping[str, Any]) -> list[Row]:
    """One row a state: the integer axis that varies is N; the time's mean with its relative deviation over the samples."""
    try:
        states = [s for b in data["benchmarks"] for s in b["states"] if not s.get("is_skipped")]
        axes = [{a["name"]: a for a in s["axis_values"]} for s in states]
        names = [n for n in (axes[0] if axes else {}) if len({a[n]["value"] for a in axes}) > 1]
        names = [n for n in names if all(re.fullmatch(r"\d+", str(a[n]["value"])) for a in axes)]
        if len(names) != 1:
            raise FileError(
                f"{path}: nvbench: one integer axis must vary, and here {len(names)} do: {', '.join(names) or 'none'}"
            )
        rows = []
        for i, (state, axis) in enumerate(zip(states, axes, strict=True), 1):
            said = {s["tag"]: float(s["data"][0]["value"]) for s in state["summaries"] if s.get("data")}
            tag = next((t for t in NVBENCH_TIME if t in said), None)
            if tag is None:
                raise FileError(f"{path}: nvbench: state {i} has none of {', '.join(NVBENCH_TIME)}")
            row: Row = {"positions": axis[names[0]]["value"], "latency_s": said[tag], "line": f"state {i}"}
            stem = tag.rpartition("/")[0]
            relative, count = said.get(f"{stem}/stdev/relative"), said.get(f"{tag.split('/time')[0]}/sample_size")
            if relative is not None and count:
                row["spread"] = said[tag] * relative * NORMAL_95 / math.sqrt(count)
            rows.append(row)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FileError(f"{path}: not nvbench's JSON after all: {type(error).__name__}: {error}") from error
    return rows


def _table(path: Path, rows: Sequence[Row], base: int, column: str | None) -> Table:
    if not rows:
        raise FileError(f"{path}: holds no rows")
    names = list(dict.fromkeys(n for r in rows for n in r if n != "line"))
    key = {n.lower(): n for n in names}
    positions = next((key[n] for n in POSITIONS if n in key), None) or _first_whole(rows, names)
    if positions is None:
        raise FileError(
            f"{path}: no column of positions: name it one of {', '.join(POSITIONS)}; there are {', '.join(names)}"
        )
    latency = _latency_column(path, rows, [n for n in names if n != positions], column)
    unit = _unit(latency)
    samples: dict[int, list[float]] = {}
    intervals: dict[int, tuple[float, float]] = {}
    refused: dict[int, str] = {}
    extra: dict[str, dict[int, Any]] = {name: {} for name in ("kernel", "mode", "host", "throughput")}
    for row in rows:
        n = _whole(path, row, positions)
        values = _numbers(path, row, latency)
        said = str(_known(row, key, "error", "reason", "unsupported") or "").strip()
        if not values or said:
            refused[n] = said or "no latency is given"
            continue
        samples.setdefault(n, []).extend(v * unit for v in values)
        if (interval := _interval(path, row, key, median(values))) is not None:
            intervals[n] = (interval[0] * unit, interval[1] * unit)
        for name, aliases in (
            ("kernel", ("kernel", "kernel_name", "backend")),
            ("mode", ("mode", "graph_mode", "graph")),
            ("host", ("host_us", "host_ms", "host")),
            ("throughput", ("tokens_per_s", "throughput", "tok/s", "tokens_per_second")),
        ):
            if (found := _known(row, key, *aliases)) not in (None, ""):
                extra[name][n] = found
    both = sorted(set(samples) & set(refused))
    if both:
        raise FileError(f"{path}: N={both[0]} has a latency and is refused too")
    if not samples:
        raise FileError(f"{path}: no row has a latency")
    host_unit = next((_unit(key[a]) for a in ("host_us", "host_ms", "host") if a in key), 1.0)
    curve = Curve(
        points=tuple(_points(path, samples, intervals, base)),
        baseline_positions=base,
        kind="recorded",
        source=path.name,
        kernel="",
        unsupported=refused,
        kernels={n: str(v) for n, v in extra["kernel"].items()},
        modes={n: str(v) for n, v in extra["mode"].items()},
    )
    host = {n: _number(path, v, f"host time at N={n}") * host_unit for n, v in extra["host"].items()}
    return Table(curve, host, {n: _number(path, v, f"throughput at N={n}") for n, v in extra["throughput"].items()})


def _points(
    path: Path, samples: Mapping[int, Sequence[float]], intervals: Mapping[int, tuple[float, float]], base: int
) -> Iterable[Point]:
    if base not in samples:
        has = ", ".join(map(str, sorted(samples)[:8]))
        raise FileError(f"{path}: has no T(N0) at N0 = {base}: give --baseline-positions; the first N are {has}")
    first = median(samples[base])
    low0, high0 = intervals.get(base, (first, first))
    for n in sorted(samples):
        now = median(samples[n])
        if n == base:
            yield Point(n, now, 1.0, 1.0)
        elif n in intervals or base in intervals:
            low, high = intervals.get(n, (now, now))
            # Both ends of a quotient of two intervals: the widest that they allow.
            yield Point(n, now, low / high0, high / low0, now / first)
        elif len(samples[n]) > 1:
            yield make_point(n, samples[n], [s / first for s in samples[n]])
        else:
            yield Point(n, now)


def _first_whole(rows: Sequence[Row], names: Sequence[str]) -> str | None:
    """The first column, where all of it are whole numbers: perf_report's own x axis may have any name."""
    first = names[0] if names else None
    if first is None or not all(re.fullmatch(r"\d+(\.0+)?", str(r.get(first, ""))) for r in rows):
        return None
    return first


def _latency_column(path: Path, rows: Sequence[Row], names: Sequence[str], column: str | None) -> str:
    if column is not None:
        if column not in names:
            raise FileError(f"{path}: has no column {column!r}; there are {', '.join(names)}")
        return column
    if "samples" in names:
        return "samples"
    numeric = [n for n in names if not NOT_LATENCY.search(n) and any(_is_number(r.get(n)) for r in rows)]
    for stem in LATENCY:
        found = [n for n in numeric if re.split(r"[_ (\[]", n.lower())[0] == stem]
        if found:
            return found[0]
    if len(numeric) == 1:
        return numeric[0]
    if not numeric:
        raise FileError(
            f"{path}: no column of latencies (latency_us, median, samples, ...); there are {', '.join(names)}"
        )
    raise FileError(f"{path}: several columns may be latencies: {', '.join(numeric)}; choose with --column")


def _unit(name: str) -> float:
    """The factor to microseconds that a column's name gives; 1 without one."""
    found = re.search(r"(?:^|[_ (\[])(ns|us|µs|ms|s|sec|seconds)[)\]]?$", name.lower())
    return UNITS[{"µs": "us", "sec": "s", "seconds": "s"}.get(found[1], found[1])] if found else 1.0


def _known(row: Row, key: Mapping[str, str], *names: str) -> Any:
    return next((row[key[n]] for n in names if n in key and key[n] in row), None)


def _is_number(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_is_number(v) for v in value)
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):  # OverflowError: a whole number of hundreds of digits
        return False


def _number(path: Path, value: Any, what: str) -> float:
    if not _is_number(value) or isinstance(value, list):
        raise FileError(f"{path}: {what}: must be a number, got {str(value)[:40]!r}")
    return float(value)


def _whole(path: Path, row: Row, name: str) -> int:
    value = row.get(name)
    if not _is_number(value) or isinstance(value, list) or float(value) != int(float(value)) or float(value) < 1:  # type: ignore[arg-type]
        raise FileError(f"{path}:{row['line']}: {name} must be a whole number of at least 1, got {str(value)[:40]!r}")
    return int(float(value))  # type: ignore[arg-type]


def _numbers(path: Path, row: Row, name: str) -> list[float]:
    """The latencies of a row: one, a list of samples, or none where the cell is empty or no number."""
    value = row.get(name)
    if isinstance(value, str) and re.search(r"[;|]", value):
        value = [v for v in re.split(r"[;|]\s*", value) if v]
    values = value if isinstance(value, list) else [value]
    if value in (None, "", []) or str(value).lower() in ("nan", "inf", "-", "n/a", "none", "null"):
        return []
    out = [_number(path, v, f"{row['line']}: {name}") for v in values]
    if any(v <= 0 for v in out):
        raise FileError(f"{path}:{row['line']}: {name} must be above 0, got {min(out)}")
    if min(out) < SHORTEST or max(out) > LONGEST:
        raise FileError(f"{path}:{row['line']}: {name} is no latency: {min(out):g} to {max(out):g}")
    return out


def _interval(path: Path, row: Row, key: Mapping[str, str], middle: float) -> tuple[float, float] | None:
    """Low and high, or the median with its half-width `spread`, in the unit of the latency."""
    low, high, spread = (
        _known(row, key, *names) for names in (("low", "latency_low"), ("high", "latency_high"), ("spread", "ci"))
    )
    if low not in (None, "") and high not in (None, ""):
        ends = _number(path, low, f"{row['line']}: low"), _number(path, high, f"{row['line']}: high")
        if not 0 < ends[0] <= middle <= ends[1]:
            raise FileError(
                f"{path}:{row['line']}: low <= latency <= high does not hold: {ends[0]}, {middle}, {ends[1]}"
            )
        return ends
    if spread in (None, ""):
        return None
    half = _number(path, spread, f"{row['line']}: spread")
    if not 0 <= half < middle:
        raise FileError(f"{path}:{row['line']}: spread must lie between 0 and the latency, got {half}")
    return middle - half, middle + half
