"""Piecewise maps: which tile at which count of token (or packed query) rows."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from pytest_nfp.escaping import Shown

UNKNOWN = "unknown"
"""Name of a kernel that no artifact tells. The reason stands beside it."""


class RuleUnknown(Shown):
    """A granularity rule that could not be read or evaluated. The message is the reason; nothing is guessed."""


@dataclass(frozen=True, slots=True)
class Range:
    """Counts of rows that run with one tile."""

    first: int
    """First count."""
    last: int
    """Last count, included."""
    tile: int
    """Rows of the tile."""
    source: str = "default rule"
    """What chose the tile: a rule, or the name of a tuned file."""
    key: int | None = None
    """Key in the tuned file. None for a rule."""


@dataclass(frozen=True, slots=True)
class Granularity:
    """The map of one kernel, with where it comes from."""

    framework: str
    """Name of the framework."""
    release: str
    """Version of the framework."""
    module: str
    """moe, attention or dense."""
    dtype: str
    """Number format, such as bf16."""
    device_name: str
    """The driver's name of the device, or cpu."""
    ranges: tuple[Range, ...]
    """Sorted and gap-free; the first one begins at 1."""
    kernel: str
    """Name of the kernel that runs; `unknown` where it can't be told."""
    kernel_reason: str
    """Why this kernel runs, or why it is unknown."""
    artifact_file: str
    """The file that the rule was read from."""
    artifact_sha256: str
    """Digest of that file."""
    origin: str
    """installed, archive, index, source tree, recorded rule or shipped table."""
    packed: bool = False
    """Whether counts are query rows times the GQA group, because the kernel packs the heads into the tile."""
    warnings: tuple[str, ...] = field(default=())
    """What a user should know about this map, a text each."""
    parameters: tuple[tuple[int, int, str], ...] = field(default=())
    """(first, last, "BLOCK_SIZE_N=64 num_warps=4") for what the rule sets beside the tile. Empty if it sets nothing."""
    choice: tuple[tuple[str, str], ...] = field(default=())
    """(function, digest) of the code that chooses the kernel, where the kernel is unknown."""

    def __post_init__(self) -> None:
        if not self.ranges or self.ranges[0].first != 1:
            raise ValueError("a piecewise map must begin at 1")
        for before, after in pairwise(self.ranges):
            if after.first != before.last + 1:
                raise ValueError(f"a piecewise map must be gap-free: {before.last} is followed by {after.first}")
        for r in self.ranges:
            if r.last < r.first or r.tile < 1:
                raise ValueError(f"not a range: {r}")

    @property
    def has_tiles(self) -> bool:
        """Whether rows are grouped at all. A kernel without a tile rule has a tile of one row throughout."""
        return any(r.tile > 1 for r in self.ranges)

    def tile(self, count: int) -> int:
        """Tile rows at a row count. Counts past the end keep the last range's tile."""
        return self.ranges[self._index(count)].tile

    def branch_limit(self, count: int) -> int | None:
        """tau: the last count up to which the tile at `count` stays. None if it stays to the end."""
        i = self._index(count)
        tile = self.ranges[i].tile
        while i + 1 < len(self.ranges) and self.ranges[i + 1].tile == tile:
            i += 1
        return None if i + 1 == len(self.ranges) else self.ranges[i].last

    def tiles(self) -> list[list[int]]:
        """[[first, last, tile], ...] merged by tile alone, as baselines store it."""
        return [[r.first, r.last, r.tile] for r in merge(Range(r.first, r.last, r.tile) for r in self.ranges)]

    def parameter_rule(self, name: str) -> Callable[[int], int] | None:
        """Another parameter of the rule's configuration, such as BLOCK_SIZE_N, as a function of the row count.

        None if the parameter is not a whole number throughout. Counts past the end keep the last range's value.
        """
        settings = [_settings(text).get(name, "") for _, _, text in self.parameters]
        if not settings or not all(value.isdigit() for value in settings):
            return None
        firsts, values = [first for first, _, _ in self.parameters], [int(value) for value in settings]
        return lambda count: values[max(0, bisect_right(firsts, count) - 1)]

    @property
    def parameters_digest(self) -> str | None:
        """Twelve hex digits that stand for the other parameters in a baseline. None if the rule sets none."""
        if not self.parameters:
            return None
        return hashlib.sha256(repr(self.parameters).encode()).hexdigest()[:12]

    @property
    def choice_digest(self) -> str | None:
        """Twelve hex digits that stand for the code of an unknown choice in a baseline. None if there is none."""
        return hashlib.sha256(repr(self.choice).encode()).hexdigest()[:12] if self.choice else None

    def edges(self) -> list[int]:
        """The last count of each tile but the last. A boundary is looked for at edge and edge + 1."""
        return [last for _, last, _ in self.tiles()[:-1]]

    def _index(self, count: int) -> int:
        if count < 1:
            raise ValueError(f"a row count must be at least 1, got {count}")
        return max(0, bisect_right(self.ranges, count, key=lambda r: r.first) - 1)


def merge(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Join neighbouring ranges that differ in nothing but their counts."""
    merged: list[Range] = []
    for r in ranges:
        if merged and (merged[-1].tile, merged[-1].source, merged[-1].key) == (r.tile, r.source, r.key):
            merged[-1] = Range(merged[-1].first, r.last, r.tile, r.source, r.key)
        else:
            merged.append(r)
    return tuple(merged)


def from_runs(runs: Iterable[tuple[int, tuple[int, str, int | None]]]) -> tuple[Range, ...]:
    """Ranges from runs of (number of counts, (tile, source, key)), from count 1 on."""
    ranges = []
    first = 1
    for count, (tile, source, key) in runs:
        ranges.append(Range(first, first + count - 1, tile, source, key))
        first += count
    return merge(ranges)


def parameter_runs(runs: Iterable[tuple[int, str]]) -> tuple[tuple[int, int, str], ...]:
    """(first, last, parameters) from runs of (number of counts, parameters), from count 1 on.

    Empty if no count has parameters.
    """
    spans = []
    first = 1
    for count, text in runs:
        spans.append((first, first + count - 1, text))
        first += count
    merged = _joined(spans)
    return tuple(merged) if any(text for _, _, text in merged) else ()


def changed_parameters(before: Granularity, after: Granularity) -> list[tuple[int, int, str, str]]:
    """(first, last, before, after) wherever the tile stays and other parameters change.

    Only the changed parameters are named.
    """
    if not before.parameters or not after.parameters:
        return []
    end = min(before.parameters[-1][1], after.parameters[-1][1])
    firsts = {a for g in (before, after) for a, _, _ in g.parameters} | {
        r.first for g in (before, after) for r in g.ranges
    }
    changes = []
    for first, last in _segments(firsts, end):
        if before.tile(first) != after.tile(first):
            continue
        old, new = (_settings(next(text for a, b, text in g.parameters if a <= first <= b)) for g in (before, after))
        names = [n for n in sorted({*old, *new}) if old.get(n) != new.get(n)]
        if names:
            was, now = (" ".join(f"{n}={side[n]}" for n in names if n in side) for side in (old, new))
            changes.append((first, last, was, now))
    return _joined(changes)


def _settings(text: str) -> dict[str, str]:
    """The settings of a text such as "BLOCK_SIZE_N=64 num_warps=4", by name."""
    return dict(item.split("=", 1) for item in text.split())


def _segments(firsts: Iterable[int], end: int) -> list[tuple[int, int]]:
    """(first, last) segments up to `end`, cut at the counts at which something may change."""
    cuts = sorted(c for c in set(firsts) if c <= end)
    return [(first, following - 1) for first, following in zip(cuts, [*cuts[1:], end + 1], strict=True)]


Span = TypeVar("Span", bound=tuple[Any, ...])


def _joined(spans: Iterable[Span]) -> list[Span]:
    """(first, last, ...) spans. Neighbours that differ in nothing but their counts become one."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1][1] == span[0] - 1 and merged[-1][2:] == span[2:]:
            merged[-1] = (merged[-1][0], *span[1:])  # type: ignore[assignment]  # a span of the same shape
        else:
            merged.append(span)
    return merged


def from_points(points: Sequence[tuple[int, str, int | None]]) -> tuple[Range, ...]:
    """Ranges from (tile, source, key) at counts 1, 2, 3, ..."""
    return merge(Range(i, i, tile, source, key) for i, (tile, source, key) in enumerate(points, 1))


def changed_ranges(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> list[tuple[int, int, int, int]]:
    """(first, last, tile before, tile after) wherever two maps differ, over their common counts.

    A map is [[first, last, tile], ...].
    """
    firsts = {first for first, _, _ in [*before, *after]}
    changes = []
    for first, last in _segments(firsts, min(before[-1][1], after[-1][1])):
        old = next(tile for a, b, tile in before if a <= first <= b)
        new = next(tile for a, b, tile in after if a <= first <= b)
        if old != new:
            changes.append((first, last, old, new))
    return _joined(changes)


def tiles_in_words(tiles: Iterable[tuple[int, int, int, int]], last: int) -> str:
    """Changes of tiles in words, such as "16 to 32 rows from M=33 to 96".

    The last count is left out where it is the end of the map.
    """
    parts = []
    for first, end, old, new in tiles:
        reach = f"from M={first}" if end >= last else f"from M={first} to {end}" if end > first else f"at M={first}"
        parts.append(f"{old} to {new} rows {reach}")
    return ", ".join(parts)
