"""The fit finds planted numbers, keeps shapes apart, and gives none where there is nothing to fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from pytest_nfp.calibration import cross_validation, fit, kernel_work
from pytest_nfp.calibration.fit import NoFit
from pytest_nfp.calibration.kernel_work import Joined
from pytest_nfp.catalog import CALIBRATIONS
from pytest_nfp.granularity import Granularity, Range
from pytest_nfp.predict import calibration_files
from pytest_nfp.predict.calibration_files import CalibrationsFile
from pytest_nfp.principle import Calibration, Point
from pytest_nfp.recordings.library import RecordedCurve

GRID = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
MAP = Granularity(
    "vllm", "9", "moe", "bf16", "NVIDIA H200", (Range(1, 32, 16), Range(33, 96, 32), Range(97, 512, 64), Range(513, 8192, 128)),
    "triton", "", "a", "b", "index", parameters=((1, 64, "BLOCK_SIZE_N=64"), (65, 8192, "BLOCK_SIZE_N=128")),
)  # fmt: skip
PLANTED = Calibration(
    989.5e12, 0.8 * 4.8e12, 3.0, 0.3, 20.0, ((16, 0.3), (32, 0.4), (64, 0.6), (128, 0.7)), 0.5, 132, 1.5
)
SHAPES = [(e, k, d, f) for e, k in ((64, 8), (128, 8), (16, 2)) for d in (2048, 4096) for f in (768, 1536, 3072)]


def joined(c: Calibration = PLANTED, count: int = len(SHAPES)) -> list[Joined]:
    """Curves of the planted roofline, one a shape."""
    found = []
    for experts, top_k, hidden, width in SHAPES[:count]:
        empty = RecordedCurve(
            "h200",
            "vllm",
            "9",
            "moe",
            "bf16",
            "vllm_fused_moe",
            experts,
            top_k,
            hidden,
            width,
            1,
            "balanced",
            16,
            (),
            "a: b",
        )
        one = kernel_work.join_one(replace(empty, points=tuple(Point(m, 1.0) for m in GRID)), MAP)
        points = tuple(Point(m, w.latency_us(c) + c.fixed_us) for m, w in zip(GRID, one.work, strict=True))
        found.append(replace(one, curve=replace(empty, points=points)))
    return found


def shape_of(j: Joined) -> tuple[int, int, int, int]:
    return j.curve.experts, j.curve.top_k, j.curve.hidden, j.curve.width


def test_planted_numbers_come_back() -> None:
    """Bandwidth within 3%, compute of every tile height that a curve reaches within 10%, and shapes that were left out are met."""
    c = fit.fit(joined())
    assert c.bandwidth == pytest.approx(PLANTED.bandwidth, rel=0.03)
    assert dict(c.tile_shares)[128] == pytest.approx(0.7, rel=0.10)
    held_out = fit.cross_validate(joined())
    assert held_out.error < 0.02
    assert held_out.within_one_step == 1.0
    assert len(held_out.steps) == len(SHAPES)


def test_a_shape_is_never_on_both_sides() -> None:
    """Every fold holds out each of its shapes with all curves; together the folds hold out each curve once."""
    both = [*joined(), *joined()]
    seen_out: list[int] = []
    for seen, unseen in fit.folds(both):
        assert not {j.curve.shape for j in seen} & {j.curve.shape for j in unseen}
        seen_out += [id(j) for j in unseen]
    assert sorted(seen_out) == sorted(id(j) for j in both)


def test_what_no_curve_has_keeps_its_default() -> None:
    """Without second tiles, blocks and activations there is nothing to fit them to, and no bound that they could sit on."""
    bare = [
        replace(j, work=tuple(replace(w, bytes_again=0.0, activations=0.0, blocks=0.0) for w in j.work))
        for j in joined()
    ]
    c = fit.fit(bare)
    assert (c.reread, c.block_us, c.activation) == (1.0, 0.0, None)


def test_too_few_shapes_give_no_calibration() -> None:
    """With how many there are and how many it takes."""
    with pytest.raises(NoFit, match="3 shapes are too few: a fit needs 8"):
        fit.fit(joined(count=3))


def test_a_calibration_is_the_same_bytes_twice_and_reads_back() -> None:
    """Schema, provenance, cross-validated error."""
    few = SHAPES[::2]  # A fold less each time; which shapes they are is no part of the property.
    both = [fit.calibrate([j for j in joined() if shape_of(j) in few], "a" * 64) for _ in range(2)]
    assert both[0] == both[1]
    text = calibration_files.text_of([both[0][0]])
    assert calibration_files.text_of([both[1][0]]) == text
    (found,) = CalibrationsFile.model_validate(yaml.safe_load(text)).calibrations
    assert (found.gpu, found.framework, found.kernel, found.dtype) == ("h200", "vllm", "triton", "bf16")
    assert (found.curves, found.shapes, found.releases) == (len(few), len(few), ("9",))
    assert found.spread[0] <= 1 <= found.spread[1]
    assert (found.sha256, found.kind) == ("a" * 64, "recorded")
    assert found.calibration().tile_shares == found.tile_shares


def test_another_kernel_is_fitted_without_tiles() -> None:
    """The tile rule describes the Triton path: no map is read for FlashInfer's, and none of its work is in tiles."""
    one = replace(joined()[0].curve, kernel="sglang_flashinfer_cutlass_moe")
    (found,), left_out = kernel_work.join([one])
    assert (found.granularity, left_out) == (None, {})
    assert {w.tile for w in found.work} == {None}
    assert one.family == "flashinfer-cutlass"


def test_a_power_laws_work_is_that_of_its_distribution() -> None:
    """Fewer experts are active at few tokens than balanced routing has, and more tiles at many."""
    balanced = joined()[0]
    law = kernel_work.join_one(replace(balanced.curve, distribution="power_law_1.2"), MAP)
    assert law.curve.routing == "power-law-1.2"
    assert law.work[0].bytes_once < balanced.work[0].bytes_once
    assert law.work[-1].flops > balanced.work[-1].flops


def test_what_the_roofline_misses_is_learnt_from_the_curves_nearby() -> None:
    """Curves that are 1.3 times the roofline wherever BLOCK_SIZE_N is 128: T of shapes left out is met by the residuals."""
    bent = []
    for j in joined():
        points = tuple(Point(p.positions, p.latency_us * (1.3 if p.positions > 64 else 1)) for p in j.curve.points)
        bent.append(replace(j, curve=replace(j.curve, points=points)))
    alone = fit.cross_validate(bent, lambda seen: fit.by_calibration(PLANTED))
    with_residuals = fit.cross_validate(bent, lambda seen: fit.by_calibration(PLANTED, fit.leftover(seen, PLANTED)[1]))
    assert alone.error > 0.2
    assert with_residuals.error < 0.05


def test_the_spread_is_that_near_the_boundary_and_its_interval_covers() -> None:
    """Predictions 5% too high at every N past N0 have that spread; the interval from it holds every recorded N_max."""
    found = cross_validation.judge(
        joined(),
        lambda j: [p.latency_us * (1.05 if p.positions > j.curve.base else 1) for p in j.curve.points],
    )
    assert found.spread == (1.05, 1.05)
    assert found.covered(found.spread) == 1.0
    assert found.covered((1.0, 1.0)) < 1.0


def test_a_machines_own_spread_is_widened_until_it_covers_its_curves() -> None:
    """One curve of eighteen is predicted to leave the tolerance at once, too far out for the spread of the points to see it."""
    odd = joined()[0].curve.shape

    def predict(j: Joined) -> list[float]:
        grows = 2.5 if j.curve.shape == odd else 1.3
        return [p.latency_us * (grows if p.positions > j.curve.base else 1) for p in j.curve.points]

    held_out = cross_validation.judge(joined(), predict)
    few, many = held_out.spread
    wide_few, wide_many = held_out.covering_spread
    assert held_out.covered(held_out.spread) < 0.95
    assert held_out.covered(held_out.covering_spread) >= 0.95
    assert wide_few <= min(few, 1.0) and wide_many >= max(many, 1.0)


@pytest.mark.parametrize("count", [9, 10, 12])
def test_every_fold_leaves_shapes_enough_for_a_fit(count: int) -> None:
    """Few shapes make more folds: each fit has at least eight, and each shape is held out once."""
    found = fit.folds(joined(count=count))
    assert min(len({j.curve.shape for j in seen}) for seen, _ in found) >= fit.MIN_SHAPES
    assert sum(len(unseen) for _, unseen in found) == count


def test_a_spread_that_covers_is_not_widened() -> None:
    """Predictions 5% too high everywhere: the interval reaches from there to what was predicted, no farther."""
    found = cross_validation.judge(
        joined(), lambda j: [p.latency_us * (1.05 if p.positions > j.curve.base else 1) for p in j.curve.points]
    )
    assert found.covering_spread == (1.0, 1.05)


def test_the_catalogs_calibrations_say_how_good_they_are() -> None:
    """Every one with its source, hash, curves and cross-validated error; none without cross-validation."""
    found = CalibrationsFile.model_validate(yaml.safe_load(CALIBRATIONS.read_text())).calibrations
    assert {(c.gpu, c.framework) for c in found if c.kernel == "triton"} >= {("h100", "vllm"), ("h200", "sglang")}
    for c in found:
        assert 0 < c.error < 0.25
        assert 0 <= c.within_one_step <= 1
        assert c.spread[0] < 1 < c.spread[1]
        assert c.shapes >= fit.MIN_SHAPES
        assert c.source.startswith("aiconfigurator-core")
