"""Run lifted Python rules in an isolated interpreter.

One process answers many questions, and answers are kept in the cache. A question is what `sandbox.py` reads: source,
entry, facts for the stubs, arguments, and the counter that is varied.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pytest_nfp.escaping import shortened, shown_line
from pytest_nfp.files import write_atomically
from pytest_nfp.granularity import worker
from pytest_nfp.granularity.artifacts import cache_folder
from pytest_nfp.granularity.maps import RuleUnknown
from pytest_nfp.granularity.query import DeviceFacts, Query

SECONDS_A_QUESTION = 4
"""Processor time that one question may take."""
LONGEST = 400
"""Characters that are shown of a text that a rule wrote."""
LARGEST_TILE, MAX_COUNTS = 1 << 16, 1 << 24
"""Most rows of a tile, and most counts of a run. An answer with more is refused."""
MOST_BROKEN = 2
"""Questions of one batch that may end their interpreter. A release whose rule loops would use its whole
time for each."""
MAX_KERNELS, MAX_RUNS = 2, 1 << 16
ORIGINS = ("installed", "index")
"""Origins whose code runs without all walls too. Installed code can be imported here anyway. For a file on the index
there is the index's digest, which is what pip goes by."""
Runs = list[tuple[int, tuple[int, str | None, int | None, str]]]
"""Runs of equal answers from count 1 on: (number of counts, (tile, tuned file or None, key or None, other
parameters))."""


def question(
    query: Query,
    origin: str,
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
    """A question to the sandbox: which tile a rule gives as `counter` runs from 1 on.

    The tile is the product of the fields named by `result`. origin: of the artifact that holds the rule. texts: the
    only files that the rule sees, by path. The device and the end of the range are the query's.
    """
    return {
        "origin": origin,
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
    """The facts that every question gives the stubs: the device, the environment variables, the triton version."""
    return {
        "device_name": device.name,
        "compute_capability": device.compute_capability,
        "shared_memory_optin": device.shared_memory_optin,
        "triton_version": triton_version,
        "environment": environment or {},
    }


class Answer(BaseModel):
    """One line of the worker, checked: the process that wrote it ran foreign code. It is of exactly one kind."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    number: Annotated[int, Field(ge=0)] = 0
    """Number of the question in its batch, from 0 on."""
    runs: (
        Annotated[
            tuple[
                tuple[
                    Annotated[int, Field(ge=1, le=MAX_COUNTS)],
                    tuple[Annotated[int, Field(ge=1, le=LARGEST_TILE)], str | None, int | None, str],
                ],
                ...,
            ],
            Field(min_length=1, max_length=MAX_RUNS),
        ]
        | None
    ) = None
    """The tiles, as Runs."""
    kernel: str | None = None
    """The backend that FlashInfer's own choice gives."""
    kernels: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_KERNELS)] | None = None
    """The kernels that a release's choice gives."""
    asks_name: Literal[True] | None = None
    """True if the choice compares device names, which the question did not give."""
    unknown: str | None = None
    """Why the rule could not be evaluated."""
    refused: str | None = None
    """Why the worker did not run the rule: the walls that are missing."""
    walls: dict[str, str] = {}
    """By wall: "" where it stood, else the reason why not."""

    @model_validator(mode="after")
    def _is_one(self) -> Answer:
        kinds = (self.runs, self.kernel, self.kernels, self.asks_name, self.unknown, self.refused)
        if sum(k is not None for k in kinds) != 1:
            raise ValueError("an answer is of one kind")
        return self

    @property
    def reason(self) -> RuleUnknown | None:
        """Why the question has no answer. None if it has one."""
        if self.refused is not None:
            return RuleUnknown(
                f"the rule was not evaluated: this machine can't confine code from a folder ({_shown(self.refused)});"
                " give --nfp-trust-artifacts where you trust the folder"
            )
        return (
            RuleUnknown(f"the rule could not be evaluated: {_shown(self.unknown)}")
            if self.unknown is not None
            else None
        )


_trusted: tuple[str, ...] = ORIGINS
_walls: dict[str, str] = {}


def trust_archives(is_trusted: bool) -> None:
    """Run code from a folder also on machines that lack a wall (--nfp-trust-artifacts).

    This is a setting of the process.
    """
    global _trusted  # noqa: PLW0603  # one command, one trust
    _trusted = (*ORIGINS, "archive") if is_trusted else ORIGINS


def walls() -> dict[str, str]:
    """The walls around all rules that were evaluated so far: "" where every rule had the wall, else why not.

    An answer from the cache counts with the walls of its evaluation.
    """
    return dict(_walls)


def missing_walls() -> str:
    """The text of one warning that names the missing walls. "" if none is missing or nothing was evaluated."""
    missing = [f"{name} ({_shown(why)})" for name, why in _walls.items() if why]
    return f"rules were evaluated without {', '.join(missing)}" if missing else ""


def evaluate(questions: Sequence[dict[str, Any]]) -> list[Runs | RuleUnknown]:
    """The runs of each question, or the reason why its rule is unknown."""
    return [_runs(a) for a in _answers(questions)]


def evaluate_attention_backend(question: dict[str, Any]) -> str | RuleUnknown:
    """The backend that FlashInfer's own choice gives, or the reason why it is unknown."""
    answer = _answers([question])[0]
    if answer.reason is not None or answer.kernel is None:
        return answer.reason or _of_another_kind()
    return _shown(answer.kernel)


def evaluate_kernels(
    questions: Sequence[dict[str, Any]], identity: str, shared: Callable[[], dict[str, Any]]
) -> list[list[str] | RuleUnknown]:
    """The kernels of each question, or the reason why they are unknown.

    A device is described by its compute capability alone. If a choice compares device names, the question is asked
    again with the name. shared: returns what all questions have in common, which is the sources of a release. It is
    called only if an answer is not in the cache. identity: stands for the shared part in the cache.
    """
    answers = _answers([q | {"device_name": None} for q in questions], identity, shared)
    by_name = [i for i, a in enumerate(answers) if a.asks_name]
    for i, answer in zip(by_name, _answers([questions[i] for i in by_name], identity, shared), strict=True):
        answers[i] = answer
    return [
        a.reason or ([_shown(k) for k in a.kernels] if a.kernels is not None else _of_another_kind()) for a in answers
    ]


def _of_another_kind() -> RuleUnknown:
    return RuleUnknown("the rule could not be evaluated: its answer is of another kind than the question")


def _answers(
    questions: Sequence[dict[str, Any]], identity: str = "", shared: Callable[[], dict[str, Any]] = dict
) -> list[Answer]:
    keys = [_key(q, identity) for q in questions]
    answers = {k: _cached(k) for k in keys}
    missing = {k: q for k, q in zip(keys, questions, strict=True) if answers[k] is None}
    if missing:
        for key, (answer, is_kept) in zip(missing, _run(list(missing.values()), shared()), strict=True):
            answers[key] = answer
            if is_kept:
                _keep(key, answer)
    complete = [a for k in keys if (a := answers[k]) is not None]
    for answer in complete:
        for name, why in answer.walls.items():
            _walls[name] = why or _walls.get(name, "")
    return complete


def _shown(text: object) -> str:
    """A text that a rule may have written, made harmless and cut to the length of a message."""
    return shortened(shown_line(str(text)), LONGEST)


def _runs(answer: Answer) -> Runs | RuleUnknown:
    if answer.reason is not None or answer.runs is None:
        return answer.reason or _of_another_kind()
    return [(n, (tile, path and _shown(path), key, _shown(others))) for n, (tile, path, key, others) in answer.runs]


def _run(questions: list[dict[str, Any]], shared: dict[str, Any]) -> list[tuple[Answer, bool]]:
    """(answer, whether it may be kept) of each question.

    Each source has its own processes, so that the code of one maker can't write the answers of another's.
    """
    answers = []
    for _, batch in groupby(questions, lambda q: (q["origin"], q.get("source", ""))):
        answers += _run_batch(list(batch), shared)
    return answers


def _run_batch(questions: list[dict[str, Any]], shared: dict[str, Any]) -> list[tuple[Answer, bool]]:
    """(answer, whether it may be kept) of each question, from one process.

    If a rule ends the process, another one answers the questions after it. The answer that ended it is not kept: a rule
    that ran out of time may end in time on a quieter machine.
    """
    answers: list[tuple[Answer, bool]] = []
    broken = 0
    while len(answers) < len(questions):
        if broken == MOST_BROKEN:
            unasked = Answer(unknown=f"not asked: {broken} questions before it ended without an answer")
            answers += [(unasked, False)] * (len(questions) - len(answers))
            break
        answered, reason = _ask(questions[len(answers) :], shared)
        answers += [(a, a.refused is None) for a in answered]
        if reason and len(answers) < len(questions):
            answers.append((Answer(unknown=reason), False))
            broken += 1
    return answers


def _ask(questions: list[dict[str, Any]], shared: dict[str, Any]) -> tuple[list[Answer], str]:
    """The answers up to the question that ended the process, and how it ended; "" if all were answered."""
    request = {"shared": shared, "questions": questions, "seconds": SECONDS_A_QUESTION, "trusted": _trusted}
    written = worker.run(request, SECONDS_A_QUESTION)
    if not written.lines:
        return [], f"the process that evaluates it did not start: {_shown(written.ended)}"
    answers: list[Answer] = []
    try:
        standing = _Walls.model_validate_json(written.lines[0]).walls
        for line in written.lines[1:]:
            answer = Answer.model_validate_json(line)
            if answer.number != len(answers) or len(answers) == len(questions):
                raise ValueError("it answered another question than the one that was asked")
            answers.append(answer.model_copy(update={"walls": standing, "number": 0}))
    except ValueError as error:
        # The message of a pydantic error and its place in the answer are enough.
        return answers[: len(questions) - 1], f"the rule's answer is none: {_first_error(error)}"
    if written.ended or len(answers) < len(questions):
        return answers, f"the rule ended the interpreter: {_shown(written.ended or 'it left without an answer')}"
    return answers, ""


class _Walls(BaseModel):
    """The worker's first line."""

    model_config = ConfigDict(extra="forbid", strict=True)
    walls: dict[str, str]
    """By wall: "" where it stands, else the reason why not."""


def _first_error(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return _shown(f"{where}: {first['msg']}" if where else first["msg"])


@lru_cache(maxsize=1)
def _sandbox_digest() -> bytes:
    return hashlib.sha256(worker.SANDBOX.read_bytes()).digest()


def _key(question: dict[str, Any], identity: str) -> str:
    # Code from a folder has answers of its own, so its origin is a part of the key.
    asked = identity + json.dumps(
        {n: v for n, v in question.items() if n != "origin" or v == "archive"}, sort_keys=True
    )
    return hashlib.sha256(_sandbox_digest() + asked.encode()).hexdigest()


def _cached(key: str) -> Answer | None:
    try:
        path = cache_folder("maps") / key
    except ImportError:  # The base install keeps no cache.
        return None
    try:
        return Answer.model_validate_json(path.read_bytes())
    except (OSError, ValueError):  # Missing or damaged: the question is asked again.
        return None


def _keep(key: str, answer: Answer) -> None:
    with suppress(ImportError, OSError):
        write_atomically(cache_folder("maps") / key, answer.model_dump_json(exclude_defaults=True))
