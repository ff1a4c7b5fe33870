"""The only rule for "is it the same as before": boundaries, predictions, maps and the kernels that they are of.

The gate, `nfp compare`, `nfp diff`, the report and the baselines all ask here. What is unknown (a kernel, a map, a timer) is
undecided, never equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from pytest_nfp.granularity.maps import UNKNOWN, Granularity, changed_ranges

Answer = Literal["same", "moved", "undecided"]


@dataclass(frozen=True, slots=True)
class KnownBoundary:
    """An N_max and how it is known."""

    n_max: int
    interval: tuple[int, int | None]
    """(low, high) in positions; high None: at least low."""
    kind: str
    """measured, recorded or simulated."""
    timer: str = ""
    """The clock of a measured one; "" where it is not known."""
    positions: tuple[int, ...] = ()
    """The N of its curve."""
    is_noisy: bool = False
    """Whether noise, not the grid, makes the interval wide."""


@dataclass(frozen=True, slots=True)
class Compared:
    """An answer, and what is unknown where it is undecided."""

    answer: Answer
    why: str = ""


def slack(at: float, positions: Iterable[int], granule: int, match_tolerance: float) -> float:
    """The match tolerance in positions: the largest of one sweep step and one granule, and a share of the boundary itself.

    positions: the N of the curve that is held to something; the gap around `at` is its sweep step.
    """
    step = next((b - a for a, b in pairwise(sorted(set(positions))) if b > at), 1)
    return max(step, granule, match_tolerance * at)


def compare_intervals(
    before: tuple[float, float | None],
    after: tuple[float, float | None],
    positions: Iterable[int],
    granule: int,
    match_tolerance: float,
    is_noisy: bool = False,
) -> Answer:
    """Whether two intervals [low, high] (high None: at least) are apart by more than the match tolerance, both ways.

    The tolerance is taken at the last N of `before` (its first where it is open), and is the same to both sides. is_noisy: noise made an interval wide, so meeting is
    not enough: what is held must lie inside to be the same, and outside to have moved.
    """
    (low, high), (first, last) = before, after
    width = slack(low if high is None else high, positions, granule, match_tolerance)
    below, above = low - width, float("inf") if high is None else high + width
    end = float("inf") if last is None else last
    if end < below or first > above:
        return "moved"
    if not is_noisy or (first >= below and end <= above):
        return "same"
    return "undecided"


def compare_boundaries(before: KnownBoundary, after: KnownBoundary, granule: int, match_tolerance: float) -> Compared:
    """Whether a measured or recorded N_max moved. Two clocks are not compared, nor is one that is not known."""
    if why := clocks_apart(before, after):
        return Compared("undecided", why)
    noisy = before.is_noisy or after.is_noisy
    answer = compare_intervals(before.interval, after.interval, after.positions, granule, match_tolerance, noisy)
    return Compared(answer, "noise is too large to tell whether N_max moved" if answer == "undecided" else "")


def clocks_apart(before: KnownBoundary, after: KnownBoundary) -> str:
    """Why two curves can't be compared by their clocks; "" where they can. Most recorded curves name no clock: their source has one."""
    if before.kind != after.kind:
        return f"one curve is {before.kind}, the other {after.kind}: a clock that is not known is not compared"
    if before.timer != after.timer or (before.kind == "measured" and not before.timer):
        one, other = (b.timer or "an unnamed timer" for b in (before, after))
        return f"measured by {one} and by {other}: two timers are not compared"
    return ""


def has_moved(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a predictor's N_max differs: of predictions with an interval, whether one lies outside the other's interval."""
    if "interval" not in before or "interval" not in after:
        return bool(before["n_max"] != after["n_max"])
    pairs = ((before["n_max"], after["interval"]), (after["n_max"], before["interval"]))
    return any(n < low or (high is not None and n > high) for n, (low, high) in pairs)


def moved_predictions(
    before: Mapping[str, Mapping[str, Any]] | None, after: Mapping[str, Mapping[str, Any]] | None
) -> list[str]:
    """The predictors that both sides have and whose N_max moved."""
    if before is None or after is None:
        return []
    return [name for name, term in after.items() if name in before and has_moved(before[name], term)]


@dataclass(frozen=True, slots=True)
class KnownMap:
    """A granularity map as it is compared."""

    kernel: str | None
    """The kernel that runs; None where a record does not name it."""
    tiles: Sequence[Sequence[int]] = ()
    """[first, last, tile] ranges of row counts; empty where they are unknown."""
    choice: str | None = None
    """A digest of the code that chooses the kernel, where the kernel is unknown."""
    functions: tuple[tuple[str, str], ...] = ()
    """(function, digest) of that code, where it is at hand."""
    why: str = ""
    """Why the kernel or the tiles are unknown."""


def known_map(granularity: Granularity) -> KnownMap:
    """A map that was read from a release."""
    why = granularity.kernel_reason if granularity.kernel == UNKNOWN else ""
    return KnownMap(granularity.kernel, granularity.tiles(), granularity.choice_digest, granularity.choice, why)


@dataclass(frozen=True, slots=True)
class ComparedMaps:
    """What differs between two maps.

    tiles: (first, last, before, after) row counts at which the tile differs. kernel: before and after, where it is another.
    unknown: why it can't be told whether the same kernel runs, or "".
    """

    tiles: tuple[tuple[int, int, int, int], ...] = ()
    kernel: tuple[str, str] | None = None
    unknown: str = ""

    @property
    def answer(self) -> Answer:
        """Undecided before anything else: tiles of a kernel that may not run say nothing."""
        if self.unknown:
            return "undecided"
        return "moved" if self.tiles or self.kernel else "same"


def compare_maps(before: KnownMap, after: KnownMap) -> ComparedMaps:
    """Whether the same kernel runs with the same tiles.

    Where the kernel is unknown on both sides, the code that chooses it is compared: the same code is the same choice. Then the
    tiles are compared too, as they are the same kernel's.
    """
    if unknown := _unknown(before, after):
        return ComparedMaps(unknown=unknown)
    tiles = tuple(changed_ranges(before.tiles, after.tiles)) if before.tiles and after.tiles else ()
    kernel = None
    if before.kernel is not None and after.kernel is not None and before.kernel != after.kernel:
        kernel = before.kernel, after.kernel
    return ComparedMaps(tiles, kernel)


def _unknown(before: KnownMap, after: KnownMap) -> str:
    sides = [(side, when) for side, when in ((before, "before"), (after, "now")) if side.kernel == UNKNOWN]
    if not sides:
        return ""
    if len(sides) == 2 and before.choice is not None and before.choice == after.choice:
        return ""
    reasons = [f"{when}: {side.why}" for side, when in sides if side.why]
    said = f"which kernel runs is unknown {' and '.join(when for _, when in sides)}"
    if len(sides) == 2 and before.choice and after.choice:
        said += f", and the code that chooses it differs{_functions(before, after)}"
    return f"{said} ({'; '.join(reasons)})" if reasons else said


def _functions(before: KnownMap, after: KnownMap) -> str:
    """The functions that changed, the first few by name."""
    if not before.functions or not after.functions:
        return ""
    names = sorted({name.rpartition(": ")[2] for name, _ in set(before.functions) ^ set(after.functions)})
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f" in {', '.join(names[:4])}{more}"
