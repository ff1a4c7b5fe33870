"""An engine in a process of its own: asked as if it were here, and its death is a case's, not the run's."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_nfp import backends, registry
from pytest_nfp.backends import EngineDied, PreparedEngine, Unsupported, engine_client
from pytest_nfp.cases import Backend, Case
from pytest_nfp.catalog import Attention, Dense, Model
from pytest_nfp.devices.lock import TooLong, time_limit
from pytest_nfp.measure import composition
from pytest_nfp.run import whole_model
from pytest_nfp.run.session import Session
from pytest_nfp.settings import Settings
from tests.conftest import PROJECT
from tests.test_registry import package

CODE = """
import os, subprocess, sys, time
from pytest_nfp.backends import PreparedEngine, Proof, Unsupported

def prepare(case, seed, cache_bytes):
    if case.context == 7:
        raise Unsupported("seven is not for me")
    if case.context == 8:
        os._exit(5)
    seen = {}
    def forward(n):
        def run():
            if case.context == 9 and n == 4:
                print("CUDA error: an illegal memory access", file=sys.stderr, flush=True)
                os._exit(3)
            if n == 999:
                raise ValueError("too many positions")
            if n == 996:
                raise Unsupported("no room for so many")
            if n == 998:
                time.sleep(600)
            if n == 997:
                subprocess.Popen(["sleep", "600"])
                os.kill(os.getpid(), 9)
            if case.context == 10 and n == 4:
                os.kill(os.getpid(), 9)
            seen[n] = Proof(case.batch * n, case.batch * case.context)
            return 100.0 + n
        return run
    close = (lambda: os._exit(4)) if case.context == 11 else lambda: None
    return PreparedEngine(forward, 1, 10**9, "mine", 1, close=close, proof=lambda: dict(seen), own_timer=True,
                    host=lambda: {n: 200.0 for n in seen}, check=lambda n: "" if n != 63 else "wrong", active=lambda n: 2 * n,
                    setting=lambda n: {"rows": n}, modes=lambda: {n: "graph" for n in seen})
"""
HEADS = Attention(heads=2, kv_heads=1, head_dim=64)
SMALL = Model(
    name="small", layers=2, hidden=128, dense=Dense(width=256, matrices=3), attention=HEADS, vocabulary=256, source="t"
)
MINE = Backend("my-kernels", "1.2")


def alive_in_group(group: int) -> list[str]:
    """Processes of a group that are not merely waiting for somebody to read how they ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, in_group = path.read_text(encoding="utf-8").rpartition(")")[2].split()[:3]
        except OSError:
            continue  # It has just ended.
        found += [path.parent.name] if int(in_group) == group and state != "Z" else []
    return found


def prepare(case: Case, seed: int, cache_bytes: int) -> PreparedEngine:
    """A whole model's forwards."""
    prepared = backends.prepare(case, seed, cache_bytes)
    assert isinstance(prepared, PreparedEngine)
    return prepared


def case(context: int = 128) -> Case:
    return Case("cpu", MINE, "model", SMALL, "fp32", batch=2, context=context)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package(tmp_path, CODE, '"my-kernels.model" = "my_kernels"')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    registry.registered.cache_clear()
    yield
    engine_client.end_all()
    registry.registered.cache_clear()


def test_an_engine_answers_from_its_own_process() -> None:
    """Times, proof, host times and graph modes are those of the engine; nothing of it was imported here; a second case of the
    framework is served by the same process, and closing leaves none.
    """
    prepared = prepare(case(), 0, 1)
    assert [prepared.forward(n)() for n in (1, 4, 1)] == [101.0, 104.0, 101.0]
    assert prepared.proof is not None and prepared.host is not None and prepared.modes is not None
    assert prepared.proof() == {1: (2, 256), 4: (8, 256)}
    assert (prepared.host(), prepared.modes()) == ({1: 200.0, 4: 200.0}, {1: "graph", 4: "graph"})
    assert prepared.check is not None and prepared.active is not None and prepared.setting is not None
    assert (prepared.check(1), prepared.check(63), prepared.active(4), prepared.setting(4)) == (
        "",
        "wrong",
        8,
        {"rows": 4},
    )
    assert "my_kernels" not in sys.modules
    assert prepared.process is not None and prepared.close is not None
    pid, _ = prepared.process()
    assert pid != os.getpid()
    prepared.close()
    again = prepare(case(64), 0, 1)
    assert again.process is not None and again.process()[0] == pid
    engine_client.end_all()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_the_engine_refuses_is_said_here() -> None:
    """An N that it refuses raises with its words, a case that it can't run is Unsupported; both leave it alive."""
    prepared = prepare(case(), 0, 1)
    with pytest.raises(RuntimeError, match="ValueError: too many positions"):
        prepared.forward(999)()
    with pytest.raises(RuntimeError, match="no room for so many"):
        prepared.forward(996)()
    assert prepared.forward(1)() == 101.0
    with pytest.raises(Unsupported, match="seven is not for me"):
        backends.prepare(case(7), 0, 1)


def test_a_dead_engine_leaves_its_last_lines() -> None:
    """When it died, how, and what it printed; killed from outside as well; the next case gets a new process."""
    prepared = prepare(case(9), 0, 1)
    with pytest.raises(EngineDied, match=r"at N=4 \(exit code 3\): CUDA error: an illegal memory access") as died:
        prepared.forward(4)()
    assert died.value.log == ("CUDA error: an illegal memory access",)
    with pytest.raises(EngineDied, match="while the engine was prepared"):
        backends.prepare(case(8), 0, 1)
    fresh = prepare(case(), 0, 1)
    assert fresh.process is not None
    os.kill(fresh.process()[0], signal.SIGKILL)
    with pytest.raises(EngineDied, match="signal 9"):
        fresh.forward(2)()


def test_a_request_that_takes_too_long_ends_the_engine() -> None:
    """The time limit of a case reaches a hanging engine: its process is gone."""
    prepared = prepare(case(), 0, 1)
    assert prepared.process is not None
    pid, _ = prepared.process()
    with pytest.raises(TooLong), time_limit(0.5):
        prepared.forward(998)()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_an_engine_started_ends_with_it_and_keeps_nobody_waiting() -> None:
    """A child that holds the engine's pipe open: its death is seen at once, and the child is ended too."""
    prepared = prepare(case(), 0, 1)
    assert prepared.process is not None
    pid, _ = prepared.process()
    began = time.monotonic()
    with pytest.raises(EngineDied, match="signal 9"):
        prepared.forward(997)()
    assert time.monotonic() - began < 60  # The child lives for ten minutes.
    deadline = time.monotonic() + 20
    while (left := alive_in_group(pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_an_engine_that_dies_is_invalid_and_the_other_cases_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record has its last lines and what was measured of it; the next case is measured; its own load is not another's."""

    def nothing(*_: object) -> composition.Composition:
        raise composition.NotComposed("not here")

    monkeypatch.setattr(composition, "measure", nothing)
    monkeypatch.setattr(whole_model, "_floor_us", lambda inputs, case: 1.0)
    session = Session(Settings(gpu=("cpu",), backend=("my-kernels",), protocol="quick"), PROJECT)
    dead = session.check_boundary(case(9))
    assert dead.outcome == "INVALID"
    assert "the engine's process died at N=4 (exit code 3): CUDA error" in dead.reasons[0]
    record = session.results.cases[case(9).id]
    assert record.log == ["CUDA error: an illegal memory access"]
    session.check_boundary(case())
    record = session.results.cases[case().id]
    assert record.proof[8] == (16, 256)
    assert record.modes[8] == "graph"
    silent = session.check_boundary(case(10))
    assert (silent.outcome, "signal 9" in silent.reasons[0], "it printed nothing" in silent.reasons[0]) == (
        "INVALID",
        True,
        True,
    )
    session.check_boundary(case(11))
    record = session.results.cases[case(11).id]
    assert (record.kind, record.proof[8]) == (
        "measured",
        (16, 22),
    )  # It died when it was closed: what it measured stands.
    unprepared = session.check_boundary(case(8))
    assert (unprepared.outcome, "exit code 5" in unprepared.reasons[0]) == ("INVALID", True)
