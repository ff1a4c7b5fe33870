"""The tile roofline: limits that have closed forms, monotony, and a published GPU curve."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp.principle import (
    Calibration,
    Point,
    attention_work,
    dense_work,
    find_boundary,
    moe_work,
    n_idle_dense,
    predict_boundary,
    predict_on,
)
from pytest_nfp.principle.tile_roofline import Work

SHAPES = [(10**9, 10**9)]  # so large that activations, N * 2e9 of 1e18 elements, do not show


def dense_n_max(flops: float, bandwidth: float, overlap: float) -> float:
    c = Calibration(flops, bandwidth, overlap)
    return predict_boundary({"dense": lambda n: dense_work(n, 1, SHAPES, 2, None)}, c).n_max


@given(st.floats(20, 300), st.sampled_from([1.0, 1.5, 2.0, 4.0]))
def test_dense_n_max_follows_the_closed_form_with_overlap(balance: float, p: float) -> None:
    """The largest whole N up to N_idle * ((1+e)^p * (1 + N_idle^-p) - 1)^(1/p)."""
    n_idle = n_idle_dense(balance, 2)
    expected = n_idle * ((1.2**p) * (1 + n_idle**-p) - 1) ** (1 / p)
    if abs(expected - round(expected)) > 1e-2:
        assert dense_n_max(balance * 1e12, 1e12, p) == max(1, math.floor(expected))


def test_full_overlap_gives_the_tolerance_above_idle_compute() -> None:
    """p = infinity: N_max is (1 + e) * N_idle, as compute may grow past memory by e."""
    assert dense_n_max(153e12, 1e12, math.inf) == math.floor(1.2 * 153)


def test_the_measured_cpu_curve_with_no_overlap_is_three_or_four() -> None:
    """p near 1 with N_idle near 17 gives N_max 3 or 4, not 17."""
    assert dense_n_max(8.5e12, 1e12, 1.0) == 2
    assert dense_n_max(17e12, 1e12, 1.0) in (3, 4)


@pytest.mark.parametrize(("reread", "growth"), [(1.0, 2.0), (0.3, 1.3), (0.0, 1.0)])
def test_a_second_tile_rereads_the_weights(reread: float, growth: float) -> None:
    """Skewed MoE, memory bound: T is flat to the tile's edge and grows by r past it."""
    c = Calibration(1e18, 1e12, reread=reread)

    def work(n: int) -> Work:
        return moe_work(n, 1, "skewed", 8, 1, 4096, 14336, 2, lambda rows: 16)

    assert work(16).latency_us(c) == pytest.approx(work(1).latency_us(c), rel=0.02)
    assert work(17).latency_us(c) / work(16).latency_us(c) == pytest.approx(growth, rel=0.02)
    assert (predict_boundary({"moe": work}, c, max_positions=128).n_max == 16) == (growth > 1.2)


def test_a_switch_to_a_larger_tile_is_free_while_the_padded_work_is_under_the_roofline() -> None:
    """Balanced, E = 256, k = 8: 16 rows to M = 32, then 32, 64, 128: one tile per expert up to M = 512 and more."""

    def tile(rows: int) -> int:
        return 16 if rows <= 32 else 32 if rows <= 96 else 64 if rows <= 512 else 128

    c = Calibration(1e18, 4.8e12)
    work = {"moe": lambda n: moe_work(n, 1, "balanced", 256, 8, 2048, 512, 2, tile)}
    assert predict_boundary(work, c, baseline_positions=32).n_max > 512


def test_published_mixtral_curve_on_h100() -> None:
    """A published curve (E = 8 of width 7168, k = 2, M = 1 to 1536) is met from M = 24 on within 20%.

    With the 16/32/64/128 map, bandwidth share 0.88, compute share 0.65, p = 8, 3 us, r = 0.3. Below that random
    routing leaves experts out, which balanced rows do not describe.
    """

    def tile(rows: int) -> int:
        return 16 if rows <= 32 else 32 if rows <= 96 else 64 if rows <= 512 else 128

    measured = {24: 478, 32: 487, 48: 488, 64: 483, 96: 494, 128: 491, 256: 537, 512: 662, 1024: 834, 1536: 1123}
    c = Calibration(0.65 * 989.5e12, 0.88 * 3.35e12, 8, 0.3, 3)
    for tokens, us in measured.items():
        work = moe_work(tokens, 1, "balanced", 8, 2, 4096, 7168, 2, tile, matrices=3)
        assert work.latency_us(c) + c.fixed_us == pytest.approx(us, rel=0.20)


@given(
    st.sampled_from(["balanced", "skewed"]),
    st.lists(st.tuples(st.integers(1, 120), st.sampled_from([8, 16, 32, 64, 128])), min_size=1, max_size=4),
    st.sampled_from([(4, 1), (8, 2), (64, 8)]),
    st.floats(2, 300),
    st.sampled_from([1.0, 2.0, math.inf]),
    st.floats(0, 1),
)
def test_halving_between_edges_finds_what_a_full_scan_finds(
    routing: Any, pieces: list[tuple[int, int]], experts: tuple[int, int], balance: float, p: float, reread: float
) -> None:
    """Both readings, holes included, for any rule: between two edges T never falls."""
    ends: list[int] = []
    tiles: list[int] = []
    for width, rows in pieces:
        ends.append((ends[-1] if ends else 0) + width)
        tiles.append(rows)

    def tile(tokens: int) -> int:
        return next((t for end, t in zip(ends, tiles, strict=True) if tokens <= end), tiles[-1])

    c = Calibration(balance * 1e12, 1e12, p, reread)
    work = {"moe": lambda n: moe_work(n, 1, routing, *experts, 256, 128, 2, tile)}
    quick = predict_boundary(work, c, max_positions=600, edges=ends)
    scan = find_boundary([Point(n, work["moe"](n).latency_us(c)) for n in range(1, 601)])
    assert (quick.boundary.n_max, quick.boundary.n_first_exit) == (scan.n_max, scan.n_first_exit)


def test_attention_steps_at_the_tile_edge() -> None:
    """Unpacked 64-row tiles step at 65 positions; packed at GQA 4, 128 rows are 32 positions."""
    c = Calibration(1e18, 4e12)

    def n_max(packed: bool, rows: int) -> int:
        work = {"attention": lambda n: attention_work(n, 1, 4096, 16, 4, 128, 2, lambda _: rows, packed)}
        return predict_boundary(work, c).n_max

    assert n_max(False, 64) == 64
    assert n_max(True, 128) == 32


def test_mla_reads_its_latent_once_and_computes_keys_and_values_of_different_widths() -> None:
    """128 heads in tiles of 128 rows, one position: 576 cached elements a token, 2 * (576 + 512) FLOPs a head and token."""
    work = attention_work(1, 1, 4096, 128, 1, 576, 2, lambda _: 128, packed=True, value_dim=512)
    assert work.flops == 2 * 128 * 4096 * (576 + 512)
    assert work.bytes_once == 2 * (4096 * 576 + 128 * (576 + 512))


def test_an_unpadded_kernel_computes_its_rows_alone() -> None:
    """torch's CPU kernel ends its last query block with the rows that there are."""
    padded = attention_work(1, 1, 4096, 16, 16, 128, 4, lambda _: 32)
    exact = attention_work(1, 1, 4096, 16, 16, 128, 4, lambda _: 32, padded=False)
    assert padded.flops == 32 * exact.flops


@given(
    st.floats(1e9, 1e15),
    st.floats(1e6, 1e13),
    st.sampled_from([1.0, 1.3, 2.0, 8.0, 500.0, math.inf]),
    st.floats(1, 1e15),
    st.floats(1, 1e12),
)
def test_latency_lies_between_the_maximum_and_the_sum(f: float, b: float, p: float, flops: float, moved: float) -> None:
    """Whatever the overlap: no better than the slower resource, no worse than both in turn."""
    c = Calibration(f, b, p)
    memory, compute = moved / b * 1e6, flops / f * 1e6
    us = Work(flops, moved).latency_us(c)
    assert max(memory, compute) * (1 - 1e-9) <= us <= (memory + compute) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"flops": 0}, "flops"),
        ({"bandwidth": math.inf}, "bandwidth"),
        ({"overlap": 0.5}, "overlap must be at least 1"),
        ({"reread": 1.5}, "reread must lie in"),
        ({"fixed_us": -1}, "fixed_us"),
        ({"block_us": -1}, "block_us"),
        ({"processors": 0}, "processors"),
        ({"tile_shares": ((16, 0.0),)}, "share_16"),
    ],
)
def test_a_calibration_that_means_nothing_is_refused(changed: dict[str, object], message: str) -> None:
    """Each number has its range."""
    with pytest.raises(ValueError, match=message):
        Calibration(**({"flops": 1e12, "bandwidth": 1e12} | changed))  # type: ignore[arg-type]


def test_a_small_tile_reaches_a_smaller_share_of_the_compute() -> None:
    """By the first height that holds it; higher tiles reach the last share, a kernel without a tile all of it."""
    c = Calibration(1e12, 1e12, tile_shares=((16, 0.25), (64, 0.5), (128, 0.8)))
    assert [c.flops_of(t) for t in (8, 16, 32, 64, 128, 256, None)] == [
        pytest.approx(1e12 * share) for share in (0.25, 0.25, 0.5, 0.5, 0.8, 0.8, 1.0)
    ]


def test_blocks_of_their_own_cost_over_the_processors() -> None:
    """Tiles times the columns of both GEMMs; narrower blocks are more of them, and only their own time counts."""
    wide, narrow = (
        moe_work(16, 1, "balanced", 8, 2, 2048, 512, 2.0, lambda m: 16, 3, lambda m, n=n: n)  # type: ignore[misc]
        for n in (128, 64)
    )
    assert wide.blocks == 8 * (2 * 512 // 128 + 2048 // 128)
    assert narrow.blocks == 2 * wide.blocks
    c = Calibration(1e18, 1e18, block_us=2.0, processors=4)
    assert narrow.latency_us(c) == pytest.approx(narrow.blocks / 4 * 2.0)
    assert wide.latency_us(replace(c, block_us=0.0)) < 1e-3


def test_activations_apart_are_a_time_of_their_own() -> None:
    """Moved by small kernels after the GEMMs: outside the overlap, at their own factor."""
    w = Work(0.0, 3e9, 0.0, 1e9)
    assert w.latency_us(Calibration(1e12, 1e12)) == pytest.approx(3000)
    assert w.latency_us(Calibration(1e12, 1e12, activation=1.5)) == pytest.approx(2000 + 1500)
    assert w.share(2).activations == 5e8


def test_two_tokens_of_random_routing_read_nearly_twice_the_experts() -> None:
    """D14: 8 of 256, T(2) = 2.2 T(1) as published. The union of experts says 1.97, so N_max is 1 by weight traffic:
    padding has no part in it, one tile an expert is read and computed either way."""
    c = Calibration(1e15, 1e12)

    def work(n: int) -> Work:
        return moe_work(n, 1, "uniform", 256, 8, 2048, 512, 2, lambda rows: 16)

    assert work(2).latency_us(c) / work(1).latency_us(c) == pytest.approx(1.97, abs=0.01)
    assert (work(1).bytes_again, work(2).bytes_again) == (0, 0)
    assert predict_on({"moe": lambda n: work(n).latency_us(c)}, (1, 2, 4, 8), 0.2, 1, (1, 1)).n_max == 1


def test_a_curve_that_falls_again_is_read_as_a_measured_one() -> None:
    """A hole at 33 to 64: both readings; past the last N within, the crossing is found to the position."""

    def latency(n: int) -> float:
        return 130 if 33 <= n <= 64 else 100 + max(0, n - 100)

    found = predict_on({"dense": latency}, (1, 2, 32, 33, 64, 65, 96, 256), 0.2, 1, (1, 1))
    assert (found.boundary.n_max, found.boundary.n_first_exit) == (120, 32)
    assert found.boundary.n_max_interval == (120, 120)
    assert found.limiting == "dense"


def test_a_spread_makes_n_max_an_interval() -> None:
    """T may be 10% more or less than predicted: from T = 1.08 on it may be outside, from T = 1.32 on it surely is."""
    found = predict_on({"dense": lambda n: 100 + n}, range(1, 101), 0.2, 1, (0.9, 1.1))
    low, high = found.boundary.n_max_interval
    assert found.n_max == 21
    assert (low, high) == (9, 33)
