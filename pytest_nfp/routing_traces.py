"""Routings by name, and routing traces: which experts each token of a real run was sent to, `token,expert,expert,...`."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from pytest_nfp.files import FileError
from pytest_nfp.principle.routing import Replay, Routing, check_routing

TRACE = "trace:"


WHOLE = re.compile(r" *[0-9]{1,9} *")


def parse_routing(text: str) -> Routing:
    """A routing by its name, or `trace:FILE`. Raises ValueError for an unknown one, FileError for a trace that can't be used."""
    if text.startswith(TRACE):
        return read_trace(Path(text.removeprefix(TRACE)))
    try:
        return check_routing(text)
    except ValueError as error:
        raise ValueError(f"{error}; or trace:FILE with a line `token,expert,expert,...` for each token") from None


def read_trace(path: Path) -> Replay:
    """The trace in the order of its lines. Raises FileError with the line that can't be used.

    One line a token: its number, then the experts that it was sent to. A first line of names is skipped.
    """
    try:
        with path.open(encoding="utf-8", newline="") as f:
            rows = list(csv.reader(f))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{path}: can't be read: {error}") from error
    tokens: list[tuple[int, ...]] = []
    for number, row in enumerate(rows, 1):
        if not row or (number == 1 and not WHOLE.fullmatch(row[0])):
            continue
        if not all(WHOLE.fullmatch(cell) for cell in row):
            raise FileError(f"{path}:{number}: not a token and its experts as whole numbers: {','.join(row)[:60]!r}")
        experts = tuple(int(cell) for cell in row[1:])
        if not experts or len(set(experts)) < len(experts):
            raise FileError(f"{path}:{number}: a token needs at least one expert, each named once")
        if tokens and len(experts) != len(tokens[0]):
            raise FileError(f"{path}:{number}: {len(experts)} experts, the lines before have {len(tokens[0])}")
        tokens.append(experts)
    if not tokens:
        raise FileError(f"{path}: no token: write one line a token, such as 0,17,203")
    return Replay(tuple(tokens))
