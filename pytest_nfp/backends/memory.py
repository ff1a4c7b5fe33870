"""Is there room for a model? Asked before it is loaded."""

from __future__ import annotations

from pathlib import Path

from pytest_nfp.backends import Unsupported
from pytest_nfp.cases import Case

HEADROOM = 1.15
"""Weights are not all that a model needs: activations, and the copies that packing makes."""


def free_bytes(case: Case) -> int | None:
    """Memory that is free on the case's device; None where the system does not tell."""
    if case.gpu != "cpu":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return int(found.split()[1]) * 1024 if found else None


def require(case: Case, more: int = 0) -> None:
    """Raises Unsupported with the bytes that a whole model needs and those that are free. more: what the engine adds."""
    model = case.subject
    elements = model.weights() + model.cached(case.context or 0, case.batch) + (model.vocabulary or 0) * model.hidden
    needed, free = elements * case.bytes_per_element + more, free_bytes(case)
    if free is not None and needed * HEADROOM > free:
        raise Unsupported(
            f"{model.name} needs {needed * HEADROOM / 1e9:.1f} GB, {free / 1e9:.1f} GB are free on this {case.gpu}"
        )
