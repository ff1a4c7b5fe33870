"""What once broke a reader, or was written to: read, or refused with one clear error, in less than five seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .hostile import hostile
from .readers import READERS
from .run import SEEDS, attempt

KEPT = sorted((p.parent.name, p) for p in SEEDS.glob("*/*"))


@pytest.mark.parametrize(("name", "seed"), KEPT, ids=[f"{n}-{p.name}" for n, p in KEPT])
def test_what_once_broke_a_reader_is_refused(tmp_path: Path, name: str, seed: Path) -> None:
    """A seed that `make fuzz` kept."""
    path = tmp_path / f"input{READERS[name].suffix}"
    path.write_bytes(seed.read_bytes())
    assert attempt(READERS[name], path) == ""


@pytest.mark.parametrize("name", READERS)
def test_the_examples_are_read(tmp_path: Path, name: str) -> None:
    """What is made hostile is a file that the reader takes, or refuses for what it says alone."""
    for example in READERS[name].examples:
        path = tmp_path / f"input{READERS[name].suffix}"
        path.write_bytes(example)
        assert attempt(READERS[name], path) == ""


@pytest.mark.parametrize("name", READERS)
def test_no_hostile_file_is_a_traceback(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """Some dozens of each; `make fuzz` asks for ten minutes."""
    reader = READERS[name]
    path = tmp_path_factory.mktemp("fuzz") / f"input{reader.suffix}"

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of([hostile(example, reader.suffix) for example in reader.examples]))
    def reads(data: bytes) -> None:
        path.write_bytes(data)
        assert attempt(reader, path) == ""

    reads()
