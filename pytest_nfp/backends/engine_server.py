"""The other side of engine_client.py: prepares engines and runs their forwards as it is asked, until its standard input ends."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from pytest_nfp import backends
from pytest_nfp.backends import REFUSALS, Forward, PreparedEngine, Unsupported
from pytest_nfp.cases import Case


class Served:
    """The engine that is prepared now, and its clock."""

    def __init__(self) -> None:
        self._prepared: PreparedEngine | None = None
        self._timed: Callable[[Forward], float] | None = None
        self._runs: dict[int, Forward] = {}

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What the request asks for. Raises what the framework raises."""
        match asked["ask"]:
            case "prepare":
                return self._prepare(asked)
            case "close":
                self._close()
                return {}
            case "run":
                return {"us": self._run(asked["positions"])}
            case "check" | "setting" | "active" as what:
                ask = getattr(self._prepared, what)
                return {"value": ask(asked["positions"])}
            case what:
                assert self._prepared is not None
                return {"value": getattr(self._prepared, what)()}

    def _prepare(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._close()
        case = TypeAdapter(Case).validate_python(asked["case"])
        if asked["threads"] is not None:
            import torch

            torch.set_num_threads(asked["threads"])
        try:
            prepared = backends.prepare(case, asked["seed"], asked["cache_bytes"])
        except Unsupported as reason:
            return {"unsupported": str(reason)}
        assert isinstance(prepared, PreparedEngine)  # as backends.prepare requires
        self._prepared = prepared
        if not prepared.own_timer:
            self._timed = _clock(case)
        questions = ("check", "setting", "active")
        has = [name for name in questions if getattr(prepared, name) is not None]
        figures = {
            name: getattr(prepared, name) for name in ("bytes_per_forward", "bytes_rotated", "kernel", "turns", "alone")
        }
        return {**figures, "has": has}

    def _run(self, positions: int) -> float:
        assert self._prepared is not None
        if positions not in self._runs:
            self._runs[positions] = self._prepared.forward(positions)
        run = self._runs[positions]
        if self._timed is not None:
            return self._timed(run)
        import torch

        with torch.inference_mode():
            took = run()
        assert isinstance(took, float)
        return took

    def _close(self) -> None:
        if self._prepared is not None:
            self._prepared.close()
        self._prepared = self._timed = None
        self._runs.clear()


def _clock(case: Case) -> Callable[[Forward], float]:
    """The clock of an engine that does not time its own forward."""
    if case.gpu == "cpu":
        from pytest_nfp.devices import cpu

        return cpu.time_us
    from pytest_nfp.devices import cuda

    return cuda.time_us


def main() -> None:
    """Serve. An error that no framework is expected to raise ends the process, with its trace in the log."""
    served = Served()
    os.set_inheritable(int(sys.argv[1]), False)
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as answers:
        for line in sys.stdin:
            try:
                answer = served.answer(json.loads(line))
            except (*REFUSALS, Unsupported) as error:
                answer = {"refused": f"{type(error).__name__}: {error}"}
            answer["own_s"] = sum(os.times()[:4])
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
