"""What changed, where, and whether it matters.

Each case is compared with its baseline, or with the same case of an earlier record.
"""

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
    """One side of a comparison: a case before or after."""

    name: str
    """The release, or the name of the baseline."""
    map: KnownMap | None = None
    """The granularity map as it is compared."""
    predicted: dict[str, Any] | None = None
    """The terms of both predictors, by predictor."""
    boundary: KnownBoundary | None = None
    """The boundary as it is compared. None where there is none, or where the curve is not to be trusted."""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """(N, latency) of each point, latency in microseconds."""

    @property
    def tiles(self) -> Sequence[Sequence[int]]:
        """[first, last, tile] ranges of the map; empty without a map."""
        return self.map.tiles if self.map is not None else ()

    @property
    def n_max(self) -> int | None:
        """N_max of the curve; None without a boundary."""
        return self.boundary.n_max if self.boundary is not None else None


@dataclass(frozen=True, slots=True)
class Pair:
    """A case beside its earlier state, and what differs."""

    run: int
    """Index of the record that the case belongs to."""
    case: CaseRecord
    """The case as it is now."""
    before: Side | None
    """The earlier state; None where there is nothing to compare with."""
    after: Side
    """The present state."""
    tiles: tuple[tuple[int, int, int, int], ...] = ()
    """(first, last, before, after) ranges of row counts in which the tile differs."""
    kernel: tuple[str, str] | None = None
    """The map's kernel before and after, where it changed."""
    n_max: tuple[tuple[str, int, int], ...] = ()
    """(kind or predictor, before, after) of every N_max that moved."""
    unknown: str = ""
    """Why it can't be told whether the same kernel runs."""
    undecided: str = ""
    """Why it can't be told whether the curve's N_max moved."""

    @property
    def is_changed(self) -> bool:
        """Whether tiles, kernel or an N_max differ. True also where it can't be told whether the kernel differs."""
        return bool(self.tiles or self.kernel or self.n_max or self.unknown)


def _pair(run: int, case: CaseRecord, before: Side | None, record: Record) -> Pair:
    after = side_of(case, record.tolerance)
    if before is None:
        return Pair(run, case, None, after)
    maps = _compared(before.map, after.map)
    moved: list[tuple[str, int, int]] = []
    undecided = ""
    if before.boundary is not None and after.boundary is not None:
        boundaries = compare_boundaries(
            before.boundary, after.boundary, case.baseline_positions or 1, record.match_tolerance
        )
        undecided = boundaries.why
        if boundaries.answer == "moved":
            moved.append((after.boundary.kind, before.boundary.n_max, after.boundary.n_max))
    for name in sorted(moved_predictions(before.predicted, after.predicted), key=PREDICTORS.index):
        assert before.predicted is not None and after.predicted is not None
        moved.append((name.replace("_", " "), before.predicted[name]["n_max"], after.predicted[name]["n_max"]))
    return Pair(run, case, before, after, maps.tiles, maps.kernel, tuple(moved), maps.unknown, undecided)


@lru_cache(maxsize=4096)
def _compared(before: KnownMap | None, after: KnownMap | None) -> ComparedMaps:
    """Two maps compared. Cached, as many cases share a map. Where a side has no map, no difference is reported."""
    return compare_maps(before, after) if before is not None and after is not None else ComparedMaps()


@dataclass(frozen=True, slots=True)
class Change:
    """One change that several cases share."""

    where: str
    """GPU, releases, subject and module."""
    what: str
    """What changed of tiles and kernel."""
    effect: str
    """What the change does to N_max."""
    matters: bool
    """Whether an N_max moves, the kernel changes, or it can't be told whether the kernel changes."""
    cases: tuple[str, ...]
    """Ids of the cases."""


def side_of(case: CaseRecord, tolerance: float) -> Side:
    """A case as one side of a comparison. tolerance: the epsilon of its record."""
    boundary = known_boundary(case, tolerance) if is_trusted(case) else None
    return Side(case.backend, known_map(case), case.predicted, boundary, case.curve)


def _baseline_of(case: CaseRecord) -> Side | None:
    held = case.baseline
    if held is None:
        return None
    # The curve of another release is only shown here. The verdict alone holds a case to it.
    return Side(held.name, held.known_map(), held.predicted, held.known_boundary(), held.curve)


def pairs(runs: Sequence[Record], against: Record | None = None) -> list[Pair]:
    """Every case of the records, paired with the same case of `against`. Without `against`: with its baseline."""
    by_key: dict[str, list[CaseRecord]] = defaultdict(list)
    for c in sorted(against.cases, key=release_order) if against is not None else ():
        by_key[key_of(c)].append(c)
    case_pairs = []
    for run, record in enumerate(runs):
        for case in record.cases:
            if against is None:
                before = _baseline_of(case)
            else:
                earlier = _same_case(case, by_key)
                before = side_of(earlier, against.tolerance) if earlier is not None else None
            case_pairs.append(_pair(run, case, before, record))
    return case_pairs


def _same_case(case: CaseRecord, by_key: Mapping[str, Sequence[CaseRecord]]) -> CaseRecord | None:
    """The same case in an earlier record: of this release, else the newest before it, else the oldest after it."""
    same = by_key.get(key_of(case), ())
    release = release_order(case)
    before = [c for c in same if release_order(c) <= release]
    return before[-1] if before else next(iter(same), None)


def release_order(case: CaseRecord) -> tuple[Any, ...]:
    """A key that sorts cases by release. A release that is no version comes first, sorted by its text."""
    release = case.backend.partition("==")[2]
    try:
        return (1, Version(release))
    except InvalidVersion:
        return (0, release)


def changes(found: Sequence[Pair]) -> list[Change]:
    """The changes of all pairs. Cases with equal changes are merged into one; changes that matter come first."""
    groups: dict[tuple[Any, ...], list[Pair]] = defaultdict(list)
    for p in found:
        if p.before is not None and p.is_changed:
            c = p.case
            own_workload = () if p.tiles or p.kernel or p.unknown else (c.workload,)
            groups[
                c.gpu, p.before.name, c.backend, c.subject, c.module, p.tiles, p.kernel, p.unknown, own_workload
            ].append(p)
    merged = []
    for (gpu, before, backend, subject, module, tiles, kernel, unknown, _), members in groups.items():
        differences = []
        if unknown:
            differences.append(f"granularity is undecided: {unknown}")
        if kernel:
            differences.append(f"kernel {kernel[0]} to {kernel[1]}")
        if tiles:
            differences.append(tiles_in_words(tiles, members[0].after.tiles[-1][1]))
        effects = {(p.case.workload, *m) for p in members for m in p.n_max}
        where = f"{gpu}: {before.removeprefix('the baseline of ')} to {backend}, {subject} {module}"
        if before.removeprefix("the baseline of ") == backend:
            where = f"{gpu}: {backend}, {subject} {module}, against {before}"
        merged.append(
            Change(
                where,
                "; ".join(differences) or "no change of tiles",
                _effect(effects),
                bool(effects or kernel or unknown),
                tuple(p.case.id for p in members),
            )
        )
    return sorted(merged, key=lambda c: not c.matters)


def _effect(moved: set[tuple[str, str, int, int]]) -> str:
    """The largest move of each kind and predictor, and how many other cases moved.

    Such as "N_max 256 to 32 (tile roofline, moe-...)".
    """
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
    """Records as every report format shows them. Control and direction characters in their texts are escaped."""

    runs: list[Record]
    """The records."""
    against: Record | None
    """An earlier record that the cases are compared with; None: they are compared with their baselines."""
    pairs: list[Pair]
    """Every case of the records with its earlier state."""
    changes: list[Change]
    """The changes of the pairs, merged; those that matter come first."""


def view_of(runs: Sequence[Record], against: Record | None = None) -> View:
    """Records as a view. against: an earlier record that their cases are compared with, in place of their baselines."""
    shown_runs = [shown(r) for r in runs]
    shown_against = shown(against) if against is not None else None
    case_pairs = pairs(shown_runs, shown_against)
    return View(shown_runs, shown_against, case_pairs, changes(case_pairs))


def headline(runs: Sequence[Record], found: Sequence[Change]) -> str:
    """The verdict in one sentence."""
    cases = [c for r in runs for c in r.cases]
    counts = {o: sum(c.outcome == o for c in cases) for o in ("FAIL", "INVALID", "PASS", "UNDECIDED")}
    n_matter = sum(c.matters for c in found)
    partial = any(r.partial for r in runs)
    prefix = "Partial, the run was interrupted: " if partial else ""
    if counts["FAIL"]:
        verdict = f"{counts['FAIL']} of {len(cases)} cases fail"
    elif counts["INVALID"]:
        verdict = f"nothing fails, and {counts['INVALID']} of {len(cases)} measurements are not to be trusted"
    elif counts["PASS"] == len(cases) and cases:
        verdict = f"all {len(cases)} cases pass" if len(cases) > 1 else "the one case passes"
    else:
        verdict = f"nothing fails: {counts['PASS']} of {len(cases)} cases pass, the others are open"
    if n_matter:
        verdict += f"; {n_matter} change{'s' if n_matter > 1 else ''} of granularity or N_max matter{'' if n_matter > 1 else 's'}"
    elif found:
        verdict += "; granularity changed where it moves no N_max"
    text = prefix + verdict + "."
    return text[0].upper() + text[1:]


def coverage(view: View) -> str:
    """How many cases were compared; empty where all were."""
    compared = sum(p.before is not None for p in view.pairs)
    counterpart = "the earlier record" if view.against is not None else "a baseline"
    sentences = []
    if not compared:
        sentences.append(
            f"No case has {'its like in ' if view.against is not None else ''}{counterpart}: nothing was compared."
        )
    elif compared < len(view.pairs):
        sentences.append(f"{len(view.pairs) - compared} of {len(view.pairs)} cases are new to {counterpart}.")
    if view.against is not None:
        keys = {key_of(p.case) for p in view.pairs}
        missing = [c.id for c in view.against.cases if key_of(c) not in keys]
        if missing:
            sentences.append(f"{len(missing)} cases of the earlier record are not in this one, such as {missing[0]}.")
    return " ".join(sentences)


def interval_or_nothing(side: Side | None) -> str:
    """`[32, 47]`: the interval of a side's boundary; empty without one."""
    return bracketed(side.boundary.interval) if side is not None and side.boundary is not None else ""
