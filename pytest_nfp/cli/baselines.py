"""nfp baselines: list, show, check and prune stored baselines."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pytest_nfp.baselines import prune
from pytest_nfp.baselines.prune import Stored
from pytest_nfp.cli import options


def add(commands: Any) -> None:
    """Declare the command and its verbs."""
    p = commands.add_parser(
        "baselines",
        help="list, show, check and prune stored baselines",
        description="The files of baselines/<gpu>/<framework>-<release>/<model>.yaml.",
        epilog="example: nfp baselines check    |    nfp baselines prune --dry-run --keep 2",
    )
    verbs = p.add_subparsers(dest="verb", required=True)
    for verb, text in (
        ("list", "a line a file: cases, how many of them are measured or recorded, what is wrong with it"),
        ("show", "a file's cases with what they say"),
        ("check", "exit 1 where a file can't be read, is unused or stale"),
        ("prune", "remove files and cases that are unused or stale; what can't be read stays"),
    ):
        v = verbs.add_parser(verb, help=text, description=text)
        v.add_argument("--baselines", type=Path, default=Path("baselines"), metavar="DIR", help="default: baselines")
        v.add_argument("--gpu", help="of this GPU alone")
        v.add_argument(
            "--keep",
            type=options.positive,
            default=prune.KEEP,
            help=f"releases that are not stale (default {prune.KEEP})",
        )
        v.add_argument(
            "--older-than",
            type=options.positive,
            metavar="DAYS",
            help="a file is stale when its last commit (git) is older than this",
        )
        if verb == "prune":
            v.add_argument("--dry-run", action="store_true", help="say what would be removed")
        if verb == "show":
            v.add_argument("name", nargs="*", help="parts of the path, such as h200 vllm-0.24.0 mixtral")
    p.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """List, show, check or prune. Raises FileError."""
    from pytest_nfp.escaping import shown_line
    from pytest_nfp.files import FileError

    if not given.baselines.is_dir():
        raise FileError(
            f"{given.baselines}: no such folder; give one by --baselines, or write it by --nfp-update=missing"
        )
    today = datetime.now(UTC).date()
    stored_files = [
        s for s in prune.stored(given.baselines, today, given.keep, given.older_than) if given.gpu in (None, s.gpu)
    ]
    if given.verb == "show":
        matching = [s for s in stored_files if all(part in str(s.path) for part in given.name)]
        if not matching:
            raise FileError(f"no file of {given.baselines} has {' and '.join(given.name)} in its path")
        for s in matching:
            _show(s)
        return 0
    for s in stored_files:
        if given.verb == "list" or not s.is_fine:
            print(shown_line(_line(s)))
        if given.verb == "prune" and not s.is_fine and not s.error:
            removed = "would be removed" if given.dry_run else "removed"
            what = f"{len(s.unused)} cases" if s.unused and not s.stale else "the file"
            if given.dry_run or prune.prune(s):
                print(f"  {what} {removed}")
    wrong = sum(not s.is_fine for s in stored_files)
    print(f"{len(stored_files)} files, {wrong} unreadable, unused or stale")
    return 1 if given.verb == "check" and wrong else 0


def _line(s: Stored) -> str:
    if s.file is None:
        return f"{s.path}: {s.error}"
    kinds = [c.measured.kind for c in s.file.cases.values() if c.measured is not None]
    counts = ", ".join(f"{kinds.count(k)} {k}" for k in ("measured", "recorded") if k in kinds) or "predicted"
    remarks = [
        s.error,
        s.unknown and f"not the catalog's: {s.unknown}",
        s.stale,
        f"unused: {', '.join(s.unused)}" if s.unused else "",
    ]
    return f"{s.path}: {len(s.file.cases)} cases, {counts}" + "".join(f"; {text}" for text in remarks if text)


def _show(s: Stored) -> None:
    from pytest_nfp.baselines import difference
    from pytest_nfp.escaping import shown_line

    print(shown_line(_line(s)))
    if s.file is None:
        return
    for line in difference(None, s.file):
        print(shown_line(f"  {line.replace(': new, ', ': ', 1)}"))
    for name, value in s.file.provenance.items():
        print(shown_line(f"  {name}: {value}"))
