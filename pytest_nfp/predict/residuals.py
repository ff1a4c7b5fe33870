"""What the tile roofline leaves over, interpolated from the recorded curves nearby (kriging).

    log r(x) = sum over recorded points i of  w_i * exp(-|x - x_i|)       predicted T = tile roofline * r

x is the place of a forward: its shape, its rows and the tile configuration that runs, as logarithms over a length scale
each. The weights w solve (K + NOISE * I) w = log(recorded / tile roofline) over the points that were fitted. Far from
every recorded point r is 1.

A GEMM's library publishes no tile. Rows up to the next 16, 64 and 128 and the last wave of thread blocks stand in for
it: these are where libraries switch kernels. A CPU's kernel has neither tiles nor waves here. Its residuals depend
above all on its rows, and a little on its shape.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from pytest_nfp.files import read_json
from pytest_nfp.granularity import Granularity

Floats = Any
"""A numpy array of floats: numpy is imported where it is used."""
NOISE = 0.1
UNIT = 1e-4
"""Weights are stored as whole multiples of this."""
PARAMETERS = {"BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}
"""Parameters of a tile configuration that count beside its rows, with the value that is used if a rule does not set
them."""
MOE_SCALES = (2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0)
"""Length scales of log experts, k, hidden, width; of log rows per expert, tile, padding; then of log PARAMETERS."""
GEMM_SCALES = (2.0, 2.0, 1.0, 0.3, 0.7, 0.7, 0.5, 0.5)
"""Length scales of log n, k, rows, rows up to 16, 64, 128; of the last wave of 64 x 128 and of 128 x 256 blocks."""
CPU_SHAPE_SCALE = 4.0
"""Length scale of the log of every dimension of the shape."""
CPU_ROWS_SCALE = 0.3
"""Length scale of the log of the rows: of a GEMM, of an expert, or of a request's queries."""
CPU_NOISE = 0.3
"""NOISE on a CPU, where a forward is measured a few times on a machine that others may use."""
GEMM_ROWS = frozenset(
    {
        *(1, 2, 4, 8, 16, 17, 32, 33, 48, 49, 64, 65, 80, 81, 96, 97, 112, 113, 128, 129, 160, 161, 192, 193),
        *(224, 225, 256, 257, 320, 384, 385, 448, 512, 513, 640, 768, 1024, 1536, 2048, 3072, 4096),
    }
)
"""Rows of a GEMM whose residuals are kept: both sides of every edge, and a few in between."""


class Place(NamedTuple):
    """Where a forward stands among the residuals."""

    shape: tuple[int, ...]
    """(n, k) of a GEMM, (experts, k, hidden, width), or (heads, head dimension, context) of attention."""
    rows: int
    """Rows of a GEMM, tokens, or query positions."""
    setting: tuple[int, ...] = ()
    """Tile rows and PARAMETERS (experts on a GPU), else empty."""
    on_cpu: bool = False
    """Whether the kernel is a CPU's."""


def setting_at(granularity: Granularity | None, rows: int) -> tuple[int, ...]:
    """The tile configuration at a row count. The tile of a kernel without tiles is 1 row."""
    if granularity is None or not granularity.has_tiles:
        return (1, *PARAMETERS.values())
    parameters = []
    for name, default in PARAMETERS.items():
        rule = granularity.parameter_rule(name)
        parameters.append((rule(rows) if rule is not None else 0) or default)
    return (granularity.tile(rows), *parameters)


def coordinates(place: Place, processors: int) -> list[float]:
    """The place in units of the length scales."""
    if place.on_cpu:
        return _cpu_coordinates(place)
    rows = place.rows
    scales: tuple[float, ...]
    if len(place.shape) == 2:
        n, k = place.shape
        padded = [math.log(-(-rows // step)) for step in (16, 64, 128)]
        waves = [_last_wave(rows, n, *block, processors) for block in ((64, 128), (128, 256))]
        raw, scales = [math.log(n), math.log(k), math.log(rows), *padded, *waves], GEMM_SCALES
    else:
        experts, top_k, hidden, width = place.shape
        tile, *parameters = place.setting
        each = rows * top_k / experts
        # A tile that an expert's rows fill has no padding.
        padding = math.log(max(1.0, math.ceil(each / tile) * tile / each))
        shape = [math.log(v) for v in (experts, top_k, hidden, width)]
        raw = [*shape, math.log(each), math.log(tile), padding, *(math.log(max(1, p)) for p in parameters)]
        scales = MOE_SCALES
    return [value / scale for value, scale in zip(raw, scales, strict=True)]


def _cpu_coordinates(place: Place) -> list[float]:
    shape, rows = place.shape, float(place.rows)
    if len(shape) == 4:  # A token goes to k of the experts: the rows are those of one expert.
        rows *= shape[1] / shape[0]
    return [*(math.log(v) / CPU_SHAPE_SCALE for v in shape), math.log(rows) / CPU_ROWS_SCALE]


def _last_wave(rows: int, columns: int, tall: int, wide: int, processors: int) -> float:
    """Log of the whole waves that such blocks take, over their waves with the last one counted by its filled share."""
    waves = -(-rows // tall) * -(-columns // wide) / processors
    return math.log(math.ceil(waves) / waves)


@dataclass(frozen=True, slots=True)
class Residuals:
    """Recorded places with their weights."""

    places: Floats
    """[points, dimensions] in length scales."""
    weights: Floats
    """[points]"""
    processors: int
    """Multiprocessors, from which the last wave is computed."""

    def log_ratio(self, places: Sequence[Place]) -> list[float]:
        """Log r at each of these places."""
        import numpy as np

        wanted = np.array([coordinates(p, self.processors) for p in places])
        log_ratios: list[float] = (_kernel(wanted, self.places) @ self.weights).tolist()
        return log_ratios


def _kernel(a: Floats, b: Floats) -> Floats:
    import numpy as np

    # |a - b|^2 by its three terms: no array of [a, b, dimensions].
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None, :] - 2 * a @ b.T
    kernel: Floats = np.exp(-np.sqrt(np.maximum(squares, 0.0)))
    return kernel


def krige(places: Sequence[Place], log_ratios: Sequence[float], processors: int) -> Residuals:
    """The residuals of these points, from log(recorded / tile roofline) at each place."""
    import numpy as np
    from scipy.linalg import cho_factor, cho_solve

    points = np.array([coordinates(p, processors) for p in places])
    kernel = _kernel(points, points)
    kernel[np.diag_indices_from(kernel)] = 1 + (CPU_NOISE if places[0].on_cpu else NOISE)
    factor = cho_factor(kernel, overwrite_a=True, check_finite=False)
    weights = np.round(cho_solve(factor, np.array(log_ratios), check_finite=False) / UNIT) * UNIT
    return Residuals(points, weights, processors)


class _Curve(BaseModel):
    """The points of one shape."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    shape: tuple[int, ...]
    """Shape of the places."""
    rows: tuple[int, ...]
    """Rows of each point."""
    settings: tuple[int, ...]
    """For each point, the index into the file's settings."""
    weights: tuple[int, ...]
    """Weight of each point, in UNITs."""


class ResidualsFile(BaseModel):
    """catalog/residuals/<gpu>-<framework>-<kernel>-<dtype>.json, or the same beside a machine's own calibrations."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_: Literal[1] = Field(alias="schema")
    processors: int
    """Multiprocessors, from which the last wave is computed."""
    on_cpu: bool = False
    """Whether the kernel is a CPU's."""
    settings: tuple[tuple[int, ...], ...]
    """The tile configurations that the curves refer to."""
    curves: tuple[_Curve, ...]
    """The points, by shape."""


def text_of(places: Sequence[Place], residuals: Residuals) -> str:
    """The file's text. places: those that were kriged, in order."""
    settings = sorted({p.setting for p in places})
    number = {s: i for i, s in enumerate(settings)}
    curves: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for place, weight in zip(places, residuals.weights.tolist(), strict=True):
        # Two releases may have measured the same place. Each point keeps its weight.
        curves.setdefault(place.shape, []).append((place.rows, number[place.setting], round(weight / UNIT)))
    rows: list[dict[str, Any]] = []
    for shape, points in sorted(curves.items()):
        points.sort()
        rows.append(
            {
                "shape": shape,
                "rows": [p[0] for p in points],
                "settings": [p[1] for p in points],
                "weights": [p[2] for p in points],
            }
        )
    head = {"schema": 1, "processors": residuals.processors, "settings": settings}
    if places[0].on_cpu:
        head["on_cpu"] = True
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    return json.dumps(head)[:-1] + ', "curves": [\n' + lines + "\n]}\n"


@lru_cache(maxsize=32)
def read(path: Path) -> Residuals:
    """The residuals of a file. Raises FileError for a file that can't be used."""
    import numpy as np

    content = read_json(path, ResidualsFile)
    points = [
        coordinates(Place(c.shape, rows, content.settings[s], content.on_cpu), content.processors)
        for c in content.curves
        for rows, s in zip(c.rows, c.settings, strict=True)
    ]
    weights = [w * UNIT for c in content.curves for w in c.weights]
    return Residuals(np.array(points), np.array(weights), content.processors)
