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


def require(case: Case, needed: int, what: str) -> None:
    """Raises Unsupported with the bytes that are needed and those that are free."""
    free = free_bytes(case)
    if free is not None and needed * HEADROOM > free:
        raise Unsupported(
            f"{what} needs {needed * HEADROOM / 1e9:.1f} GB, {free / 1e9:.1f} GB are free on this {case.gpu}"
        )
