"""Run lifted Python rules in an isolated interpreter, many questions a process, answers kept in the cache.

A question is what `sandbox.py` reads: source, entry, stubs' facts, arguments, and the counter that is varied.
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
"""Characters of a text of a rule that are shown."""
LARGEST_TILE, MAX_COUNTS = 1 << 16, 1 << 24
"""Rows of a tile, and counts of a run: what is larger is no answer."""
MOST_BROKEN = 2
"""Questions of one batch that may end their interpreter: a release whose rule loops would take its time for each."""
MAX_KERNELS, MAX_RUNS = 2, 1 << 16
ORIGINS = ("installed", "index")
"""Where code may come from that runs without all walls: it can be imported here, or the index has its digest, as pip wants it."""
Runs = list[tuple[int, tuple[int, str | None, int | None, str]]]
"""(how many counts in a row, (tile, tuned file or None, key or None, other parameters)), from count 1 on."""


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
    """What the sandbox is asked of a rule: the tile (the product of `result`'s fields) as `counter` runs from 1 on.

    origin: of the artifact that holds the rule. texts: the only files that the rule sees, by path. The device and the end of the range are the query's.
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
    """What every question tells the stubs: the device, the environment variables, the triton."""
    return {
        "device_name": device.name,
        "compute_capability": device.compute_capability,
        "shared_memory_optin": device.shared_memory_optin,
        "triton_version": triton_version,
        "environment": environment or {},
    }


class Answer(BaseModel):
    """One line of the worker, checked: it comes from a process that ran code of another maker."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    number: Annotated[int, Field(ge=0)] = 0
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
    kernel: str | None = None
    kernels: Annotated[tuple[str, ...], Field(min_length=1, max_length=MAX_KERNELS)] | None = None
    asks_name: Literal[True] | None = None
    unknown: str | None = None
    refused: str | None = None
    """Why the worker did not run the rule: the walls that are missing."""
    walls: dict[str, str] = {}
    """By wall: "" where it stood, else why not."""

    @model_validator(mode="after")
    def _is_one(self) -> Answer:
        kinds = (self.runs, self.kernel, self.kernels, self.asks_name, self.unknown, self.refused)
        if sum(k is not None for k in kinds) != 1:
            raise ValueError("an answer is of one kind")
        return self

    @property
    def reason(self) -> RuleUnknown | None:
        """Why there is no answer."""
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
    """Run code from a folder on machines that lack a wall too (--nfp-trust-artifacts). A setting of the process."""
    global _trusted  # noqa: PLW0603  # one command, one trust
    _trusted = (*ORIGINS, "archive") if is_trusted else ORIGINS


def walls() -> dict[str, str]:
    """The walls around the rules that were evaluated so far, now or when their answers were kept: "" where all had it, else why not."""
    return dict(_walls)


def missing_walls() -> str:
    """The walls that are missing here, in words, for one warning; "" where none is or nothing was evaluated."""
    missing = [f"{name} ({_shown(why)})" for name, why in _walls.items() if why]
    return f"rules were evaluated without {', '.join(missing)}" if missing else ""


def evaluate(questions: Sequence[dict[str, Any]]) -> list[Runs | RuleUnknown]:
    """The runs of each question, or the reason why its rule is unknown."""
    return [_runs(a) for a in _answers(questions)]


def evaluate_attention_backend(question: dict[str, Any]) -> str | RuleUnknown:
    """The backend that FlashInfer's own choice gives, or the reason why it is unknown."""
    found = _answers([question])[0]
    if found.reason is not None or found.kernel is None:
        return found.reason or _of_another_kind()
    return _shown(found.kernel)


def evaluate_kernels(
    questions: Sequence[dict[str, Any]], identity: str, shared: Callable[[], dict[str, Any]]
) -> list[list[str] | RuleUnknown]:
    """The kernels of each question, or the reason why they are unknown.

    Devices are asked about by their compute capability alone; a choice that compares their names is asked again with
    them. shared: what all questions have in common, a release's sources. They are read only where an answer is not kept
    yet; `identity` stands for them in the cache.
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
    found = [a for k in keys if (a := answers[k]) is not None]
    for answer in found:
        for name, why in answer.walls.items():
            _walls[name] = why or _walls.get(name, "")
    return found


def _shown(text: object) -> str:
    """A text that a rule may have written, made harmless and not longer than a message."""
    return shortened(shown_line(str(text)), LONGEST)


def _runs(answer: Answer) -> Runs | RuleUnknown:
    if answer.reason is not None or answer.runs is None:
        return answer.reason or _of_another_kind()
    return [(n, (tile, path and _shown(path), key, _shown(others))) for n, (tile, path, key, others) in answer.runs]


def _run(questions: list[dict[str, Any]], shared: dict[str, Any]) -> list[tuple[Answer, bool]]:
    """(answer, whether it may be kept) of each. What one maker's code writes can't stand for another's: each source has its processes."""
    answers = []
    for _, batch in groupby(questions, lambda q: (q["origin"], q.get("source", ""))):
        answers += _run_batch(list(batch), shared)
    return answers


def _run_batch(questions: list[dict[str, Any]], shared: dict[str, Any]) -> list[tuple[Answer, bool]]:
    """One process for all; where a rule ends it, another one for those that come after.

    What ended a process is not kept: a rule that ran out of time may end on a quieter machine.
    """
    answers: list[tuple[Answer, bool]] = []
    broken = 0
    while len(answers) < len(questions):
        if broken == MOST_BROKEN:
            why = Answer(unknown=f"not asked: {broken} questions before it ended without an answer")
            answers += [(why, False)] * (len(questions) - len(answers))
            break
        found, reason = _ask(questions[len(answers) :], shared)
        answers += [(a, a.refused is None) for a in found]
        if reason and len(answers) < len(questions):
            answers.append((Answer(unknown=reason), False))
            broken += 1
    return answers


def _ask(questions: list[dict[str, Any]], shared: dict[str, Any]) -> tuple[list[Answer], str]:
    """The answers up to the one that ended the process, and how it ended; "" where all were answered."""
    request = {"shared": shared, "questions": questions, "seconds": SECONDS_A_QUESTION, "trusted": _trusted}
    written = worker.run(request, SECONDS_A_QUESTION)
    if not written.lines:
        return [], f"the process that evaluates it did not start: {_shown(written.ended)}"
    answers: list[Answer] = []
    try:
        stood = _Walls.model_validate_json(written.lines[0]).walls
        for line in written.lines[1:]:
            answer = Answer.model_validate_json(line)
            if answer.number != len(answers) or len(answers) == len(questions):
                raise ValueError("it answered another question than the one that was asked")
            answers.append(answer.model_copy(update={"walls": stood, "number": 0}))
    except ValueError as error:
        # Of a pydantic error the first line and the place are enough.
        return answers[: len(questions) - 1], f"the rule's answer is none: {_first_error(error)}"
    if written.ended or len(answers) < len(questions):
        return answers, f"the rule ended the interpreter: {_shown(written.ended or 'it left without an answer')}"
    return answers, ""


class _Walls(BaseModel):
    """The worker's first line."""

    model_config = ConfigDict(extra="forbid", strict=True)
    walls: dict[str, str]


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
    # An answer of code from a folder stands for that code alone.
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
    except (OSError, ValueError):  # Not there, or damaged: it is asked again.
        return None


def _keep(key: str, answer: Answer) -> None:
    with suppress(ImportError, OSError):
        write_atomically(cache_folder("maps") / key, answer.model_dump_json(exclude_defaults=True))
