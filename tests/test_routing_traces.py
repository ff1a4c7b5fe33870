"""A routing trace is read as it is, and a line that can't be used is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nfp.files import FileError
from pytest_nfp.principle.routing import Replay
from pytest_nfp.routing_traces import read_trace


def test_a_trace_is_the_experts_of_each_token_in_order(tmp_path: Path) -> None:
    """With a line of names or without; empty lines are skipped."""
    path = tmp_path / "t.csv"
    path.write_text("token,first,second\n0,3,1\n\n1, 2, 0\n")
    assert read_trace(path) == Replay(((3, 1), (2, 0)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,1,2\n1,x,3\n", "t.csv:2: not a token and its experts"),
        ("0,1,1\n", "t.csv:1: a token needs at least one expert, each named once"),
        ("0\n", "t.csv:1: a token needs at least one expert"),
        ("0,1,2\n1,3\n", "t.csv:2: 1 experts, the lines before have 2"),
        ("token,expert\n", "no token: write one line a token"),
    ],
)
def test_a_line_that_cant_be_used_is_named(tmp_path: Path, text: str, message: str) -> None:
    """File and line, and what is wrong."""
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(FileError, match=message):
        read_trace(path)
