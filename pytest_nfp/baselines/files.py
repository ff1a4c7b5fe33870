"""Stored baselines, one YAML file for each GPU, backend release and subject: read, look up, compare, write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field

from pytest_nfp import __version__
from pytest_nfp.cases import Backend
from pytest_nfp.comparison import KnownBoundary, KnownMap, compare_maps
from pytest_nfp.curves.curve import Curve
from pytest_nfp.files import read_yaml, write_atomically
from pytest_nfp.granularity import Granularity, tiles_in_words
from pytest_nfp.principle import Boundary

Whole = Annotated[int, Field(gt=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Tiles(_Strict):
    """A granularity map."""

    kernel: str
    """The kernel that the map is of."""
    source: str
    """Where the rule came from."""
    parameters: str | None = None
    """A digest of what the rule sets beside the tile (BLOCK_SIZE_N, warps, stages, ...), where it sets any."""
    choice: str | None = None
    """A digest of the code that chooses the kernel, where the kernel is unknown."""
    tiles: list[tuple[Whole, Whole, Whole]]
    """[first, last, tile] ranges of row counts."""

    def known(self) -> KnownMap:
        """The map as it is compared."""
        return KnownMap(self.kernel, tuple(self.tiles), self.choice)


class Term(_Strict):
    """One predictor's answer."""

    n_max: Whole
    """The predicted N_max."""
    limiting: str
    """The module that limits it."""
    interval: tuple[Whole, Whole | None] | None = None
    """The interval of an N_max that comes from a calibrated curve."""
    bound: Whole | None = None
    """The bound of the principle, where it lies below N0."""


class PredictedTerms(_Strict):
    """Both predictors' answers. The principle has none under drawn or replayed routing."""

    principle: Term | None = None
    tile_roofline: Term

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """The answers in the form of `Predicted.as_dict`."""
        return self.model_dump(mode="json", exclude_none=True)


class Measured(_Strict):
    """A boundary that was measured or recorded."""

    kind: Literal["measured", "recorded"]
    """Where the curve comes from."""
    n_max: Whole
    """N_max of the curve."""
    interval: tuple[Whole, Whole | None]
    """The interval of N_max; an end of None is open."""
    n_first_exit: Whole
    """The last N before the first point outside the tolerance."""
    prediction: Literal["agrees", "deviates"]
    """Whether the prediction describes the boundary."""
    because: str | None = None
    """Why the prediction deviates."""
    source: str
    """The source of the curve."""
    kernel: str
    """The kernel that ran."""
    timer: str = ""
    """The clock of a measured boundary."""
    runs: list[tuple[Whole, Annotated[float, Field(gt=0)]]] = []
    """[N_max, T(N0)] of each run that was made for it. A machine with several states shows in their spread."""
    curve: list[tuple[Whole, Annotated[float, Field(gt=0)]]]
    """[N, T(N)] of each point, in microseconds."""

    def known(self) -> KnownBoundary:
        """The boundary as it is compared."""
        return KnownBoundary(self.n_max, self.interval, self.kind, self.timer, tuple(n for n, _ in self.curve))


class CaseBaseline(_Strict):
    """The stored entry of one case."""

    baseline_positions: Whole
    predicted: PredictedTerms | None = None
    measured: Measured | None = None


class BaselineFile(_Strict):
    """The content of one baseline file."""

    schema_: Literal[1] = Field(alias="schema")
    gpu: str
    backend: str
    subject: str
    granularity: dict[str, Tiles] = {}
    cases: dict[str, CaseBaseline] = {}
    provenance: dict[str, str] = {}


def path_of(folder: Path, gpu: str, backend: Backend, subject: str) -> Path:
    """<folder>/<gpu>/<framework>-<release>/<subject>.yaml."""
    return folder / gpu / _folder_name(backend) / f"{subject}.yaml"


def load(folder: Path, gpu: str, backend: Backend, subject: str) -> BaselineFile | None:
    """The file of exactly this release, or None. Raises FileError for a file that can't be used."""
    path = path_of(folder, gpu, backend, subject)
    return read_yaml(path, BaselineFile) if path.exists() else None


def load_nearest(folder: Path, gpu: str, backend: Backend, subject: str) -> tuple[BaselineFile, Backend] | None:
    """The file of this release or the newest before it, else of the oldest release after it, with its release."""
    stored = [b for b in stored_backends(folder, gpu) if b.framework == backend.framework]
    stored = [b for b in stored if path_of(folder, gpu, b, subject).exists()]
    if not stored:
        return None
    before = [b for b in stored if Version(b.release or "0") <= Version(backend.release or "0")]
    chosen = before[-1] if before else stored[0]
    file = load(folder, gpu, chosen, subject)
    return None if file is None else (file, chosen)


def stored_backends(folder: Path, gpu: str) -> list[Backend]:
    """The releases with baselines for a GPU, sorted by framework and version."""
    backends = []
    for path in (folder / gpu).glob("*/"):
        framework, _, release = path.name.rpartition("-")
        if any(path.glob("*.yaml")):
            backends.append(Backend(framework, release) if framework else Backend(release, ""))
    return sorted(backends, key=lambda b: (b.framework, Version(b.release or "0")))


def _folder_name(backend: Backend) -> str:
    return f"{backend.framework}-{backend.release}" if backend.release else backend.framework


def stored_subjects(folder: Path, gpu: str, backend: Backend) -> list[str]:
    """The subjects with a file for this release."""
    return sorted(p.stem for p in (folder / gpu / _folder_name(backend)).glob("*.yaml"))


def tiles_of(granularity: Granularity) -> Tiles:
    """A map in its stored form."""
    sources = list(dict.fromkeys(r.source for r in granularity.ranges))
    return Tiles(
        kernel=granularity.kernel,
        source=", ".join(sources),
        parameters=granularity.parameters_digest,
        choice=granularity.choice_digest,
        tiles=[(a, b, t) for a, b, t in granularity.tiles()],
    )


def measured_of(
    curve: Curve, boundary: Boundary, agrees: bool, because: str, runs: Sequence[tuple[int, float]] = ()
) -> Measured:
    """A boundary in its stored form, latencies rounded to 0.01 microseconds. runs: (N_max, T(N0)) of every run."""
    return Measured(
        kind="recorded" if curve.kind == "recorded" else "measured",
        n_max=boundary.n_max,
        interval=boundary.n_max_interval,
        n_first_exit=boundary.n_first_exit,
        prediction="agrees" if agrees else "deviates",
        because=None if agrees else because,
        source=curve.source,
        kernel=curve.kernel,
        timer=curve.timer,
        runs=[(n, round(t, 2)) for n, t in runs],
        curve=[(p.positions, round(p.latency_us, 2)) for p in curve.points],
    )


def dump(baseline: BaselineFile) -> str:
    """The file as YAML. Equal baselines give equal text: fields in the schema's order, maps and cases sorted."""
    import yaml

    data = baseline.model_dump(mode="json", by_alias=True)
    data["granularity"] = dict(sorted(data["granularity"].items()))
    for tiles in data["granularity"].values():
        for name in ("parameters", "choice"):
            if tiles[name] is None:
                del tiles[name]
    data["cases"] = {k: _without_nothing(v) for k, v in sorted(data["cases"].items(), key=lambda kv: _natural(kv[0]))}
    if not data["granularity"]:
        del data["granularity"]
    text: str = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=140, allow_unicode=True)
    return text


def write(folder: Path, files: Iterable[tuple[Backend, BaselineFile]]) -> list[Path]:
    """Write the files whose text changes; returns their paths."""
    written = []
    for backend, baseline in files:
        path = path_of(folder, baseline.gpu, backend, baseline.subject)
        text = dump(baseline)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text)
            written.append(path)
    return written


def difference(old: BaselineFile | None, new: BaselineFile) -> list[str]:
    """The changes from one file to another, as text such as "moe-bf16: tile 16 to 32 rows from M=33"."""
    lines = []
    was_tiles, was_cases = (old.granularity, old.cases) if old is not None else ({}, {})
    for key in sorted({*was_tiles, *new.granularity}):
        before, after = was_tiles.get(key), new.granularity.get(key)
        if before is None or after is None:
            lines.append(f"{key}: {'new' if before is None else 'removed'}{f', {_tiles(after)}' if after else ''}")
            continue
        maps = compare_maps(before.known(), after.known())
        parts = [f"kernel {maps.kernel[0]} to {maps.kernel[1]}"] if maps.kernel else []
        if maps.unknown:
            parts.append(f"{maps.unknown}: {before.kernel} to {after.kernel}")
        if maps.tiles:
            parts.append(f"tile {tiles_in_words(maps.tiles, after.tiles[-1][1])}")
        elif before.tiles[-1][1] != after.tiles[-1][1]:
            parts.append(f"the map ends at {before.tiles[-1][1]}, then at {after.tiles[-1][1]}")
        parts += [f"source {before.source} to {after.source}"] if before.source != after.source else []
        parts += ["other parameters of the tiles"] if before.parameters != after.parameters else []
        lines += [f"{key}: {', '.join(parts)}"] if parts else []
    for key in sorted({*was_cases, *new.cases}, key=_natural):
        parts = _case_difference(was_cases.get(key), new.cases.get(key))
        lines += [f"{key}: {', '.join(parts)}"] if parts else []
    return lines


def _tiles(tiles: Tiles) -> str:
    return f"{tiles.kernel}, tiles of " + ", ".join(f"{rows} rows from M={first}" for first, _, rows in tiles.tiles)


def _case_difference(old: CaseBaseline | None, new: CaseBaseline | None) -> list[str]:
    if new is None:
        return ["removed"]
    parts = ["new"] if old is None else []
    if old is not None and old.baseline_positions != new.baseline_positions:
        parts.append(f"N0 {old.baseline_positions} to {new.baseline_positions}")
    was, now = (c.measured if c is not None else None for c in (old, new))
    if now is not None and now != was:
        if was is None:
            parts.append(f"n_max {now.n_max} ({now.kind})")
        elif (was.n_max, was.interval) != (now.n_max, now.interval):
            parts.append(f"n_max {was.n_max} to {now.n_max} ({now.kind}), interval {was.interval} to {now.interval}")
        else:
            parts.append(f"n_max {now.n_max} stays, its curve is new")
        if now.prediction == "deviates" and (was is None or was.prediction != "deviates"):
            parts.append(f"deviates from the prediction: {now.because}")
    before, after = (c.predicted.as_dict() if c is not None and c.predicted is not None else {} for c in (old, new))
    for name in ("principle", "tile_roofline"):
        a, b = before.get(name), after.get(name)
        if b is not None and a != b:
            was_n = f"{a['n_max']} to " if a else ""
            parts.append(f"{name.replace('_', ' ')} {was_n}{b['n_max']} {b['limiting']}")
    return parts


def new_file(gpu: str, backend: Backend, subject: str) -> BaselineFile:
    """A baseline file without maps and cases."""
    return BaselineFile(
        schema=1, gpu=gpu, backend=str(backend), subject=subject, provenance={"tool": f"pytest-nfp {__version__}"}
    )


def _without_nothing(case: dict[str, Any]) -> dict[str, Any]:
    if case["predicted"] is not None:
        case["predicted"] = PredictedTerms(**case["predicted"]).as_dict()
    measured = case["measured"]
    if measured is not None:
        for name in ("because", "timer", "runs"):
            if not measured[name]:
                del measured[name]
    return case


def _natural(key: str) -> list[tuple[int, int | str]]:
    """A sort key that compares runs of digits as numbers: b2 comes before b10."""
    import re

    return [(0, int(p)) if p.isdigit() else (1, p) for p in re.split(r"(\d+)", key) if p]
