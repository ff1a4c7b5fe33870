"""What an upgrade changes: maps of two releases side by side, and what that does to N_max by both predictors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_nfp import calibrated
from pytest_nfp.cases import Backend, Case, Module, expand
from pytest_nfp.catalog import Gpu, Model
from pytest_nfp.granularity import Granularity, RuleUnknown, changed_parameters, changed_ranges, query_of, read_many
from pytest_nfp.predict import Predicted, predict_case
from pytest_nfp.verdict import has_moved

MODULE_OF: dict[str, Module] = {
    "vllm": "moe",
    "sglang": "moe",
    "flashinfer-python": "attention",
    "flash-attn": "attention",
    "flash-attn-3": "attention",
    "flash-attn-4": "attention",
}


@dataclass(frozen=True, slots=True)
class Side:
    """One release's answer to one case: a map with both predictions, or the reason why it is unknown."""

    granularity: Granularity | None
    predicted: Predicted | None
    unknown: str = ""


@dataclass(frozen=True, slots=True)
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
    def tiles(self) -> list[tuple[int, int, int, int]]:
        """Ranges whose tile differs."""
        if self.before.granularity is None or self.after.granularity is None:
            return []
        return changed_ranges(self.before.granularity.tiles(), self.after.granularity.tiles())

    @property
    def parameters(self) -> list[tuple[int, int, str, str]]:
        """(first, last, before, after) where the tile stays and other tile parameters differ: no change of granularity."""
        if self.before.granularity is None or self.after.granularity is None:
            return []
        return changed_parameters(self.before.granularity, self.after.granularity)

    @property
    def kernel(self) -> tuple[str, str] | None:
        """The kernel before and after, where it changed."""
        if self.before.granularity is None or self.after.granularity is None:
            return None
        names = self.before.granularity.kernel, self.after.granularity.kernel
        # What is not known can't have changed: the reason stands in the release's own map.
        return names if names[0] != names[1] and "unknown" not in names else None

    @property
    def sources(self) -> tuple[str, str]:
        """Tuned file or default rule, before and after; empty where unknown."""
        return _sources(self.before.granularity), _sources(self.after.granularity)

    @property
    def _is_one_unknown(self) -> bool:
        return (self.before.granularity is None) != (self.after.granularity is None)

    @property
    def is_changed(self) -> bool:
        """Whether tiles, kernel or source differ, or one side alone is unknown."""
        other = self.kernel is not None or self.rank is not None or self.sources[0] != self.sources[1]
        return self._is_one_unknown or bool(self.tiles) or other

    @property
    def moves_boundary(self) -> bool:
        """Whether the change moves a predicted N_max or the kernel, or can't be told."""
        if self._is_one_unknown or self.kernel is not None:
            return True
        pairs = [self.terms(predictor) for predictor in ("principle", "tile_roofline")]
        return any(old is not None and new is not None and has_moved(old, new) for old, new in pairs)

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


def default_cases(backend: Backend, gpus: Sequence[Gpu], models: Sequence[Model], dtype: str) -> list[Case]:
    """One case a GPU and model: balanced routing at the model's k, or the longest context of its grid."""
    module = MODULE_OF[backend.framework]
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
        figures = calibrated.figures_of(case, granularity)
        sides.append(Side(granularity, predict_case(case, figures, granularity)))
    return sides


def diff(before: Sequence[Case], after: Sequence[Case], archives: Path | None = None) -> list[Change]:
    """Pairs of cases, at two releases or two parallelisms."""
    both = answer([*before, *after], archives)
    sides = zip(before, both[: len(before)], both[len(before) :], after, strict=True)
    return [Change(old, a, b, new) for old, a, b, new in sides]


def bisect(
    releases: Sequence[str], case: Case, archives: Path | None = None, say: Callable[[str], None] = lambda text: None
) -> tuple[Change | None, int]:
    """The first release whose map differs from the one before it, in log2 steps; and how many releases were read.

    releases: in order, the first is what the others are held to. A map that changes and changes back in between is
    not found by halving. Raises RuleUnknown where a release on the way is unknown.
    """
    seen: dict[str, Side] = {}

    def side(release: str) -> Side:
        if release not in seen:
            say(release)
            seen[release] = answer([replace(case, backend=replace(case.backend, release=release))], archives)[0]
            if seen[release].granularity is None:
                raise RuleUnknown(f"{case.backend.framework}=={release}: {seen[release].unknown}")
        return seen[release]

    def differs(release: str) -> bool:
        return Change(case, side(releases[0]), side(release)).is_changed

    if len(releases) < 2 or not differs(releases[-1]):
        return None, len(seen)
    low, high = 0, len(releases) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if differs(releases[middle]):
            high = middle
        else:
            low = middle
    at = replace(case, backend=replace(case.backend, release=releases[high]))
    return Change(at, side(releases[low]), side(releases[high])), len(seen)


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
            c.before.unknown,
            c.after.unknown,
            c.case.subject.name,
        )
        groups.setdefault(key, (c, []))[1].append(c.case.gpu)
    return list(groups.values())
