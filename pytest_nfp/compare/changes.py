"""What changed, on what, and whether it matters: each case beside its baseline, or beside the same case of an earlier record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from packaging.version import InvalidVersion, Version

from pytest_nfp.comparison import (
    ComparedMaps,
    KnownBoundary,
    KnownMap,
    compare_boundaries,
    compare_maps,
    moved_predictions,
)
from pytest_nfp.granularity import tiles_in_words
from pytest_nfp.principle.boundary import bracketed
from pytest_nfp.records import CaseRecord, Record, is_trusted, key_of, known_boundary, known_map
from pytest_nfp.records.shown import shown

PREDICTORS = ("tile_roofline", "principle")


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a case: release, both predictions, the curve, and the map and the boundary as they are compared.

    boundary: None where there is none, or the curve is not to be trusted.
    """

    name: str
    map: KnownMap | None = None
    predicted: dict[str, Any] | None = None
    boundary: KnownBoundary | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)

    @property
    def tiles(self) -> Sequence[Sequence[int]]:
        """[first, last, tile] ranges of the map; empty without one."""
        return self.map.tiles if self.map is not None else ()

    @property
    def n_max(self) -> int | None:
        """N_max of the curve."""
        return self.boundary.n_max if self.boundary is not None else None


@dataclass(frozen=True, slots=True)
class Pair:
    """A case with what it was before; run: which of the records it is of.

    tiles: (first, last, before, after) row counts at which the tile differs. kernel: the map's before and after, where it is
    another. n_max: (kind or predictor, before, after) of every N_max that moved. unknown: why it can't be told whether the same
    kernel runs. undecided: why it can't be told whether the curve's N_max moved.
    """

    run: int
    case: CaseRecord
    before: Side | None
    after: Side
    tiles: tuple[tuple[int, int, int, int], ...] = ()
    kernel: tuple[str, str] | None = None
    n_max: tuple[tuple[str, int, int], ...] = ()
    unknown: str = ""
    undecided: str = ""

    @property
    def is_changed(self) -> bool:
        """Whether tiles, kernel or an N_max differ, or it can't be told whether the kernel does."""
        return bool(self.tiles or self.kernel or self.n_max or self.unknown)


def _pair(run: int, case: CaseRecord, before: Side | None, record: Record) -> Pair:
    after = side_of(case, record.tolerance)
    if before is None:
        return Pair(run, case, None, after)
    found = _compared(before.map, after.map)
    moved: list[tuple[str, int, int]] = []
    undecided = ""
    if before.boundary is not None and after.boundary is not None:
        compared = compare_boundaries(
            before.boundary, after.boundary, case.baseline_positions or 1, record.match_tolerance
        )
        undecided = compared.why
        if compared.answer == "moved":
            moved.append((after.boundary.kind, before.boundary.n_max, after.boundary.n_max))
    for name in sorted(moved_predictions(before.predicted, after.predicted), key=PREDICTORS.index):
        assert before.predicted is not None and after.predicted is not None
        moved.append((name.replace("_", " "), before.predicted[name]["n_max"], after.predicted[name]["n_max"]))
    return Pair(run, case, before, after, found.tiles, found.kernel, tuple(moved), found.unknown, undecided)


@lru_cache(maxsize=4096)
def _compared(before: KnownMap | None, after: KnownMap | None) -> ComparedMaps:
    """Many cases share a map. What has none differs in nothing that can be told."""
    return compare_maps(before, after) if before is not None and after is not None else ComparedMaps()


@dataclass(frozen=True, slots=True)
class Change:
    """The same change of several cases: where, what, and what it does to N_max; `matters` where that moves, or the kernel does."""

    where: str
    what: str
    effect: str
    matters: bool
    cases: tuple[str, ...]


def side_of(case: CaseRecord, tolerance: float) -> Side:
    """A case as one side. tolerance: the epsilon of its record."""
    boundary = known_boundary(case, tolerance) if is_trusted(case) else None
    return Side(case.backend, known_map(case), case.predicted, boundary, case.curve)


def _baseline_of(case: CaseRecord) -> Side | None:
    h = case.baseline
    if h is None:
        return None
    # A curve of another release is what this one may differ by: it is shown, and the judge alone holds it to anything.
    return Side(h.name, h.known_map(), h.predicted, h.known_boundary(), h.curve)


def pairs(runs: Sequence[Record], against: Record | None = None) -> list[Pair]:
    """Every case of the records beside the same case of `against`, else beside its baseline."""
    by_key: dict[str, list[CaseRecord]] = defaultdict(list)
    for c in sorted(against.cases, key=release_order) if against is not None else ():
        by_key[key_of(c)].append(c)
    found = []
    for run, record in enumerate(runs):
        for case in record.cases:
            if against is None:
                before = _baseline_of(case)
            else:
                was = _same_case(case, by_key)
                before = side_of(was, against.tolerance) if was is not None else None
            found.append(_pair(run, case, before, record))
    return found


def _same_case(case: CaseRecord, by_key: Mapping[str, Sequence[CaseRecord]]) -> CaseRecord | None:
    """The case of an earlier record: of the same release, else of the newest release before it, else of the oldest after it."""
    same = by_key.get(key_of(case), ())
    release = release_order(case)
    before = [c for c in same if release_order(c) <= release]
    return before[-1] if before else next(iter(same), None)


def release_order(case: CaseRecord) -> tuple[Any, ...]:
    """Sorts cases by release; what is no version comes first, by its text."""
    release = case.backend.partition("==")[2]
    try:
        return (1, Version(release))
    except InvalidVersion:
        return (0, release)


def changes(found: Sequence[Pair]) -> list[Change]:
    """What changed, once for all cases that say the same; what matters first."""
    groups: dict[tuple[Any, ...], list[Pair]] = defaultdict(list)
    for p in found:
        if p.before is not None and p.is_changed:
            c = p.case
            own = () if p.tiles or p.kernel or p.unknown else (c.workload,)
            groups[c.gpu, p.before.name, c.backend, c.subject, c.module, p.tiles, p.kernel, p.unknown, own].append(p)
    out = []
    for (gpu, before, backend, subject, module, tiles, kernel, unknown, _), members in groups.items():
        what = []
        if unknown:
            what.append(f"granularity is undecided: {unknown}")
        if kernel:
            what.append(f"kernel {kernel[0]} to {kernel[1]}")
        if tiles:
            what.append(tiles_in_words(tiles, members[0].after.tiles[-1][1]))
        effects = {(p.case.workload, *m) for p in members for m in p.n_max}
        where = f"{gpu}: {before.removeprefix('the baseline of ')} to {backend}, {subject} {module}"
        if before.removeprefix("the baseline of ") == backend:
            where = f"{gpu}: {backend}, {subject} {module}, against {before}"
        out.append(
            Change(
                where,
                "; ".join(what) or "no change of tiles",
                _effect(effects),
                bool(effects or kernel or unknown),
                tuple(p.case.id for p in members),
            )
        )
    return sorted(out, key=lambda c: not c.matters)


def _effect(moved: set[tuple[str, str, int, int]]) -> str:
    """The largest move of every predictor and kind, and of how many cases: "N_max 256 to 32 (tile roofline, moe-...)"."""
    if not moved:
        return "no N_max moves"
    parts = []
    kinds = [m[1] for m in sorted(moved)]
    predictors = [p.replace("_", " ") for p in PREDICTORS]
    for kind in dict.fromkeys((*(k for k in kinds if k not in predictors), *predictors)):
        of_kind = [m for m in moved if m[1] == kind]
        if not of_kind:
            continue
        workload, _, old, new = max(of_kind, key=lambda m: (max(m[2], m[3]) / min(m[2], m[3]), m[0]))
        others = f", and {len(of_kind) - 1} more" if len(of_kind) > 1 else ""
        parts.append(f"N_max {old} to {new} ({kind}, {workload}{others})")
    return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class View:
    """Records made ready to be shown, once for every format: with nothing in them that steers a reader, beside what was before."""

    runs: list[Record]
    against: Record | None
    pairs: list[Pair]
    changes: list[Change]


def view_of(runs: Sequence[Record], against: Record | None = None) -> View:
    """against: an earlier record that their cases stand beside, in place of their baselines."""
    clean = [shown(r) for r in runs]
    old = shown(against) if against is not None else None
    found = pairs(clean, old)
    return View(clean, old, found, changes(found))


def headline(runs: Sequence[Record], found: Sequence[Change]) -> str:
    """The verdict in one sentence."""
    cases = [c for r in runs for c in r.cases]
    counts = {o: sum(c.outcome == o for c in cases) for o in ("FAIL", "INVALID", "PASS", "UNDECIDED")}
    matter = sum(c.matters for c in found)
    partial = any(r.partial for r in runs)
    begun = "Partial, the run was interrupted: " if partial else ""
    if counts["FAIL"]:
        said = f"{counts['FAIL']} of {len(cases)} cases fail"
    elif counts["INVALID"]:
        said = f"nothing fails, and {counts['INVALID']} of {len(cases)} measurements are not to be trusted"
    elif counts["PASS"] == len(cases) and cases:
        said = f"all {len(cases)} cases pass" if len(cases) > 1 else "the one case passes"
    else:
        said = f"nothing fails: {counts['PASS']} of {len(cases)} cases pass, the others are open"
    if matter:
        said += (
            f"; {matter} change{'s' if matter > 1 else ''} of granularity or N_max matter{'' if matter > 1 else 's'}"
        )
    elif found:
        said += "; granularity changed where it moves no N_max"
    text = begun + said + "."
    return text[0].upper() + text[1:]


def coverage(view: View) -> str:
    """How much was compared, where that is not everything."""
    compared = sum(p.before is not None for p in view.pairs)
    name = "the earlier record" if view.against is not None else "a baseline"
    said = []
    if not compared:
        said.append(f"No case has {'its like in ' if view.against is not None else ''}{name}: nothing was compared.")
    elif compared < len(view.pairs):
        said.append(f"{len(view.pairs) - compared} of {len(view.pairs)} cases are new to {name}.")
    if view.against is not None:
        now = {key_of(p.case) for p in view.pairs}
        gone = [c.id for c in view.against.cases if key_of(c) not in now]
        if gone:
            said.append(f"{len(gone)} cases of the earlier record are not in this one, such as {gone[0]}.")
    return " ".join(said)


def interval_or_nothing(side: Side | None) -> str:
    """`[32, 47]` of a side with a boundary."""
    return bracketed(side.boundary.interval) if side is not None and side.boundary is not None else ""
