"""Engines in a process of their own: what a framework leaves behind, and how it dies, stay there.

One process serves the cases of a framework in turn (its import takes long) and ends with the next framework, with the run, when
a request is given up, and after a case on a GPU, or where a framework can't make a second engine. Requests are JSON lines on its
standard input, answers JSON lines on a pipe that nothing else writes to; what it prints goes into a log, whose last lines are the
reason when it dies.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from pydantic import TypeAdapter

from pytest_nfp.backends import EngineDied, Forward, PreparedEngine, Proof, Unsupported
from pytest_nfp.cases import Case

LAST_LINES = 20
"""Of a dead engine's log, in the record."""
PATIENCE_S = 20.0
"""For a process that was asked to end."""
POLL_S = 1.0
"""Between two looks at whether a process that does not answer is there at all."""
INSIDE = "NFP_ENGINE_PROCESS"
"""Set in such a process: an engine that is prepared there runs there."""

_running: list[Engine] = []


class Engine:
    """The process of one framework."""

    def __init__(self, framework: str) -> None:
        self.framework = framework
        self.own_s = 0.0
        # A file, not a pipe: nobody reads a log while the engine writes it.
        self._log = tempfile.TemporaryFile(prefix="pytest-nfp-engine-")  # noqa: SIM115  # closed with the process
        reading, writing = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pytest_nfp.backends.engine_server", str(writing)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(writing,),
                env={**os.environ, INSIDE: "1", "PYTHONFAULTHANDLER": "1"},
                # Ctrl-C is for the run, which then ends its engine.
                start_new_session=True,
            )
        finally:
            os.close(writing)
        self._answers: IO[bytes] = os.fdopen(reading, "rb")

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def ask(self, doing: str, question: str, **given: Any) -> dict[str, Any]:
        """An answer. Raises RuntimeError with what the engine raised, EngineDied (with `doing`) when there is no engine any more."""
        try:
            line = self._answer({"ask": question, **given}) if self.is_alive else b""
            if not line:
                raise self._died(doing)
        except BaseException:
            # It died, or Ctrl-C, or a time limit: whatever it computes now, nobody will read.
            self.end(wait=False)
            raise
        answer: dict[str, Any] = json.loads(line)
        self.own_s = answer.get("own_s", self.own_s)
        if "refused" in answer:
            raise RuntimeError(answer["refused"])
        return answer

    def _answer(self, asked: dict[str, Any]) -> bytes:
        """The line that answers, empty if there is none to come: a child of a dead engine may hold the pipe open."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
            while not select.select([self._answers], [], [], POLL_S)[0]:
                if not self.is_alive:
                    return b""
            return self._answers.readline()
        except OSError:
            return b""

    def _died(self, doing: str) -> EngineDied:
        if self._log.closed:
            return EngineDied(f"the engine's process was ended {doing}")
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:  # It answers no more, and a thread of it goes on.
            self._kill()
            code = self._process.wait()
        self._log.flush()
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 20_000))
        lines = tuple(self._log.read().decode(errors="replace").strip().splitlines()[-LAST_LINES:])
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        last = lines[-1][:300] if lines else "it printed nothing"
        return EngineDied(f"the engine's process died {doing} ({how}): {last}", lines)

    def end(self, wait: bool = True) -> None:
        """End the process; `wait`: let it finish what it does."""
        if self._log.closed:
            return  # It has ended, and its number may be another's by now.
        assert self._process.stdin is not None
        with suppress(OSError):  # What it was asked last may not have reached it.
            self._process.stdin.close()
        if self.is_alive and wait:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE_S)
        self._kill()
        self._process.wait()
        self._answers.close()
        self._log.close()

    def _kill(self) -> None:
        """The process and all that it has started: they are a group of their own."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def prepare(case: Case, seed: int, cache_bytes: int) -> PreparedEngine:
    """A case's forwards in the process of its framework. Raises Unsupported, EngineDied."""
    engine = _engine_of(case.backend.framework)
    asked: dict[str, Any] = {
        "case": TypeAdapter(Case).dump_python(case, mode="json"),
        "seed": seed,
        "cache_bytes": cache_bytes,
        "threads": _threads(case),
    }
    made = engine.ask("while the engine was prepared", "prepare", **asked)
    if "unsupported" in made:
        # How far it came is not known: the next case gets a process that has not half an engine in it.
        engine.end()
        raise Unsupported(made["unsupported"])
    has = made["has"]

    def forward(positions: int) -> Forward:
        return lambda: float(engine.ask(f"at N={positions}", "run", positions=positions)["us"])

    def proof() -> dict[int, Proof]:
        return {int(n): Proof(*seen) for n, seen in _seen(engine, "proof").items()}

    def at(what: str) -> Callable[[int], Any] | None:
        """A question about an N, where the engine answers it."""
        if what not in has:
            return None
        return lambda n: engine.ask(f"when it was asked for its {what} at N={n}", what, positions=n)["value"]

    def close() -> None:
        """On a GPU the process ends too: as long as it is there it holds memory, and is another process on the device."""
        if not engine.is_alive:
            return
        if not made["alone"] and case.gpu == "cpu":
            with suppress(EngineDied, RuntimeError):  # What it measured stands.
                engine.ask("while it was closed", "close")
                return
        engine.end()

    return PreparedEngine(
        forward,
        made["bytes_per_forward"],
        made["bytes_rotated"],
        made["kernel"],
        made["turns"],
        at("check"),
        at("setting"),
        at("active"),
        proof=proof,
        host=lambda: {int(n): us for n, us in _seen(engine, "host").items()},
        own_timer=True,
        modes=lambda: {int(n): mode for n, mode in _seen(engine, "modes").items()},
        padded=lambda: {int(n): rows for n, rows in _seen(engine, "padded").items()},
        process=lambda: (engine.pid, engine.own_s),
        close=close,
    )


def _seen(engine: Engine, what: str) -> dict[str, Any]:
    found: dict[str, Any] = engine.ask("when it was asked what it had seen", what)["value"]
    return found


def _threads(case: Case) -> int | None:
    """What the run computes with on a CPU: the engine computes with as many."""
    if case.gpu != "cpu":
        return None
    import torch

    return int(torch.get_num_threads())


def _engine_of(framework: str) -> Engine:
    """The process of a framework: the one that runs, or a new one in its place."""
    for engine in [e for e in _running if not e.is_alive or e.framework != framework]:
        engine.end()
        _running.remove(engine)
    if not _running:
        _running.append(Engine(framework))
    return _running[0]


def end_all() -> None:
    """No engine is needed any more."""
    while _running:
        _running.pop().end()


atexit.register(end_all)
