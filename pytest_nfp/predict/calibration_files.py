"""A calibration as catalog/calibrations.yaml and a machine's own file hold it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pytest_nfp.principle import Calibration


class Fitted(BaseModel):
    """A calibration as catalog/calibrations.yaml and a machine's own file hold it.

    kind: of what it was fitted to. error: median |T predicted / T - 1| on held-out shapes; within_one_step: share of
    held-out curves whose N_max lies within one grid step; spread and latency_spread: the middle 95% of the
    predicted over the recorded T(N)/T(N0) where that is at most 2, and over the recorded T; covered: share whose recorded
    N_max lies in the interval from the spread. The few curves of a machine's own calibration are not alike in their points: its
    spread is widened until 95% of them are covered.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    gpu: str
    framework: str
    kernel: str
    module: Literal["dense", "moe", "attention"]
    dtype: str
    flops: Annotated[float, Field(gt=0)]
    bandwidth: Annotated[float, Field(gt=0)]
    overlap: Annotated[float, Field(ge=1)]
    reread: Annotated[float, Field(ge=0, le=1)]
    fixed_us: Annotated[float, Field(ge=0)]
    tile_shares: tuple[tuple[int, float], ...]
    block_us: Annotated[float, Field(ge=0)]
    processors: Annotated[int, Field(gt=0)]
    activation: Annotated[float, Field(ge=0)] | None
    curves: int
    shapes: int
    error: float
    within_one_step: float
    covered: float
    spread: tuple[float, float]
    latency_spread: tuple[float, float]
    releases: tuple[str, ...]
    source: str
    sha256: str
    kind: Literal["recorded", "measured"] = "recorded"

    @property
    def key(self) -> tuple[str, str, str, str]:
        """GPU, framework, kernel, dtype: one calibration each."""
        return self.gpu, self.framework, self.kernel, self.dtype

    def residuals_path(self, calibrations: Path) -> Path:
        """Where the residuals lie, beside the file of the calibrations."""
        return calibrations.parent / "residuals" / f"{'-'.join(self.key)}.json"

    def calibration(self) -> Calibration:
        """What the tile roofline runs on."""
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
    """catalog/calibrations.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_: Literal[1] = Field(alias="schema")
    calibrations: tuple[Fitted, ...]


def text_of(fitted: Sequence[Fitted]) -> str:
    """The file's text: a stable order, the same bytes for the same recordings."""
    import yaml

    # What is recorded is not said: no field but `kind` has a default.
    rows = [f.model_dump(mode="json", exclude_defaults=True) for f in sorted(fitted, key=lambda f: f.key)]
    body: str = yaml.safe_dump({"schema": 1, "calibrations": rows}, sort_keys=False, default_flow_style=None, width=140)
    return "# Written by `nfp calibrate`: the tile roofline fitted to recorded or measured curves.\n" + body
