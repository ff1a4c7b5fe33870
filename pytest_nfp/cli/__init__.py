"""The console script `nfp`. Each command is a module with `add`, which declares its options, and `run`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pytest_nfp.catalog import UnknownName
from pytest_nfp.cli import baselines, calibrate, canary, certify, deploy, granularity, judge, predict, report, upgrade
from pytest_nfp.files import FileError
from pytest_nfp.granularity import RuleUnknown, evaluator
from pytest_nfp.recordings.errors import NoRecording

EXIT_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Exit code: 0 done, 1 something changed or failed, 2 bad input, 3 undecided."""
    parser = argparse.ArgumentParser(
        prog="nfp",
        description="Near-free parallelism: how many decode positions one forward can process nearly for free.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (predict, deploy, granularity, upgrade, judge, report, certify, baselines, calibrate, canary):
        command.add(commands)
    given = parser.parse_args(arguments)
    evaluator.trust_archives(getattr(given, "trust_artifacts", False))
    try:
        code: int = given.run(given)
    except (UnknownName, FileError, NoRecording, RuleUnknown, ValueError) as error:
        print(f"nfp {given.command}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:  # The reader of a pipe stopped early, as in `nfp ... | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        if missing := evaluator.missing_walls():
            print(f"nfp {given.command}: warning: {missing}", file=sys.stderr)
    return code
