"""Each way out of the evaluator is held, by all walls and with every single one switched off; with none of them it is a way out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .escapes import ESCAPES, WALLS, Escape, attempt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the walls are Linux's")
REFUSED_BY_MACHINES = ("io_uring", "tracing", "memory of another process", "shared memory")
"""What some machines refuse everybody."""
ON_ONE_WALL = ("format string", "format string of a mapping", "format in an f-string")
"""They read a value of the worker's own as text, which no system call shows: `check` alone refuses them."""


def names(escape: Escape) -> str:
    return escape.name.replace(" ", "-")


def test_there_are_at_least_sixty_ways_out() -> None:
    """Each with a name of its own."""
    assert len({e.name for e in ESCAPES}) == len(ESCAPES) >= 60


@pytest.mark.parametrize("escape", ESCAPES, ids=names)
def test_a_way_out_is_one_without_walls(tmp_path: Path, escape: Escape) -> None:
    """Else the next test would hold whatever the walls do."""
    worked = attempt(escape, tmp_path / "scene", WALLS)
    if not worked and escape.name in REFUSED_BY_MACHINES:
        pytest.skip("this machine refuses it to everybody")
    assert worked


@pytest.mark.parametrize("escape", ESCAPES, ids=names)
def test_a_way_out_is_held_without_any_single_wall(tmp_path: Path, escape: Escape) -> None:
    """With all of them, and with one switched off in turn: none but those that are known rests on a single wall."""
    through = [w for w in (None, *WALLS) if attempt(escape, tmp_path / f"scene-{w}", [w] if w else [])]
    assert through == (["language"] if escape.name in ON_ONE_WALL else [])
