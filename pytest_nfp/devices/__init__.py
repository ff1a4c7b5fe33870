"""The device that forwards run on: identity, clock, cache size and signs that a measurement can't be trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pytest_nfp import catalog


@dataclass(frozen=True, slots=True)
class Device:
    """A device at hand.

    gpu: its catalog name, or cpu. identity: what decides the kernels and the speed, compared between runs. time_us: runs
    a forward once and returns its latency in microseconds. cache_bytes: last-level cache. busy: a reading of other
    processes' use, as a function from a past reading to the share in between. versions: of the libraries that matter.
    """

    gpu: str
    title: str
    identity: dict[str, Any]
    time_us: Callable[[Callable[[], object]], float]
    cache_bytes: int
    load: Callable[[], tuple[float, float, float]]
    torch_release: str
    notes: dict[str, Any] = field(default_factory=dict)


def find_device(gpu: str) -> tuple[Device | None, str]:
    """The device for a catalog name, or None and the one reason why it is not here."""
    try:
        import torch
    except ImportError:
        extra = "cpu" if gpu == "cpu" else "torch"
        return None, f"torch is not installed, so nothing can be measured: pip install 'pytest-nfp[{extra}]'"
    if gpu == "cpu":
        from pytest_nfp.devices import cpu

        return cpu.device(), ""
    if not torch.cuda.is_available():
        return None, f"no {gpu} here: torch {torch.__version__} sees no GPU"
    from pytest_nfp.devices import cuda

    name = torch.cuda.get_device_name(0)
    if name not in catalog.gpu(gpu).driver_names:
        return None, f"no {gpu} here: the device is {name}"
    return cuda.device(gpu), ""


def detect() -> str:
    """The catalog name of the device here, for --nfp-gpu=auto: the GPU if there is one, else cpu.

    Raises UnknownName for a GPU that the catalog lacks.
    """
    try:
        import torch
    except ImportError:
        return "cpu"
    return catalog.gpu(torch.cuda.get_device_name(0)).name if torch.cuda.is_available() else "cpu"
