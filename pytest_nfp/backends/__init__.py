"""What one forward is: a module per framework and kind, imported when a forward is built.

A backend module has `prepare(case, seed, cache_bytes) -> Prepared`. Inputs and weights are made once for a case, outside
any timing; weights (or KV) are held in several banks, taken in turn, so that a forward finds none of them in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from pytest_nfp.devices import Forward

if TYPE_CHECKING:
    from pytest_nfp.cases import Case

_MODULES = {
    ("torch", "dense"): "pytest_nfp.backends.torch_dense",
    ("torch", "moe"): "pytest_nfp.backends.torch_moe",
    ("torch", "attention"): "pytest_nfp.backends.torch_attention",
}


__all__ = ["Forward", "Prepared", "Unsupported", "banks_needed", "prepare"]


class Unsupported(Exception):
    """The backend can't run this case here; the message says why."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case ready to run: `forward(N)` builds the callable that is timed.

    bytes_per_forward: weights or KV that one forward reads (at N0); bytes_rotated: what is read before a byte is read
    again, to be held against the cache size. kernel: the operator by name. turns: forwards after which the banks begin
    again.
    """

    forward: Callable[[int], Forward]
    bytes_per_forward: int
    bytes_rotated: int
    kernel: str
    turns: int


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """Build a case's forwards. Raises Unsupported with the reason."""
    name = _MODULES.get((case.backend.framework, case.module))
    if name is None:
        raise Unsupported(f"no forward is built for {case.backend.framework}'s {case.module} module")
    try:
        module = import_module(name)
    except ImportError as error:
        raise Unsupported(f"{error.name} is not installed: pip install 'pytest-nfp[cpu]'") from error
    prepared: Prepared = module.prepare(case, seed, cache_bytes)
    return prepared


def banks_needed(bank_bytes: int, cache_bytes: int) -> int:
    """How many banks to rotate so that a bank has left the cache when it is read again: two cache sizes in between."""
    return max(2, 1 + -(-2 * cache_bytes // bank_bytes))
