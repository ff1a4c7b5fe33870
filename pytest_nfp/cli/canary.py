"""nfp canary: which rules of each framework's newest release can't be evaluated."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from packaging.version import Version

from pytest_nfp import catalog, frameworks
from pytest_nfp.cases import Backend, Case
from pytest_nfp.catalog import UnknownName
from pytest_nfp.cli import options
from pytest_nfp.compare import upgrades
from pytest_nfp.compare.upgrades import rule_module
from pytest_nfp.granularity import UNKNOWN, artifacts

ASKED = {"moe": ("bf16", "fp8", "fp8-block"), "attention": ("bf16",)}
"""Module -> the dtypes whose rules differ. fp16 has the rule of bf16."""
EXIT_UNKNOWN = 1


def on_index() -> list[str]:
    """Frameworks whose final releases on the package index hold a rule."""
    return [f.name for f in frameworks.known().values() if f.rule and f.index == "final"]


def add(commands: Any) -> None:
    """Declare the command."""
    p = commands.add_parser(
        "canary",
        help="rules of the newest releases that can't be evaluated",
        description="Reads the newest release of each framework from the package index and asks its rule about the catalog's GPUs and"
        " models. Names every rule that is unknown, with the reason. Exit 1 if there is one, 0 if not, 2 where the index can't be read.",
        epilog="example: nfp canary --framework vllm --gpu h200",
    )
    p.add_argument("--framework", choices=on_index(), action="append", default=[], help="default all; repeatable")
    p.add_argument("--gpu", action="append", default=[], help="catalog name; repeatable (default: every GPU)")
    options.add_until(p)
    p.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Evaluate the rules and print what is unknown.

    Raises UnknownName for an unknown GPU, RuleUnknown where the index can't be read.
    """
    artifacts.read_index_until(given.until)
    gpus = options.gpus(given.gpu)
    count = 0
    for framework in given.framework or on_index():
        release = newest(framework)
        for dtype in ASKED[rule_module(framework)]:
            cases = upgrades.default_cases(Backend(framework, release), gpus, list(catalog.models()), dtype)
            reasons = unknown(cases)
            asked = f"{framework}=={release} {rule_module(framework)} {dtype}"
            print(f"{asked}: {len(cases)} questions, {sum(reasons.values())} unknown")
            for reason, times in reasons.items():
                print(f"  {times} times: {reason}")
            sys.stdout.flush()
            count += sum(reasons.values())
    return EXIT_UNKNOWN if count else 0


def newest(framework: str) -> str:
    """The newest release that is no pre-release.

    Raises UnknownName where there is none, RuleUnknown where the index can't be read.
    """
    releases = [r for r in artifacts.known_releases(framework) if not Version(r).is_prerelease]
    if not releases:
        raise UnknownName(f"the package index has no final release of {framework}")
    return releases[-1]


def unknown(cases: Sequence[Case]) -> dict[str, int]:
    """Reason why a map or its kernel is unknown -> number of cases."""
    counts: dict[str, int] = {}
    for side in upgrades.answer(cases):
        reason = side.unknown
        if side.granularity is not None and side.granularity.kernel == UNKNOWN:
            reason = f"the kernel is unknown: {side.granularity.kernel_reason}"
        if reason:
            counts[reason] = counts.get(reason, 0) + 1
    return counts
