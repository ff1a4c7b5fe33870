"""What an upgrade changes: maps of two releases side by side, and what that does to N_max by both predictors."""

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
    """One release's answer to one case: a map with both predictions, or the reason why it is unknown."""

    granularity: Granularity | None
    predicted: Predicted | None
    unknown: str = ""


@dataclass(frozen=True)
class Change:
    """One case before and after. `tiles`: (first, last, before, after) where tiles differ.

    after_case: the case after, where more than the release differs.
    """

    case: Case
    before: Side
    after: Side
    after_case: Case | None = None

    @property
    def rank(self) -> tuple[str, str] | None:
        """What one rank holds before and after, where the parallelism changed: "128 experts of 2048 x 96"."""
        if self.after_case is None:
            return None
        shapes = _rank_in_words(self.case), _rank_in_words(self.after_case)
        return shapes if shapes[0] != shapes[1] else None

    @property
    def unknown(self) -> str:
        """Why it can't be told what changed: a side without a map, or a kernel that is unknown; "" where it can."""
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
        """Ranges whose tile differs."""
        return list(self._maps.tiles)

    @property
    def parameters(self) -> list[tuple[int, int, str, str]]:
        """(first, last, before, after) where the tile stays and other tile parameters differ: no change of granularity."""
        if self.before.granularity is None or self.after.granularity is None:
            return []
        return changed_parameters(self.before.granularity, self.after.granularity)

    @property
    def kernel(self) -> tuple[str, str] | None:
        """The kernel before and after, where it changed."""
        return self._maps.kernel

    @property
    def sources(self) -> tuple[str, str]:
        """Tuned file or default rule, before and after; empty where unknown."""
        return _sources(self.before.granularity), _sources(self.after.granularity)

    @property
    def is_changed(self) -> bool:
        """Whether tiles, kernel or source differ. What is unknown is not said to have changed."""
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
        """What `principle` or `tile_roofline` says before and after; None where unknown."""
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
    """The module whose tile rule a framework's releases publish. Raises UnknownName for one that publishes none."""
    known = frameworks.with_rule()
    if framework not in known:
        raise UnknownName(f"{framework} has no granularity rule; there are {', '.join(known)}")
    return cast(Module, known[framework])


def default_cases(backend: Backend, gpus: Sequence[Gpu], models: Sequence[Model], dtype: str) -> list[Case]:
    """One case a GPU and model: balanced routing at the model's k, or the longest context of its grid."""
    module = rule_module(backend.framework)
    cases = []
    for gpu in gpus:
        for model in models:
            found = list(expand(gpu.name, backend, module, model))
            if model.device == "cpu" or not found:
                continue
            case = found[-1] if module == "attention" else next(c for c in found if c.routing == "balanced")
            if module == "moe" and model.moe is not None:
                case = replace(case, top_k=model.moe.top_k)
            cases.append(replace(case, dtype=dtype))
    return cases


def answer(cases: Sequence[Case], archives: Path | None = None) -> list[Side]:
    """Maps and predictions of the cases, in order; equal questions are asked once."""
    queries = [query_of(case) for case in cases]
    found = dict(zip(dict.fromkeys(queries), read_many(list(dict.fromkeys(queries)), archives), strict=True))
    sides = []
    for case, query in zip(cases, queries, strict=True):
        granularity = found[query]
        if isinstance(granularity, RuleUnknown):
            sides.append(Side(None, None, str(granularity)))
            continue
        figures = calibrations.figures_of(case, granularity)
        sides.append(Side(granularity, predict_case(case, figures, granularity)))
    return sides


def diff(before: Sequence[Case], after: Sequence[Case], archives: Path | None = None) -> list[Change]:
    """Pairs of cases, at two releases or two parallelisms."""
    both = answer([*before, *after], archives)
    sides = zip(before, both[: len(before)], both[len(before) :], after, strict=True)
    return [Change(old, a, b, new) for old, a, b, new in sides]


@dataclass(frozen=True, slots=True)
class Bisected:
    """Every change of a range of releases. read: how many releases were read. unknown: (release, why) of those that could not be compared."""

    changes: list[Change]
    read: int
    unknown: list[tuple[str, str]]


def bisect(
    releases: Sequence[str], case: Case, archives: Path | None = None, say: Callable[[str], None] = lambda text: None
) -> Bisected:
    """Each release whose map differs from the one before it, in order.

    A change that is taken back leaves both ends of a range equal, so halving can't rule it out: every release is read, all in one
    evaluation a release. A release that is unknown is named, and its neighbours are compared across it.
    """
    cases = [replace(case, backend=replace(case.backend, release=release)) for release in releases]
    changes, unknown = [], []
    last: tuple[Case, Side] | None = None
    for release, now in zip(releases, cases, strict=True):
        say(release)
        side = answer([now], archives)[0]
        if side.granularity is None:
            unknown.append((release, side.unknown))
            continue
        if last is not None:
            change = Change(last[0], last[1], side, now)
            if change.unknown:
                unknown.append((release, change.unknown))
            elif change.is_changed:
                changes.append(change)
        last = now, side
    return Bisected(changes, len(releases), unknown)


def merge_equal(changes: Iterable[Change]) -> list[tuple[Change, list[str]]]:
    """Changes that say the same of several models or GPUs, once, with the names that share them."""
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
