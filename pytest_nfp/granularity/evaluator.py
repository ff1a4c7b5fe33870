"""Run lifted Python rules in an isolated interpreter, many questions a process, answers kept in the cache.

A question is what `sandbox.py` reads: source, entry, stubs' facts, arguments, and the counter that is varied.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_nfp.files import write_atomically
from pytest_nfp.granularity.artifacts import cache_folder
from pytest_nfp.granularity.maps import RuleUnknown
from pytest_nfp.granularity.query import DeviceFacts, Query

SANDBOX = Path(__file__).with_name("sandbox.py")
TIMEOUT_S = 60
Runs = list[tuple[int, tuple[int, str | None, int | None, str]]]
"""(how many counts in a row, (tile, tuned file or None, key or None, other parameters)), from count 1 on."""


def question(
    query: Query,
    source: str,
    file: str,
    entry: str,
    arguments: dict[str, Any],
    counter: str,
    result: Sequence[str],
    texts: dict[str, str] | None = None,
    environment: dict[str, str] | None = None,
    triton_version: str = "",
) -> dict[str, Any]:
    """What the sandbox is asked of a rule: the tile (the product of `result`'s fields) as `counter` runs from 1 on.

    texts: the only files that the rule sees, by path. The device and the end of the range are the query's.
    """
    return {
        "source": source,
        "file": file,
        "entry": entry,
        "texts": texts or {},
        **surroundings(query.device, environment, triton_version),
        "arguments": arguments,
        "counter": counter,
        "max_count": query.max_count,
        "result": list(result),
    }


def surroundings(
    device: DeviceFacts, environment: dict[str, str] | None = None, triton_version: str = ""
) -> dict[str, Any]:
    """What every question tells the stubs: the device, the environment variables, the triton."""
    return {
        "device_name": device.name,
        "compute_capability": device.compute_capability,
        "shared_memory_optin": device.shared_memory_optin,
        "triton_version": triton_version,
        "environment": environment or {},
    }


def evaluate(questions: Sequence[dict[str, Any]]) -> list[Runs | RuleUnknown]:
    """The runs of each question, or the reason why its rule is unknown."""
    return [_runs(a) for a in _answers(questions)]


def evaluate_kernels(questions: Sequence[dict[str, Any]]) -> list[str | RuleUnknown]:
    """The kernel of each question, or the reason why it is unknown."""
    return [_unknown(a) or str(a["kernel"]) for a in _answers(questions)]


def _answers(questions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = [_key(q) for q in questions]
    answers = {k: _cached(k) for k in keys}
    missing = {k: q for k, q in zip(keys, questions, strict=True) if answers[k] is None}
    if missing:
        for key, answer in zip(missing, _run(list(missing.values())), strict=True):
            answers[key] = answer
            _keep(key, answer)
    return [a for k in keys if (a := answers[k]) is not None]


def _unknown(answer: dict[str, Any]) -> RuleUnknown | None:
    return RuleUnknown(f"the rule could not be evaluated: {answer['unknown']}") if "unknown" in answer else None


def _runs(answer: dict[str, Any]) -> Runs | RuleUnknown:
    if unknown := _unknown(answer):
        return unknown
    return [(count, (tile, path, key, others)) for count, (tile, path, key, others) in answer["runs"]]


def _run(questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One isolated interpreter for all; where it dies, each question gets one of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(SANDBOX)],
            input=json.dumps(questions),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={},
        )
    except subprocess.TimeoutExpired:
        reason = f"the rule did not end within {TIMEOUT_S} s"
    else:
        if done.returncode == 0:
            answers: list[dict[str, Any]] = json.loads(done.stdout)
            return answers
        last = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        reason = f"{last[0]} (time or memory limit)"
    if len(questions) == 1:
        return [{"unknown": reason}]
    return [_run([q])[0] for q in questions]


@lru_cache(maxsize=1)
def _sandbox_digest() -> bytes:
    return hashlib.sha256(SANDBOX.read_bytes()).digest()


def _key(question: dict[str, Any]) -> str:
    return hashlib.sha256(_sandbox_digest() + json.dumps(question, sort_keys=True).encode()).hexdigest()


def _cached(key: str) -> dict[str, Any] | None:
    try:
        path = cache_folder("maps") / key
    except ImportError:  # The base install keeps no cache.
        return None
    if not path.exists():
        return None
    answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return answer


def _keep(key: str, answer: dict[str, Any]) -> None:
    # What ran out of time may end on a quieter machine: it is asked again.
    if "limit" in answer.get("unknown", "") or "did not end" in answer.get("unknown", ""):
        return
    try:
        write_atomically(cache_folder("maps") / key, json.dumps(answer))
    except (ImportError, OSError):
        return
