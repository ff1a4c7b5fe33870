"""What one forward is: a module per framework and kind, registered by entry point, imported when a forward is built.

A backend module has `prepare(case, seed, cache_bytes) -> Prepared`. Inputs and weights are made once for a case, outside
any timing; weights (or KV) are held in several banks, taken in turn, so that a forward finds none of them in the cache.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.version import Version

from pytest_nfp import frameworks, registry
from pytest_nfp.devices import Device, Forward, nothing

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from pytest_nfp.cases import Case

__all__ = [
    "EngineDied",
    "Forward",
    "Prepared",
    "PreparedEngine",
    "Proof",
    "Unsupported",
    "banks_needed",
    "prepare",
    "prepare_on",
    "quiet",
]


MAX_POSITIONS = 1024
"""New positions of a request that a KV cache is made for, beside its context."""
REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError, ImportError, OSError)
"""What a framework raises where it can't run: memory, dimensions, an argument that a newer release has moved."""


class Unsupported(Exception):
    """The backend can't run this case here; the message says why."""


class EngineDied(Exception):
    """The process of an engine ended by itself; the message says when and how, `log` holds its last lines."""

    def __init__(self, message: str, log: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.log = log


class Proof(NamedTuple):
    """What a forward of a whole model was seen to process: token rows of all requests, over how many cached tokens of them."""

    tokens: int
    cached: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A kernel's forwards of one case, ready to be timed."""

    forward: Callable[[int], Forward]
    """N -> the callable that is timed."""
    bytes_per_forward: int
    """Weights or KV that one forward reads, at N0."""
    bytes_rotated: int
    """Bytes read before one of them is read again: held against the size of the last-level cache."""
    kernel: str
    """The operator's name."""
    turns: int
    """Forwards after which the banks begin again."""
    check: Callable[[int], str] | None = None
    """N -> what is wrong with the result, empty for nothing; None where there is no reference."""
    setting: Callable[[int], dict[str, Any]] | None = None
    """N -> the tile configuration that the framework's own selector returns; None where it has none."""
    active: Callable[[int], int] | None = None
    """N -> how many experts a forward reads; None where that is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEngine(Prepared):
    """A whole model's forwards on its engine. What it saw is told for each N that has run."""

    proof: Callable[[], dict[int, Proof]]
    """What a forward was seen to process."""
    host: Callable[[], dict[int, float]] = dict
    """Median microseconds that a step takes beside its forward, which alone is T; empty where nothing is taken apart."""
    modes: Callable[[], dict[int, str]] = dict
    """The graph mode: graph, eager."""
    padded: Callable[[], dict[int, int]] = dict
    """Token rows that the graph was made for, where there is one."""
    own_timer: bool = False
    """Whether a run returns its own microseconds: those of the forward inside a step."""
    process: Callable[[], tuple[int, float]] | None = None
    """The id of the process that the engine runs in, and the processor seconds that it has used; None for this process."""
    alone: bool = False
    """Whether no second engine can be made in its process."""
    close: Callable[[], None] = nothing
    """Ends the engine."""


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """Build a case's forwards; a full model's in a process of its own. Raises Unsupported with the reason, EngineDied."""
    point = registry.registered().get((case.backend.framework, case.module))
    if point is None:
        raise Unsupported(f"no forward is built for {case.backend.framework}'s {case.module} module")
    framework = frameworks.get(case.backend.framework)
    oldest = framework.oldest if framework is not None else ""
    if case.gpu != "cpu" and oldest and Version(case.backend.release) < Version(oldest):
        raise Unsupported(f"{case.backend} is too old: its forwards are known from {oldest} on")
    if case.module == "model":
        from pytest_nfp.backends import engine_client

        if engine_client.INSIDE not in os.environ:
            return engine_client.prepare(case, seed, cache_bytes)
    with quiet():
        return _prepared(point, case, seed, cache_bytes)


def prepare_on(device: Device, case: Case, seed: int) -> Prepared:
    """A case's forwards for a device: by the registered backend, unless the device brings its own. Raises as `prepare`."""
    build = device.prepare or prepare
    prepared: Prepared = build(case, seed, device.cache_bytes)
    return prepared


def _prepared(point: EntryPoint, case: Case, seed: int, cache_bytes: int) -> Prepared:
    framework = case.backend.framework
    try:
        module = point.load()
    except ImportError as error:
        raise _not_importable(framework, error) from error
    except Exception as error:
        # A framework that breaks while it is imported must not take the run with it.
        raise Unsupported(f"{framework} breaks at import: {type(error).__name__}: {error}") from error
    try:
        prepared: Prepared = module.prepare(case, seed, cache_bytes)
    except ImportError as error:
        raise _not_importable(framework, error) from error
    except REFUSALS as error:
        # Weights that do not fit, most of all: the framework's first line says how many bytes it asked for.
        said = str(error) or type(error).__name__
        raise Unsupported(f"{framework} can't be prepared: {said}".splitlines()[0]) from error
    if case.module == "model" and not isinstance(prepared, PreparedEngine):
        raise Unsupported(
            f"{framework}'s backend of whole models returned a {type(prepared).__name__}, not a PreparedEngine"
        )
    return prepared


@contextmanager
def quiet() -> Iterator[None]:
    """What a framework warns of is its own: a run that takes warnings as errors must not end by them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _not_importable(framework: str, error: ImportError) -> Unsupported:
    if error.name == "torch":
        return Unsupported("torch is not installed: pip install 'pytest-nfp[cpu]'")
    if new_name := registry.moved(error):
        return Unsupported(f"{framework}'s backend was written for an older pytest-nfp: {new_name}")
    known = frameworks.get(framework)
    hint = ""
    if known is not None and known.extra and error.name == known.package:
        hint = f": pip install 'pytest-nfp[{known.extra}]'"
    return Unsupported(f"{framework} can't be imported here: {error}{hint}")


def most_positions(case: Case) -> int:
    """New positions that a KV cache is made for: MAX_POSITIONS, and as far as a sweep goes from an N0 that few experts a token put high."""
    return max(MAX_POSITIONS, 16 * case.baseline_positions)


def require_room(case: Case, positions: int) -> None:
    """Raises Unsupported for more new positions than the case's KV cache is made for."""
    if positions > (most := most_positions(case)):
        raise Unsupported(f"the KV cache was made for {most} new positions, not {positions}")


def banks_needed(bank_bytes: int, cache_bytes: int) -> int:
    """How many banks to rotate so that a bank has left the cache when it is read again: two cache sizes in between."""
    return max(2, 1 + -(-2 * cache_bytes // bank_bytes))
