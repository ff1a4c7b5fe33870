"""Options that several commands share, and how their texts are parsed."""

from __future__ import annotations

import argparse
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any, get_args

from pytest_nfp import catalog, frameworks
from pytest_nfp.cases import Backend, parse_backend
from pytest_nfp.catalog import Gpu, Model, UnknownName
from pytest_nfp.catalog.parallel import Parallel, on_rank
from pytest_nfp.granularity import artifacts, check_release, evaluator
from pytest_nfp.principle.routing import Routing
from pytest_nfp.routing_traces import parse_routing
from pytest_nfp.settings import Dtype

DTYPES: tuple[str, ...] = get_args(Dtype)
DTYPE = "bf16"
"""The dtype of the weights unless an option gives another."""


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return value


def add_artifacts(parser: argparse.ArgumentParser) -> None:
    """Declare --artifacts and --trust-artifacts."""
    parser.add_argument("--artifacts", type=Path, help="folder of wheels and source archives to read rules from")
    parser.add_argument(
        "--trust-artifacts",
        "--nfp-trust-artifacts",
        action="store_true",
        help="evaluate rules of that folder even where this machine can't confine them (no Landlock, no seccomp)",
    )


def with_walls(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer for --json, with the walls that confined the evaluation of rules: "" where one stood, else why not."""
    return answer | {"walls": evaluator.walls()}


def day(text: str) -> datetime:
    """The end of a day, UTC."""
    try:
        return datetime.combine(date.fromisoformat(text), time(), UTC) + timedelta(days=1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a date such as 2026-11-30, got {text!r}") from None


def add_until(parser: argparse.ArgumentParser) -> None:
    """Declare --until."""
    parser.add_argument(
        "--until",
        type=day,
        metavar="DATE",
        help="read the package index as it stood at the end of this day (UTC), such as 2026-11-30: the answer stays the same"
        " when releases are published (default: as it is now)",
    )


class _Renamed(argparse.Action):
    """An option of an earlier release. It gives an error that names its replacement."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(f"{self.option_strings[0]} is gone: {self.metavar}")


def add_renamed(parser: argparse.ArgumentParser, option: str, instead: str) -> None:
    """Declare an option that is gone. instead: what to give in its place, as the error message says it."""
    parser.add_argument(option, action=_Renamed, metavar=instead, help=argparse.SUPPRESS, default=argparse.SUPPRESS)


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Declare --gpu, --model and --dtype. The default is every GPU and model of the catalog."""
    parser.add_argument("--gpu", action="append", default=[], help="catalog name; repeatable (default: every GPU)")
    parser.add_argument(
        "--model", action="append", default=[], help="catalog name or config.json; repeatable (default: every model)"
    )
    add_dtype(parser)


def add_parallel(parser: argparse.ArgumentParser, help_text: str = "") -> None:
    """Declare --parallel."""
    parser.add_argument("--parallel", default="tp1", help=help_text or "ranks: tp8 (tensor), ep8 (expert); default tp1")


def add_dtype(parser: argparse.ArgumentParser, **more: Any) -> None:
    """Declare --dtype, the dtype of the weights. A command that can't answer for a dtype reports that itself."""
    declared: dict[str, Any] = {"choices": DTYPES, "default": DTYPE, "help": f"weights (default {DTYPE})"} | more
    parser.add_argument("--dtype", **declared)


def routing(text: str) -> Routing:
    """The routing that --routing names. Raises UnknownName, FileError."""
    try:
        return parse_routing(text)
    except ValueError as error:
        raise UnknownName(f"--routing {error}") from None


def gpus(names: list[str]) -> list[Gpu]:
    """The GPUs of --gpu, else all. Raises UnknownName."""
    return [catalog.gpu(n) for n in names] or list(catalog.gpus())


def models(names: list[str], parallel: Parallel) -> list[Model]:
    """The models of --model, else all that this parallelism can cut, as one rank holds them. Raises UnknownName."""
    if names:
        return [on_rank(catalog.model(n), parallel) for n in names]
    rank_models = []
    for model in catalog.models():
        try:
            rank_models.append(on_rank(model, parallel))
        except UnknownName:
            continue
    return rank_models


def release(text: str, option: str = "") -> Backend:
    """A backend with a release: the installed one where none is given. Raises UnknownName."""
    backend = parse_backend(text)
    if backend.release:
        return backend
    installed = artifacts.installed_release(backend.framework)
    if installed is None:
        raise UnknownName(
            f"{option} {text}: it is not installed, so give a release: {backend.framework}==1.2.3".strip()
        )
    return Backend(backend.framework, installed)


def existing(backend: Backend, archives: Path | None) -> Backend:
    """The backend with its release as the package index writes it.

    Raises UnknownName for a release that is known not to exist.
    """
    framework = frameworks.get(backend.framework)
    if (
        framework is None or framework.index != "none"
    ):  # Without an index the rule is recorded, or read from a source tree.
        return Backend(backend.framework, check_release(backend.framework, backend.release, archives))
    return backend
