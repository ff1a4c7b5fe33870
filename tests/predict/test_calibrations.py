"""Calibrations in use: whose they are, what they are carried over to, and published points that they meet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_nfp import catalog
from pytest_nfp.cases import Backend, Case
from pytest_nfp.catalog import CALIBRATIONS, Model, Moe
from pytest_nfp.catalog.parallel import on_rank, parse_parallel
from pytest_nfp.granularity import Granularity, Range
from pytest_nfp.predict import calibrations, module_latency, module_work, predict_case, predict_curve
from pytest_nfp.principle.routing import Replay
from tests.granularity.test_maps import granularity

# The report gives E and k; hidden 3072 and width 1536 over two ranks are MiniMax-M2's.
SHAPE = Model(name="shape", hidden=3072, moe=Moe(experts=256, width=768, top_k=8), source="a published report")
H20 = Case("h20", Backend("vllm", "0.24.0"), "moe", SHAPE, "fp8-block", top_k=8, routing="uniform")
SMALL = granularity(*([16] * 4096))
LARGE = granularity(*([16] * 64), *([64] * 4032))


def curve(case: Case, rule: Granularity, *positions: int) -> dict[int, float]:
    on = calibrations.figures_of(case, rule)
    found = predict_curve(module_latency(case, on, rule), positions, 1, 0.2, on)
    return {n: t for n, t, _, _ in found.latencies}


def test_every_calibration_has_its_residuals() -> None:
    """A file beside the catalog for each, and none that belongs to no calibration."""
    paths = {c.residuals_path(path) for c, path in calibrations.calibrations().values()}
    assert paths == set((CALIBRATIONS.parent / "residuals").iterdir())


def test_a_stand_in_is_named_and_equal() -> None:
    """H800 by H100, A800 by A100: the same numbers, residuals included."""
    for gpu, other in (("h800", "h100"), ("a800", "a100")):
        mine, theirs = (calibrations.figures(g, "sglang", "triton", "bf16") for g in (gpu, other))
        assert f"{other} stands in for {gpu}" in mine.basis
        assert (mine.calibration, mine.residuals) == (theirs.calibration, theirs.residuals)
        assert mine.is_proven


def test_h20_is_carried_over_by_datasheet_ratios_and_said_to_be_unproven() -> None:
    """148 of 989.5 TFLOP/s, 4.0 of 4.8 TB/s, 78 of 132 processors; no residuals, which are of the other GPU's waves."""
    h20, h200 = (calibrations.figures(g, "vllm", "triton", "bf16") for g in ("h20", "h200"))
    assert h20.calibration.flops / h200.calibration.flops == pytest.approx(148 / 989.5)
    assert h20.calibration.bandwidth / h200.calibration.bandwidth == pytest.approx(4.0 / 4.8)
    assert (h20.calibration.processors, h200.calibration.processors) == (78, 132)
    assert "which no curve of h20 has proven" in h20.basis
    assert not h20.is_proven
    assert h20.spread is None


def test_residuals_and_interval_are_those_of_the_routing_that_was_recorded() -> None:
    """Balanced, and power laws, which the held-out curves prove; under skewed, uniform and replayed routing neither."""
    on = calibrations.figures("h200", "vllm", "triton", "bf16")
    assert calibrations.for_routing(on, "balanced") is on
    assert calibrations.for_routing(on, "power-law-1.2") is on
    for routing in ("skewed", "uniform", Replay(((0,),))):
        alone = calibrations.for_routing(on, routing)
        assert (alone.residuals, alone.spread, alone.latency_spread) == (None, None, None)
        assert alone.calibration == on.calibration
        assert "the arithmetic alone, without an interval" in alone.basis


def test_a_ranks_experts_are_an_expert_parallel_rooflines_whatever_the_routing() -> None:
    """ep8: an eighth of what one rank alone reads, for balanced and for drawn tokens."""
    whole = Model(name="m", hidden=2048, moe=Moe(experts=256, width=512, top_k=8), source="t")
    for routing in ("balanced", "uniform"):
        one = Case("h200", Backend("vllm", "0.24.0"), "moe", whole, "bf16", top_k=8, routing=routing)
        eight = replace(one, subject=on_rank(whole, parse_parallel("ep8")))
        read = [module_work(c, SMALL)(128).bytes_once for c in (one, eight)]
        assert read[0] == pytest.approx(8 * read[1])


def test_a_kernel_without_a_calibration_runs_on_the_datasheet() -> None:
    """Attention, and experts of a dtype or kernel that nothing was recorded of."""
    for kernel, dtype in (("fa2", "bf16"), ("triton", "fp16"), ("aiter", "bf16")):
        assert calibrations.figures("h200", "vllm", kernel, dtype).basis == "datasheet"


def test_the_tiles_of_a_kernel_that_is_not_known_are_tritons() -> None:
    """SGLang's server arguments choose: the tile rule, and so the calibration, is that of Triton."""
    unknown = replace(SMALL, kernel="unknown")
    assert calibrations.kernel_of(H20, unknown) == "triton"
    assert calibrations.kernel_of(H20, replace(SMALL, kernel="flashinfer-cutlass")) == "flashinfer-cutlass"
    assert calibrations.kernel_of(replace(H20, module="dense"), None) == "gemm"


def test_a_larger_tile_on_h20_slows_what_was_not_near_free_before() -> None:
    """D1: H20, block FP8, E = 256, k = 8, tile 16 to 64 past 64 tokens. The published microseconds are met by H200's numbers
    carried over: within 15% with tile 16, within 30% with 64. N_max is 1 before and after, so a warning is enough.
    """
    before, after = curve(H20, SMALL, 1, 2, 4, 8, 64, 96, 384), curve(H20, LARGE, 1, 2, 4, 8, 64, 96, 384)
    for n, us in {1: 55.9, 2: 77.9, 4: 123, 8: 200, 64: 603, 96: 653, 384: 821}.items():
        assert before[n] == pytest.approx(us, rel=0.15)
    for n, us in {96: 930, 384: 1000}.items():
        assert after[n] == pytest.approx(us, rel=0.30)
        assert after[n] > 1.2 * before[n]
    assert {n: after[n] for n in (1, 2, 64)} == {n: before[n] for n in (1, 2, 64)}
    for rule in (SMALL, LARGE):
        on = calibrations.figures_of(H20, rule)
        found = predict_curve(module_latency(H20, on, rule), (1, 2, 4, 8), 1, 0.2, on)
        assert found.boundary.n_max == 1


def test_other_tile_parameters_move_the_curve_and_not_the_granularity() -> None:
    """D5: BLOCK_SIZE_N 128 to 64 at 1 to 8 tokens, tiles of 16 rows throughout. T(1) moves, the closed form does not."""
    case = Case("h200", Backend("vllm", "0.24.0"), "moe", SHAPE, "bf16", top_k=8, routing="skewed")
    wide, narrow = (
        Granularity(
            "vllm", "0.24.0", "moe", "bf16", "NVIDIA H200", (Range(1, 4096, 16),), "triton", "", "a", "b", "index",
            parameters=((1, 8, f"BLOCK_SIZE_N={n}"), (9, 4096, "BLOCK_SIZE_N=128")),
        )
        for n in (128, 64)
    )  # fmt: skip
    before, after = (predict_case(case, calibrations.figures_of(case, g), g) for g in (wide, narrow))
    assert before.principle == after.principle
    assert before.tile_roofline is not None and after.tile_roofline is not None
    assert before.tile_roofline.points[0].latency_us != after.tile_roofline.points[0].latency_us
    assert before.tile_roofline.points[-1].latency_us == after.tile_roofline.points[-1].latency_us


def test_gemms_of_another_framework_stand_in_by_name() -> None:
    """Both frameworks call the same libraries; the basis names whose curves they are."""
    assert calibrations.figures("a100", "my-kernels", "gemm", "bf16").basis == "datasheet"
    found = calibrations.figures("a100", "torch", "gemm", "bf16")
    assert "recorded curves of vllm on a100" in found.basis
    assert catalog.gpu("a100").multiprocessors == found.calibration.processors
