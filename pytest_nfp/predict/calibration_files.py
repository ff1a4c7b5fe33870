"""A calibration as catalog/calibrations.yaml and a machine's own file hold it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pytest_nfp.principle import Calibration


class Fitted(BaseModel):
    """A calibration as catalog/calibrations.yaml and a machine's own file hold it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    gpu: str
    """Catalog name of the GPU, or cpu."""
    framework: str
    """Framework whose kernel was calibrated."""
    kernel: str
    """Kernel, such as triton or gemm."""
    module: Literal["dense", "moe", "attention"]
    """Module that the kernel computes."""
    dtype: str
    """Number format, such as bf16."""
    flops: Annotated[float, Field(gt=0)]
    """FLOP/s that the kernel reaches."""
    bandwidth: Annotated[float, Field(gt=0)]
    """Bytes/s that the kernel reaches."""
    overlap: Annotated[float, Field(ge=1)]
    """Overlap exponent of the tile roofline."""
    reread: Annotated[float, Field(ge=0, le=1)]
    """Share in [0, 1] of a tile's re-reads that miss the last-level cache."""
    fixed_us: Annotated[float, Field(ge=0)]
    """Fixed cost in microseconds."""
    tile_shares: tuple[tuple[int, float], ...]
    """(tile rows, share of `flops` that tiles of at most so many rows reach)."""
    block_us: Annotated[float, Field(ge=0)]
    """A thread block's own time in microseconds."""
    processors: Annotated[int, Field(gt=0)]
    """Multiprocessors over which thread blocks are spread."""
    activation: Annotated[float, Field(ge=0)] | None
    """Factor on the time that the activations' bytes take at full bandwidth. None: they count with the weights."""
    curves: int
    """Number of curves that it was fitted to."""
    shapes: int
    """Number of different shapes among the curves."""
    error: float
    """Median of |T predicted / T - 1| on held-out shapes."""
    within_one_step: float
    """Share of the held-out curves whose N_max lies within one grid step."""
    covered: float
    """Share of the held-out curves whose recorded N_max lies in the interval from `spread`."""
    spread: tuple[float, float]
    """Middle 95% of the predicted over the recorded T(N)/T(N0), where that is at most 2. The few curves of a machine's
    own calibration differ in their points, so its spread is widened until it covers 95% of them."""
    latency_spread: tuple[float, float]
    """Middle 95% of the predicted over the recorded T."""
    releases: tuple[str, ...]
    """Releases of the framework among the curves."""
    source: str
    """Where the curves come from."""
    sha256: str
    """Digest of what the curves were read from."""
    kind: Literal["recorded", "measured"] = "recorded"
    """Whether it was fitted to recorded curves or to curves measured on this machine."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """(GPU, framework, kernel, dtype). There is one calibration for each key."""
        return self.gpu, self.framework, self.kernel, self.dtype

    def residuals_path(self, calibrations: Path) -> Path:
        """Path of the residuals. They lie beside the file of the calibrations."""
        return calibrations.parent / "residuals" / f"{'-'.join(self.key)}.json"

    def calibration(self) -> Calibration:
        """The numbers that the tile roofline runs on."""
        return Calibration(
            self.flops,
            self.bandwidth,
            self.overlap,
            self.reread,
            self.fixed_us,
            self.tile_shares,
            self.block_us,
            self.processors,
            self.activation,
        )


class CalibrationsFile(BaseModel):
    """The content of catalog/calibrations.yaml or of a machine's own file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_: Literal[1] = Field(alias="schema")
    calibrations: tuple[Fitted, ...]


def text_of(fitted: Sequence[Fitted]) -> str:
    """The file's text in a stable order: the same recordings give the same bytes."""
    import yaml

    # Only `kind` has a default, `recorded`, and is left out where it has that value.
    rows = [f.model_dump(mode="json", exclude_defaults=True) for f in sorted(fitted, key=lambda f: f.key)]
    body: str = yaml.safe_dump({"schema": 1, "calibrations": rows}, sort_keys=False, default_flow_style=None, width=140)
    return "# Written by `nfp calibrate`: the tile roofline fitted to recorded or measured curves.\n" + body
