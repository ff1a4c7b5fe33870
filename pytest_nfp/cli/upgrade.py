"""nfp diff, nfp bisect, nfp history: what changed between releases, from which one on, and release by release."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from packaging.version import InvalidVersion, Version

from pytest_nfp import catalog, upgrade
from pytest_nfp.cases import Backend, Case, parse_backend
from pytest_nfp.catalog import UnknownName
from pytest_nfp.cli import options
from pytest_nfp.granularity import artifacts
from pytest_nfp.parallel import on_rank, parse_parallel
from pytest_nfp.upgrade import MODULE_OF, Change
from pytest_nfp.verdict import term_in_words

EXIT_CHANGED = 1
PARAMETERS = 4
"""Ranges of other tile parameters that are told in words; --json holds all."""


def add(commands: Any) -> None:
    """Declare the three commands."""
    p = commands.add_parser(
        "diff",
        help="what an upgrade changes, over all models and GPUs",
        description="Tiles, source and predicted N_max of two releases. Exit 1 if anything changed, 0 if not, 2 for bad input.",
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
        help="the first release that changed one case",
        description="Finds the first release whose map differs, in log2 steps over the released versions. Exit 1 if one does.",
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
    both = []
    for backend, parallel in zip((_rule(before), after), ranks, strict=True):
        cases = upgrade.default_cases(backend, gpus, options.models(given.model, parallel), given.dtype)
        both.append({(c.gpu, c.subject.name.partition("@")[0]): c for c in cases})
    # A model that only one of two parallelisms can cut has nothing to be compared with.
    shared = [key for key in both[0] if key in both[1]]
    if not shared:
        raise UnknownName(f"none of the models has a {MODULE_OF[before.framework]} module for {before.framework}")
    found = upgrade.diff([both[0][k] for k in shared], [both[1][k] for k in shared], given.artifacts)
    changes = [c for c in found if c.is_changed]
    unknown = [c for c in found if c.before.unknown and c.after.unknown]
    warned = [c for c in found if not c.is_changed and c.parameters]
    if given.json:
        rows = {"changes": [as_json(c) for c in changes], "warnings": [as_json(c) for c in warned]}
        print(json.dumps({"before": str(before), "after": str(after), "cases": len(found)} | rows, indent=1))
    elif given.markdown:
        print("\n".join(_markdown(before, after, found, changes, warned)))
    else:
        print("\n".join(_text(before, after, found, changes, warned)))
    for c in unknown:
        print(f"{c.case.gpu} {c.case.subject.name}: unknown in both: {c.before.unknown}", file=sys.stderr)
    # What is unknown on both sides was not compared: that is no clean bill either.
    failing = [c for c in changes if given.fail_on == "any" or c.moves_boundary]
    return EXIT_CHANGED if failing or unknown else 0


def _text(
    before: Backend, after: Backend, found: list[Change], changes: list[Change], warned: list[Change]
) -> list[str]:
    lines = [f"{before} to {after}: {len(changes)} of {len(found)} cases changed"]
    for change, gpus in upgrade.merge_equal(changes):
        lines += ["", f"{change.case.subject.name} on {', '.join(gpus)}"]
        lines += [f"  {line}" for line in _in_words(change)]
    for change, gpus in upgrade.merge_equal(warned):
        lines += ["", f"{change.case.subject.name} on {', '.join(gpus)}: no change of granularity, but a warning"]
        lines += [f"  {line}" for line in _parameters_in_words(change)]
    return lines


def _parameters_in_words(c: Change) -> list[str]:
    """What changed beside the tile, and what that can do."""
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
        lines.append(f"T(N0), at {base} {unit}, keeps its parameters; latency beyond it moves, so measure again")
    return lines


def _in_words(c: Change) -> list[str]:
    for side, when in ((c.before, "before"), (c.after, "after")):
        if side.unknown:
            return [f"unknown {when}: {side.unknown}"]
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
    if not c.tiles:  # Where tiles change too, the other parameters are a detail that --json has.
        lines += _parameters_in_words(c)
    for predictor in ("principle", "tile_roofline"):
        old, new = (term_in_words(term) if term else "unknown" for term in c.terms(predictor))
        change = f"{old} to {new}" if old != new else f"stays {new}"
        lines.append(f"N_max {change} by the {predictor.replace('_', ' ')}")
    return lines


def _markdown(
    before: Backend, after: Backend, found: list[Change], changes: list[Change], warned: list[Change]
) -> list[str]:
    title = f"### Granularity: {before} to {after}"
    notes = [
        f"- {c.case.subject.name} on {', '.join(gpus)}: {'; '.join(_parameters_in_words(c))}"
        for c, gpus in upgrade.merge_equal(warned)
    ]
    if notes:
        notes = ["", "No change of granularity, but other tile parameters changed:", "", *notes]
    if not changes:
        return [title, "", f"No change in {len(found)} cases (models x GPUs).", *notes]
    lines = [
        title,
        "",
        f"{len(changes)} of {len(found)} cases changed.",
        "",
        "| model | GPUs | tiles | kernel | source | N_max, principle | N_max, tile roofline |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for c, gpus in upgrade.merge_equal(changes):
        if unknown := c.before.unknown or c.after.unknown:
            lines.append(f"| {c.case.subject.name} | {', '.join(gpus)} | unknown: {unknown} | | | | |")
            continue
        model = f"{c.case.subject.name}<br>one rank: {c.rank[0]} → {c.rank[1]}" if c.rank else c.case.subject.name
        tiles = "<br>".join(f"{a}..{b}: {old} → {new}" for a, b, old, new in c.tiles) or "same"
        source = c.sources[1] if c.sources[0] == c.sources[1] else f"{c.sources[0]} → {c.sources[1]}"
        said = [[term_in_words(t) for t in c.terms(p) if t] for p in ("principle", "tile_roofline")]
        n = [f"{a} → {b}" if a != b else b for a, b in said]
        assert c.after.granularity is not None  # else it is unknown
        kernel = " → ".join(c.kernel) if c.kernel else c.after.granularity.kernel
        lines.append(f"| {model} | {', '.join(gpus)} | {tiles} | {kernel} | {source} | {n[0]} | {n[1]} |")
    return lines + notes


def as_json(c: Change) -> dict[str, Any]:
    """One change."""
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
        "unknown": [c.before.unknown, c.after.unknown],
    }


def run_bisect(given: argparse.Namespace) -> int:
    """Find the first release that changed. Raises UnknownName, RuleUnknown."""
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
    change, read = upgrade.bisect(releases, case, given.artifacts, lambda r: print(f"  reading {r}", file=sys.stderr))
    if given.json:
        print(
            json.dumps(
                {"first_changed": change.case.backend.release if change else None, "read": read, "of": len(releases)}
                | (as_json(change) if change else {}),
                indent=1,
            )
        )
    elif change is None:
        print(f"no change from {first} to {last} ({read} of {len(releases)} releases read)")
    else:
        assert change.before.granularity is not None
        print(f"{change.case.backend} is the first that changed, after {change.before.granularity.release}", end="")
        print(f" ({read} of {len(releases)} releases read)")
        print("\n".join(f"  {line}" for line in _in_words(change)))
    return EXIT_CHANGED if change else 0


def run_history(given: argparse.Namespace) -> int:
    """A table of releases. Raises UnknownName, RuleUnknown."""
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
        side = upgrade.answer([case], given.artifacts)[0]
        g = side.granularity
        state = (None, side.unknown) if g is None else (g.tiles(), g.kernel, Change(case, side, side).sources[0])
        if given.all or state != last:
            rows.append((release, side, case))
        last = state
    if given.json:
        print(json.dumps([_history_json(*row) for row in rows], indent=1))
        return 0
    print(
        f"{backend.framework} {MODULE_OF[backend.framework]} {given.dtype}, {given.model} on {given.gpu}: {len(rows)} of {len(releases)} releases"
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
    return 0


def _history_json(release: str, side: upgrade.Side, case: Case) -> dict[str, Any]:
    return {
        "release": release,
        "tiles": side.granularity.tiles() if side.granularity else None,
        "source": Change(case, side, side).sources[1],
        "kernel": side.granularity.kernel if side.granularity else None,
        "n_max": {p: Change(case, side, side).n_max(p)[1] for p in ("principle", "tile_roofline")},
        "unknown": side.unknown,
    }


def _case(given: argparse.Namespace, backend: Backend) -> Case:
    model = on_rank(catalog.model(given.model), parse_parallel(given.parallel))
    cases = upgrade.default_cases(backend, [catalog.gpu(given.gpu)], [model], given.dtype)
    if not cases:
        raise UnknownName(f"{given.model} has no {MODULE_OF[backend.framework]} module for {backend.framework}")
    return cases[0]


def _rule(backend: Backend) -> Backend:
    if backend.framework not in MODULE_OF:
        raise UnknownName(f"{backend.framework} has no granularity rule; there are {', '.join(MODULE_OF)}")
    return backend


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise UnknownName(f"{text!r} is no version") from None
