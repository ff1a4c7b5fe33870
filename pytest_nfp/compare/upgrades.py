"""What an upgrade changes: the maps of two releases side by side, and the effect on N_max by both predictors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from pytest_nfp import frameworks
from pytest_nfp.cases import Backend, Case, Module, expand
from pytest_nfp.catalog import Gpu, Model, UnknownName
from pytest_nfp.comparison import ComparedMaps, compare_maps, known_map, moved_predictions
from pytest_nfp.granularity import Granularity, RuleUnknown, changed_parameters, query_of, read_many
from pytest_nfp.predict import Predicted, calibrations, predict_case


@dataclass(frozen=True, slots=True)
class Side:
    """One release's answer to one case: a map with both predictions, or why the map is unknown."""

    granularity: Granularity | None
    """The map; None where it is unknown."""
    predicted: Predicted | None
    """Both predictions; None where the map is unknown."""
    unknown: str = ""
    """Why the map is unknown."""


@dataclass(frozen=True)
class Change:
    """One case before and after."""

    case: Case
    """The case before."""
    before: Side
    """The answer before."""
    after: Side
    """The answer after."""
    after_case: Case | None = None
    """The case after: another release, or another parallelism. None where it is `case`."""

    @property
    def rank(self) -> tuple[str, str] | None:
        """The shape on one rank before and after, where it differs: "128 experts of 2048 x 96"."""
        if self.after_case is None:
            return None
        shapes = _rank_in_words(self.case), _rank_in_words(self.after_case)
        return shapes if shapes[0] != shapes[1] else None

    @property
    def unknown(self) -> str:
        """Why it can't be told what changed: a side has no map, or a kernel is unknown. "" where it can be told."""
        sides = [
            f"{when}: {side.unknown}" for side, when in ((self.before, "before"), (self.after, "now")) if side.unknown
        ]
        return "; ".join(sides) or self._maps.unknown

    @cached_property
    def _maps(self) -> ComparedMaps:
        if self.before.granularity is None or self.after.granularity is None:
            return ComparedMaps()
        return compare_maps(known_map(self.before.granularity), known_map(self.after.granularity))

    @property
    def tiles(self) -> list[tuple[int, int, int, int]]:
        """(first, last, before, after) of each range whose tile differs."""
        return list(self._maps.tiles)

    @property
    def parameters(self) -> list[tuple[int, int, str, str]]:
        """(first, last, before, after) where only other tile parameters differ. Granularity does not change there."""
        if self.before.granularity is None or self.after.granularity is None:
            return []
        return changed_parameters(self.before.granularity, self.after.granularity)

    @property
    def kernel(self) -> tuple[str, str] | None:
        """The kernel before and after, where it changed."""
        return self._maps.kernel

    @property
    def sources(self) -> tuple[str, str]:
        """The source of the tiles (tuned file or default rule) before and after; empty where the map is unknown."""
        return _sources(self.before.granularity), _sources(self.after.granularity)

    @property
    def is_changed(self) -> bool:
        """Whether tiles, kernel, shape on a rank or source differ. A case that is unknown does not count as changed."""
        if self.unknown:
            return False
        return (
            bool(self.tiles) or self.kernel is not None or self.rank is not None or self.sources[0] != self.sources[1]
        )

    @property
    def moves_boundary(self) -> bool:
        """Whether the change moves a predicted N_max or the kernel."""
        if self.kernel is not None:
            return True
        before, after = (s.predicted.as_dict() if s.predicted else None for s in (self.before, self.after))
        return bool(moved_predictions(before, after))

    def terms(self, predictor: str) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The terms of `principle` or `tile_roofline` before and after; None where unknown."""
        before, after = (s.predicted.as_dict()[predictor] if s.predicted else None for s in (self.before, self.after))
        return before, after

    def n_max(self, predictor: str) -> tuple[int | None, int | None]:
        """N_max before and after by `principle` or `tile_roofline`; None where unknown."""
        before, after = self.terms(predictor)
        return before["n_max"] if before else None, after["n_max"] if after else None


def _rank_in_words(case: Case) -> str:
    moe, attention = case.subject.moe, case.subject.attention
    if case.module == "moe" and moe is not None:
        return f"{moe.local_experts} experts of {case.subject.hidden} x {moe.width}"
    assert attention is not None
    return f"{attention.heads} heads, {attention.kv_heads} KV heads"


def _sources(granularity: Granularity | None) -> str:
    return "" if granularity is None else ", ".join(dict.fromkeys(r.source for r in granularity.ranges))


def rule_module(framework: str) -> Module:
    """The module whose tile rule a framework's releases publish. Raises UnknownName for a framework without a rule."""
    known = frameworks.with_rule()
    if framework not in known:
        raise UnknownName(f"{framework} has no granularity rule; there are {', '.join(known)}")
    return cast(Module, known[framework])


def default_cases(backend: Backend, gpus: Sequence[Gpu], models: Sequence[Model], dtype: str) -> list[Case]:
    """One case for each GPU and model.

    Experts: balanced routing at the model's k. Attention: the longest context of the model's grid.
    """
    module = rule_module(backend.framework)
    cases = []
    for gpu in gpus:
        for model in models:
            module_cases = list(expand(gpu.name, backend, module, model))
            if model.device == "cpu" or not module_cases:
                continue
            case = (
                module_cases[-1] if module == "attention" else next(c for c in module_cases if c.routing == "balanced")
            )
            if module == "moe" and model.moe is not None:
                case = replace(case, top_k=model.moe.top_k)
            cases.append(replace(case, dtype=dtype))
    return cases


def answer(cases: Sequence[Case], archives: Path | None = None) -> list[Side]:
    """The answer to each case, in order. Equal queries are read once."""
    queries = [query_of(case) for case in cases]
    maps = dict(zip(dict.fromkeys(queries), read_many(list(dict.fromkeys(queries)), archives), strict=True))
    sides = []
    for case, query in zip(cases, queries, strict=True):
        granularity = maps[query]
        if isinstance(granularity, RuleUnknown):
            sides.append(Side(None, None, str(granularity)))
            continue
        figures = calibrations.figures_of(case, granularity)
        sides.append(Side(granularity, predict_case(case, figures, granularity)))
    return sides


def diff(before: Sequence[Case], after: Sequence[Case], archives: Path | None = None) -> list[Change]:
    """The change of each pair of cases. The two cases of a pair differ by release or parallelism."""
    answers = answer([*before, *after], archives)
    sides = zip(before, answers[: len(before)], answers[len(before) :], after, strict=True)
    return [Change(old, a, b, new) for old, a, b, new in sides]


@dataclass(frozen=True, slots=True)
class Bisected:
    """Every change within a range of releases."""

    changes: list[Change]
    """One change for each release that differs from the one before it, in order."""
    read: int
    """How many releases were read."""
    unknown: list[tuple[str, str]]
    """(release, reason) of each release that could not be compared."""


def bisect(
    releases: Sequence[str], case: Case, archives: Path | None = None, say: Callable[[str], None] = lambda text: None
) -> Bisected:
    """Each release whose map differs from the one before it, in order. say: is told each release before it is read.

    Every release is read. Halving would miss a change that was taken back, as both ends of the range are then equal.
    A release whose map is unknown is listed, and its neighbours are compared with each other.
    """
    cases = [replace(case, backend=replace(case.backend, release=release)) for release in releases]
    changes, unknown = [], []
    previous: tuple[Case, Side] | None = None
    for release, current in zip(releases, cases, strict=True):
        say(release)
        side = answer([current], archives)[0]
        if side.granularity is None:
            unknown.append((release, side.unknown))
            continue
        if previous is not None:
            change = Change(previous[0], previous[1], side, current)
            if change.unknown:
                unknown.append((release, change.unknown))
            elif change.is_changed:
                changes.append(change)
        previous = current, side
    return Bisected(changes, len(releases), unknown)


def merge_equal(changes: Iterable[Change]) -> list[tuple[Change, list[str]]]:
    """Equal changes of one subject merged into one, each with the GPUs that share it."""
    groups: dict[Any, tuple[Change, list[str]]] = {}
    for c in changes:
        key = (
            tuple(c.tiles),
            c.kernel,
            c.rank,
            c.sources,
            tuple(c.parameters),
            c.n_max("principle"),
            c.n_max("tile_roofline"),
            c.unknown,
            c.case.subject.name,
        )
        groups.setdefault(key, (c, []))[1].append(c.case.gpu)
    return list(groups.values())
