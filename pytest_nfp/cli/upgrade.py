"""nfp diff: what changed between two releases. nfp bisect: which releases changed. nfp history: one case by release."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from pytest_nfp import catalog, frameworks
from pytest_nfp.cases import Backend, Case, parse_backend
from pytest_nfp.catalog import UnknownName
from pytest_nfp.catalog.parallel import on_rank, parse_parallel
from pytest_nfp.cli import options
from pytest_nfp.compare import upgrades
from pytest_nfp.compare.upgrades import Change, rule_module
from pytest_nfp.granularity import UNKNOWN, artifacts
from pytest_nfp.verdict import term_in_words

EXIT_CHANGED = 1
EXIT_UNDECIDED = 3
PARAMETERS = 4
"""How many ranges of changed tile parameters the text lists; --json holds all."""


def add(commands: Any) -> None:
    """Declare the three commands."""
    p = commands.add_parser(
        "diff",
        help="what an upgrade changes, over all models and GPUs",
        description="Kernel, tiles, source and predicted N_max of two releases. Exit 1 if anything changed, 3 if something can't be"
        " told (an unknown kernel is no clean bill), 0 if nothing changed, 2 for bad input.",
        epilog="example: nfp diff vllm==0.16.0 vllm==0.17.1 --gpu h20",
    )
    p.add_argument("before", metavar="FRAMEWORK==A")
    p.add_argument("after", metavar="FRAMEWORK==B")
    options.add_choice(p)
    options.add_parallel(p, "ranks on both sides, such as tp8; or before..after: tp8..ep8 (default tp1)")
    p.add_argument(
        "--fail-on",
        choices=("any", "boundary"),
        default="any",
        help="exit 1 for any change (default), or only for one that moves a predicted N_max or the kernel",
    )
    options.add_artifacts(p)
    options.add_until(p)
    shape = p.add_mutually_exclusive_group()
    shape.add_argument("--markdown", action="store_true", help="a table for a pull-request comment")
    shape.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=run_diff)

    p = commands.add_parser(
        "bisect",
        help="every release that changed one case",
        description="Finds each release whose kernel, tiles or source differ from the release before it. A change that was taken back is"
        " found too, so every release of the range is read. Exit 1 if one differs, 3 if none does but some are unknown.",
        epilog="example: nfp bisect vllm 0.10.2..0.33.0 --gpu h20 --model llada-2.1-mini",
    )
    p.add_argument("framework")
    p.add_argument("range", metavar="A..B")
    _one_case(p)
    p.set_defaults(run=run_bisect)

    p = commands.add_parser(
        "history",
        help="one case, release by release",
        description="A row for each release in which the map or its source changed (--all: every release).",
        epilog="example: nfp history vllm --gpu h20 --model llada-2.1-mini --since 0.6.6",
    )
    p.add_argument("framework")
    _one_case(p)
    p.add_argument("--since", default="0", help="first release (default: all)")
    p.add_argument("--all", action="store_true", help="every release, changed or not")
    p.set_defaults(run=run_history)


def _one_case(p: argparse.ArgumentParser) -> None:
    p.add_argument("--gpu", required=True, help="catalog name, such as h20")
    p.add_argument("--model", required=True, help="catalog name, or path of a Hugging Face config.json")
    options.add_dtype(p)
    options.add_parallel(p)
    options.add_artifacts(p)
    options.add_until(p)
    p.add_argument("--json", action="store_true", help="print JSON")


def run_diff(given: argparse.Namespace) -> int:
    """Compare two releases. Raises UnknownName."""
    artifacts.read_index_until(given.until)
    before, after = (options.existing(options.release(t), given.artifacts) for t in (given.before, given.after))
    if before.framework != after.framework:
        raise UnknownName(f"{before} and {after} are two frameworks: diff compares releases of one")
    first, separator, second = given.parallel.partition("..")
    ranks = parse_parallel(first), parse_parallel(second if separator else first)
    gpus = options.gpus(given.gpu)
    sides = []
    for backend, parallel in zip((_rule(before), after), ranks, strict=True):
        cases = upgrades.default_cases(backend, gpus, options.models(given.model, parallel), given.dtype)
        sides.append({(c.gpu, c.subject.name.partition("@")[0]): c for c in cases})
    # A model that only one of the two parallelisms can cut has no counterpart.
    shared = [key for key in sides[0] if key in sides[1]]
    if not shared:
        raise UnknownName(f"none of the models has a {rule_module(before.framework)} module for {before.framework}")
    compared = upgrades.diff([sides[0][k] for k in shared], [sides[1][k] for k in shared], given.artifacts)
    answer = Told(
        before,
        after,
        compared,
        [c for c in compared if c.is_changed],
        [c for c in compared if c.unknown],
        [c for c in compared if not c.is_changed and not c.unknown and c.parameters],
    )
    if given.json:
        print(json.dumps(options.with_walls(_diff_json(answer)), indent=1))
    elif given.markdown:
        print("\n".join(_markdown(answer)))
    else:
        print("\n".join(_text(answer)))
    if any(given.fail_on == "any" or c.moves_boundary for c in answer.changes):
        return EXIT_CHANGED
    # An unknown case was not compared, so the upgrade can't be called unchanged.
    return EXIT_UNDECIDED if answer.unknown else 0


@dataclass(frozen=True, slots=True)
class Told:
    """The answer of nfp diff: two releases side by side."""

    before: Backend
    """The older release."""
    after: Backend
    """The newer release."""
    found: list[Change]
    """All cases."""
    changes: list[Change]
    """The cases that changed."""
    unknown: list[Change]
    """The cases for which it can't be told whether they changed."""
    warned: list[Change]
    """The cases whose granularity stays while other tile parameters changed."""

    @property
    def headline(self) -> str:
        """ "3 of 17 cases changed, 2 can't be told"."""
        text = f"{len(self.changes)} of {len(self.found)} cases changed"
        return text + (f", {len(self.unknown)} can't be told" if self.unknown else "")

    @property
    def not_covered(self) -> str:
        """What the framework's rule does not cover; "" where it covers all."""
        framework = frameworks.get(self.before.framework)
        return framework.not_covered if framework is not None else ""


def _diff_json(told: Told) -> dict[str, Any]:
    unknown = [
        f"{', '.join(gpus)} {c.case.subject.name}: undecided, {c.unknown}"
        for c, gpus in upgrades.merge_equal(told.unknown)
    ]
    return {
        "before": str(told.before),
        "after": str(told.after),
        "cases": len(told.found),
        "changes": [as_json(c) for c in told.changes],
        "undecided": [as_json(c) for c in told.unknown],
        "parameters": [as_json(c) for c in told.warned],
        "warnings": unknown,
        "not_covered": told.not_covered,
    }


def _text(told: Told) -> list[str]:
    lines = [f"{told.before} to {told.after}: {told.headline}"]
    for change, gpus in upgrades.merge_equal(told.unknown):
        lines += ["", f"{change.case.subject.name} on {', '.join(gpus)}"]
        lines.append(f"  undecided, {change.unknown}")
    for change, gpus in upgrades.merge_equal(told.changes):
        lines += ["", f"{change.case.subject.name} on {', '.join(gpus)}"]
        lines += [f"  {line}" for line in _in_words(change)]
    for change, gpus in upgrades.merge_equal(told.warned):
        lines += ["", f"{change.case.subject.name} on {', '.join(gpus)}: no change of granularity, but a warning"]
        lines += [f"  {line}" for line in _parameters_in_words(change)]
    return [*lines, *(["", told.not_covered] if told.not_covered else [])]


def _parameters_in_words(c: Change) -> list[str]:
    """Which tile parameters changed while the tile stayed, and what that can do to T(N)."""
    if not c.parameters:
        return []
    unit = "tokens" if c.case.module == "moe" else "query rows"
    lines = [
        f"{first}..{last} {unit}: same tile, {old} to {new}" for first, last, old, new in c.parameters[:PARAMETERS]
    ]
    if len(c.parameters) > PARAMETERS:
        lines.append(f"and {len(c.parameters) - PARAMETERS} ranges more")
    base = c.case.batch * c.case.baseline_positions
    if any(first <= base <= last for first, last, _, _ in c.parameters):
        lines.append(f"T(N0), at {base} {unit}, moves: a faster T(N0) alone can shrink N_max, so measure again")
    else:
        lines.append(f"T(N0), at {base} {unit}, has the same parameters, but T of larger N can change: measure again")
    return lines


def _in_words(c: Change) -> list[str]:
    if c.unknown:
        return [f"undecided, {c.unknown}"]
    unit = "tokens" if c.case.module == "moe" else "query rows"
    lines = [f"{first}..{last} {unit}: {old} to {new} rows" for first, last, old, new in c.tiles]
    if not c.moves_boundary:
        lines.append("moves no predicted boundary and no kernel")
    if not c.tiles:
        lines.insert(0, "tiles are the same")
    if c.rank:
        lines.insert(0, f"one rank holds {c.rank[1]}, before {c.rank[0]}")
    if c.kernel:
        lines.append(f"kernel: {c.kernel[0]} to {c.kernel[1]}")
    if c.sources[0] != c.sources[1]:
        lines.append(f"source: {c.sources[0]} to {c.sources[1]}")
    if not c.tiles:  # Where tiles change too, the other parameters are a detail that only --json lists.
        lines += _parameters_in_words(c)
    for predictor in ("principle", "tile_roofline"):
        old, new = (term_in_words(term) if term else "unknown" for term in c.terms(predictor))
        change = f"{old} to {new}" if old != new else f"stays {new}"
        lines.append(f"N_max {change} by the {predictor.replace('_', ' ')}")
    return lines


def _markdown(told: Told) -> list[str]:
    title = f"### Granularity: {told.before} to {told.after}"
    notes = [
        f"- {c.case.subject.name} on {', '.join(gpus)}: {'; '.join(_parameters_in_words(c))}"
        for c, gpus in upgrades.merge_equal(told.warned)
    ]
    if notes:
        notes = ["", "No change of granularity, but other tile parameters changed:", "", *notes]
    if told.not_covered:
        notes += ["", f"{told.not_covered}."]
    if not told.changes and not told.unknown:
        return [title, "", f"No change in {len(told.found)} cases (models x GPUs).", *notes]
    lines = [
        title,
        "",
        f"{told.headline}.",
        "",
        "| model | GPUs | tiles | kernel | source | N_max, principle | N_max, tile roofline |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for c, gpus in upgrades.merge_equal([*told.unknown, *told.changes]):
        if c.unknown:
            lines.append(f"| {c.case.subject.name} | {', '.join(gpus)} | undecided: {c.unknown} | | | | |")
            continue
        model = f"{c.case.subject.name}<br>one rank: {c.rank[0]} → {c.rank[1]}" if c.rank else c.case.subject.name
        tiles = "<br>".join(f"{a}..{b}: {old} → {new}" for a, b, old, new in c.tiles) or "same"
        source = c.sources[1] if c.sources[0] == c.sources[1] else f"{c.sources[0]} → {c.sources[1]}"
        n_max_texts = [[term_in_words(t) for t in c.terms(p) if t] for p in ("principle", "tile_roofline")]
        n = [f"{a} → {b}" if a != b else b for a, b in n_max_texts]
        assert c.after.granularity is not None  # a change without a map is unknown
        kernel = " → ".join(c.kernel) if c.kernel else c.after.granularity.kernel
        lines.append(f"| {model} | {', '.join(gpus)} | {tiles} | {kernel} | {source} | {n[0]} | {n[1]} |")
    return lines + notes


def as_json(c: Change) -> dict[str, Any]:
    """One change as JSON."""
    return {
        "gpu": c.case.gpu,
        "model": c.case.subject.name,
        "module": c.case.module,
        "dtype": c.case.dtype,
        "tiles": [{"first": a, "last": b, "before": old, "after": new} for a, b, old, new in c.tiles],
        "parameters": [{"first": a, "last": b, "before": old, "after": new} for a, b, old, new in c.parameters],
        "kernel": c.kernel,
        "rank": c.rank,
        "source": c.sources,
        "n_max": {p: c.n_max(p) for p in ("principle", "tile_roofline")},
        "n_max_interval": [term and term.get("interval") for term in c.terms("tile_roofline")],
        "unknown": c.unknown,
    }


def run_bisect(given: argparse.Namespace) -> int:
    """Print every release that changed the case. Raises UnknownName, RuleUnknown."""
    artifacts.read_index_until(given.until)
    first, separator, last = given.range.partition("..")
    backend = _rule(parse_backend(given.framework))
    if not separator or not first or not last:
        raise UnknownName(f"{given.range!r} is no range: write A..B, such as 0.16.0..0.17.1")
    ends = [options.existing(Backend(backend.framework, r), given.artifacts) for r in (first, last)]
    if _version(first) >= _version(last):
        raise UnknownName(f"{first} does not come before {last}")
    low, high = (Version(e.release) for e in ends)
    releases = [r for r in artifacts.known_releases(backend.framework) if low <= Version(r) <= high]
    case = _case(given, Backend(backend.framework, releases[0]))
    bisected = upgrades.bisect(releases, case, given.artifacts, lambda r: print(f"  reading {r}", file=sys.stderr))
    if given.json:
        changes = [{"release": _after(c).release} | as_json(c) for c in bisected.changes]
        unknown = [{"release": release, "reason": reason} for release, reason in bisected.unknown]
        answer = {"changes": changes, "unknown": unknown, "read": bisected.read}
        print(json.dumps(options.with_walls(answer), indent=1))
    else:
        print("\n".join(_bisected(bisected, ends)))
    if bisected.changes:
        return EXIT_CHANGED
    return EXIT_UNDECIDED if bisected.unknown else 0


def _after(c: Change) -> Backend:
    return (c.after_case or c.case).backend


def _bisected(found: upgrades.Bisected, ends: Sequence[Backend]) -> list[str]:
    counts = f"{found.read} releases read" + (f", {len(found.unknown)} unknown" if found.unknown else "")
    first, last = ends
    if found.changes:
        names = ", ".join(_after(c).release for c in found.changes)
        lines = [f"{first.framework} changed at {names} ({first.release} to {last.release}, {counts})"]
    else:
        known = "no change that can be told" if found.unknown else "no change"
        lines = [f"{known} from {first.release} to {last.release} ({counts})"]
    for c in found.changes:
        lines.append(f"{_after(c)}, after {c.case.backend.release}")
        lines += [f"  {line}" for line in _in_words(c)]
    return [*lines, *(f"{first.framework}=={release} is undecided: {reason}" for release, reason in found.unknown)]


def run_history(given: argparse.Namespace) -> int:
    """Print a table of releases. Raises UnknownName, RuleUnknown."""
    artifacts.read_index_until(given.until)
    backend = _rule(parse_backend(given.framework))
    since = _version(given.since)
    releases = [r for r in artifacts.known_releases(backend.framework) if Version(r) >= since]
    if not releases:
        raise UnknownName(f"{backend.framework} has no release since {given.since}")
    rows = []
    last: tuple[Any, ...] | None = None
    for release in releases:
        case = _case(given, Backend(backend.framework, release))
        side = upgrades.answer([case], given.artifacts)[0]
        g = side.granularity
        # Two unknown kernels count as the same where the same code chooses them.
        state = (
            (None, side.unknown)
            if g is None
            else (g.tiles(), g.kernel, g.choice_digest, Change(case, side, side).sources[0])
        )
        if given.all or state != last:
            rows.append((release, side, case))
        last = state
    if given.json:
        print(json.dumps([options.with_walls(_history_json(*row)) for row in rows], indent=1))
        return 0
    print(
        f"{backend.framework} {rule_module(backend.framework)} {given.dtype}, {given.model} on {given.gpu}: {len(rows)} of {len(releases)} releases"
    )
    for release, side, case in rows:
        if side.granularity is None:
            print(f"  {release:<14} unknown: {side.unknown}")
            continue
        tiles = ", ".join(f"{first}..{end}: {tile}" for first, end, tile in side.granularity.tiles())
        n = [Change(case, side, side).n_max(p)[1] for p in ("principle", "tile_roofline")]
        kernel = side.granularity.kernel
        print(f"  {release:<14} N_max {n[0]} / {n[1]}  {kernel}, {Change(case, side, side).sources[1]}: {tiles}")
    print("N_max by the principle / by the tile roofline")
    for release, side, _ in rows:
        if side.granularity is not None and side.granularity.kernel == UNKNOWN:
            print(f"{release}: which kernel runs is unknown: {side.granularity.kernel_reason}")
    return 0


def _history_json(release: str, side: upgrades.Side, case: Case) -> dict[str, Any]:
    return {
        "release": release,
        "tiles": side.granularity.tiles() if side.granularity else None,
        "source": Change(case, side, side).sources[1],
        "kernel": side.granularity.kernel if side.granularity else None,
        "kernel_reason": side.granularity.kernel_reason if side.granularity else "",
        "n_max": {p: Change(case, side, side).n_max(p)[1] for p in ("principle", "tile_roofline")},
        "unknown": side.unknown,
    }


def _case(given: argparse.Namespace, backend: Backend) -> Case:
    model = on_rank(catalog.model(given.model), parse_parallel(given.parallel))
    cases = upgrades.default_cases(backend, [catalog.gpu(given.gpu)], [model], given.dtype)
    if not cases:
        raise UnknownName(f"{given.model} has no {rule_module(backend.framework)} module for {backend.framework}")
    return cases[0]


def _rule(backend: Backend) -> Backend:
    rule_module(backend.framework)
    return backend


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise UnknownName(f"{text!r} is no version") from None
