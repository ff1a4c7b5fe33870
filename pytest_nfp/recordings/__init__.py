"""Curves that others measured and published: NVIDIA AIConfigurator's tables, read where they are installed."""

from __future__ import annotations

from pytest_nfp.cases import Backend, Case
from pytest_nfp.curves.curve import Curve
from pytest_nfp.recordings import case_curves, tables
from pytest_nfp.recordings.errors import NoRecording

__all__ = ["NoRecording", "recorded_curve", "recorded_releases"]


def recorded_releases(gpu: str, module: str) -> list[Backend]:
    """The backend releases with a recording for a GPU and module, oldest first. Empty without the extra."""
    return tables.releases(gpu, module)


def recorded_curve(case: Case) -> Curve:
    """The recorded curve of a case. Raises NoRecording with the one reason."""
    return case_curves.curve(case)
