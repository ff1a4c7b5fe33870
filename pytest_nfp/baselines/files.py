"""Stored baselines: one YAML file per GPU, backend release and subject. Read, looked up, compared, written."""

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
    """A granularity map: kernel, where the rule came from, [first, last, tile] ranges.

    parameters: a digest of what the rule sets beside the tile (BLOCK_SIZE_N, warps, stages, ...), where it sets any. choice: a
    digest of the code that chooses the kernel, where the kernel is unknown.
    """

    kernel: str
    source: str
    parameters: str | None = None
    choice: str | None = None
    tiles: list[tuple[Whole, Whole, Whole]]

    def known(self) -> KnownMap:
        """As it is compared."""
        return KnownMap(self.kernel, tuple(self.tiles), self.choice)


class Term(_Strict):
    """One predictor's answer; interval: of an N_max from a calibrated curve. bound: of the principle, where it lies below N0."""

    n_max: Whole
    limiting: str
    interval: tuple[Whole, Whole | None] | None = None
    bound: Whole | None = None


class PredictedTerms(_Strict):
    """Both predictors' answers; the principle has none under drawn or replayed routing."""

    principle: Term | None = None
    tile_roofline: Term

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """As `Predicted.as_dict` gives it."""
        return self.model_dump(mode="json", exclude_none=True)


class Measured(_Strict):
    """A boundary that was measured or recorded, and whether the prediction describes it (`because`: why not).

    timer: the clock of a measured one. runs: [N_max, T(N0)] of each run that was made for it: a machine with several
    states shows in their spread.
    """

    kind: Literal["measured", "recorded"]
    n_max: Whole
    interval: tuple[Whole, Whole | None]
    n_first_exit: Whole
    prediction: Literal["agrees", "deviates"]
    because: str | None = None
    source: str
    kernel: str
    timer: str = ""
    runs: list[tuple[Whole, Annotated[float, Field(gt=0)]]] = []
    curve: list[tuple[Whole, Annotated[float, Field(gt=0)]]]

    def known(self) -> KnownBoundary:
        """As it is compared."""
        return KnownBoundary(self.n_max, self.interval, self.kind, self.timer, tuple(n for n, _ in self.curve))


class CaseBaseline(_Strict):
    """What is stored of one case."""

    baseline_positions: Whole
    predicted: PredictedTerms | None = None
    measured: Measured | None = None


class BaselineFile(_Strict):
    """One file."""

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
    """The file of exactly this release, or None. Raises FileError for one that can't be used."""
    path = path_of(folder, gpu, backend, subject)
    return read_yaml(path, BaselineFile) if path.exists() else None


def load_nearest(folder: Path, gpu: str, backend: Backend, subject: str) -> tuple[BaselineFile, Backend] | None:
    """The file of this release, else of the newest release before it, else of the oldest after it."""
    stored = [b for b in stored_backends(folder, gpu) if b.framework == backend.framework]
    stored = [b for b in stored if path_of(folder, gpu, b, subject).exists()]
    if not stored:
        return None
    before = [b for b in stored if Version(b.release or "0") <= Version(backend.release or "0")]
    chosen = before[-1] if before else stored[0]
    found = load(folder, gpu, chosen, subject)
    return None if found is None else (found, chosen)


def stored_backends(folder: Path, gpu: str) -> list[Backend]:
    """The releases that a GPU has baselines for, by framework and version."""
    found = []
    for path in (folder / gpu).glob("*/"):
        framework, _, release = path.name.rpartition("-")
        if any(path.glob("*.yaml")):
            found.append(Backend(framework, release) if framework else Backend(release, ""))
    return sorted(found, key=lambda b: (b.framework, Version(b.release or "0")))


def _folder_name(backend: Backend) -> str:
    return f"{backend.framework}-{backend.release}" if backend.release else backend.framework


def stored_subjects(folder: Path, gpu: str, backend: Backend) -> list[str]:
    """The subjects with a file for this release."""
    return sorted(p.stem for p in (folder / gpu / _folder_name(backend)).glob("*.yaml"))


def tiles_of(granularity: Granularity) -> Tiles:
    """A map as it is stored."""
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
    """A boundary as it is stored: latencies to a hundredth of a microsecond. runs: (N_max, T(N0)) of every run."""
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
    """Stable text: fields in the schema's order, maps and cases sorted, nothing that changes without a cause."""
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
    """What changes from one file to another, in meaning: "moe-bf16: tile 16 to 32 rows from M=33", "...: n_max 256 to 32"."""
    said = []
    was_tiles, was_cases = (old.granularity, old.cases) if old is not None else ({}, {})
    for key in sorted({*was_tiles, *new.granularity}):
        before, after = was_tiles.get(key), new.granularity.get(key)
        if before is None or after is None:
            said.append(f"{key}: {'new' if before is None else 'removed'}{f', {_tiles(after)}' if after else ''}")
            continue
        found = compare_maps(before.known(), after.known())
        parts = [f"kernel {found.kernel[0]} to {found.kernel[1]}"] if found.kernel else []
        if found.unknown:
            parts.append(f"{found.unknown}: {before.kernel} to {after.kernel}")
        if found.tiles:
            parts.append(f"tile {tiles_in_words(found.tiles, after.tiles[-1][1])}")
        elif before.tiles[-1][1] != after.tiles[-1][1]:
            parts.append(f"the map ends at {before.tiles[-1][1]}, then at {after.tiles[-1][1]}")
        parts += [f"source {before.source} to {after.source}"] if before.source != after.source else []
        parts += ["other parameters of the tiles"] if before.parameters != after.parameters else []
        said += [f"{key}: {', '.join(parts)}"] if parts else []
    for key in sorted({*was_cases, *new.cases}, key=_natural):
        parts = _case_difference(was_cases.get(key), new.cases.get(key))
        said += [f"{key}: {', '.join(parts)}"] if parts else []
    return said


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
    """An empty file."""
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
    """b2 before b10: runs of digits sort as numbers."""
    import re

    return [(0, int(p)) if p.isdigit() else (1, p) for p in re.split(r"(\d+)", key) if p]
