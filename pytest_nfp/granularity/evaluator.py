"""Run lifted Python rules in an isolated interpreter, many questions a process, answers kept in the cache.

A question is what `sandbox.py` reads: source, entry, stubs' facts, arguments, and the counter that is varied.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_nfp.escaping import shown_line
from pytest_nfp.files import write_atomically
from pytest_nfp.granularity.artifacts import cache_folder
from pytest_nfp.granularity.maps import RuleUnknown
from pytest_nfp.granularity.query import DeviceFacts, Query

SANDBOX = Path(__file__).with_name("sandbox.py")
SECONDS_A_QUESTION = 6
"""Processor time that one question may take."""
TIMEOUT_S = 60
LONGEST = 400
"""Characters of a text of a rule that are shown."""
LARGEST_TILE, MAX_COUNTS = 1 << 16, 1 << 24
"""Rows of a tile, and counts of a run: what is larger is no answer."""
MOST_BROKEN = 2
"""Questions of one batch that may end their interpreter: a release whose rule loops would take its time for each."""
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


def evaluate_attention_backend(question: dict[str, Any]) -> str | RuleUnknown:
    """The backend that FlashInfer's own choice gives, or the reason why it is unknown."""
    found = _answers([question])[0]
    return _unknown(found) or str(found["kernel"])


def evaluate_kernels(
    questions: Sequence[dict[str, Any]], identity: str, shared: Callable[[], dict[str, Any]]
) -> list[list[str] | RuleUnknown]:
    """The kernels of each question, or the reason why they are unknown.

    Devices are asked about by their compute capability alone; a choice that compares their names is asked again with them. shared: what all questions have in common, a release's sources. They are read only where an answer is not kept yet;
    `identity` stands for them in the cache.
    """
    answers = _answers([q | {"device_name": None} for q in questions], identity, shared)
    by_name = [i for i, a in enumerate(answers) if "asks_name" in a]
    for i, answer in zip(by_name, _answers([questions[i] for i in by_name], identity, shared), strict=True):
        answers[i] = answer
    return [_unknown(a) or [str(k) for k in a["kernels"]] for a in answers]


def _answers(
    questions: Sequence[dict[str, Any]], identity: str = "", shared: Callable[[], dict[str, Any]] = dict
) -> list[dict[str, Any]]:
    keys = [_key(q, identity) for q in questions]
    answers = {k: _cached(k) for k in keys}
    missing = {k: q for k, q in zip(keys, questions, strict=True) if answers[k] is None}
    if missing:
        for key, answer in zip(missing, _run(list(missing.values()), shared()), strict=True):
            answers[key] = answer
            _keep(key, answer)
    return [a for k in keys if (a := answers[k]) is not None]


def _unknown(answer: dict[str, Any]) -> RuleUnknown | None:
    return RuleUnknown(f"the rule could not be evaluated: {_shown(answer['unknown'])}") if "unknown" in answer else None


def _shown(text: object) -> str:
    """A text that a rule may have written, made harmless and not longer than a message."""
    said = shown_line(str(text))
    return said if len(said) <= LONGEST else f"{said[:LONGEST]} ..."


def _runs(answer: dict[str, Any]) -> Runs | RuleUnknown:
    """The runs of an answer, checked: it comes from code of another maker."""
    if unknown := _unknown(answer):
        return unknown
    runs: Runs = []
    for count, (tile, path, key, others) in answer["runs"]:
        is_map = _is_whole(count, MAX_COUNTS) and _is_whole(tile, LARGEST_TILE) and isinstance(others, str)
        if not is_map or not (path is None or isinstance(path, str)) or not (key is None or isinstance(key, int)):
            return RuleUnknown(f"the rule's answer is no tile: {_shown(repr(tile))}")
        runs.append((count, (tile, path and _shown(path), key, _shown(others))))
    return runs


def _is_whole(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _run(questions: list[dict[str, Any]], shared: dict[str, Any]) -> list[dict[str, Any]]:
    """An isolated interpreter for all; where a rule ends it, another one for those that come after."""
    answers: list[dict[str, Any]] = []
    broken = 0
    while len(answers) < len(questions):
        if broken == MOST_BROKEN:
            left = len(questions) - len(answers)
            answers += [{"unknown": f"not asked: {broken} questions before it ended without an answer (limit)"}] * left
            break
        found, reason = _ask(questions[len(answers) :], shared)
        answers += found
        if reason and len(answers) < len(questions):
            answers.append({"unknown": reason})
            broken += 1
    return answers


def _ask(questions: list[dict[str, Any]], shared: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The answers up to the one that ended the interpreter, and how it ended; "" where all were answered."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(SANDBOX)],
            input=json.dumps({"shared": shared, "questions": questions, "seconds": SECONDS_A_QUESTION}),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={},
        )
        written, errors, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as expired:
        partial = expired.stdout or b""
        written = partial.decode() if isinstance(partial, bytes) else partial
        errors, code = f"it did not end within {TIMEOUT_S} s", 1
    answers = [json.loads(line) for line in written.splitlines(keepends=True) if line.endswith("\n")]
    if code == -signal.SIGXCPU:
        return answers, f"the rule did not end within {SECONDS_A_QUESTION} s of processor time"
    if code or len(answers) < len(questions):
        last = errors.strip().splitlines()[-1:] or [f"exit {code}"]
        return answers, f"the rule ended the interpreter: {last[0]} (time or memory limit)"
    return answers, ""


@lru_cache(maxsize=1)
def _sandbox_digest() -> bytes:
    return hashlib.sha256(SANDBOX.read_bytes()).digest()


def _key(question: dict[str, Any], identity: str) -> str:
    asked = identity + json.dumps(question, sort_keys=True)
    return hashlib.sha256(_sandbox_digest() + asked.encode()).hexdigest()


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
