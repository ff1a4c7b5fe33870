"""Idle-compute formulas: the published numbers, and how they move with their arguments."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp.principle import n_idle_attention, n_idle_dense, n_idle_moe

H20, A800, H800 = 148e12 / 4.0e12, 312e12 / 2.039e12, 989.5e12 / 3.35e12
LLADA = {"hidden": 2048, "expert_width": 512, "top_k": 8}
balances = st.floats(1, 2000)


@pytest.mark.parametrize(("balance", "whole"), [(H20, 37), (A800, 153), (H800, 295)])
def test_balance_of_the_study_platforms(balance: float, whole: int) -> None:
    """rho of H20, A800 and H800 is what the paper's Table 2 gives."""
    assert round(balance) == whole


def test_dense_a800_is_153() -> None:
    """The deployment lookup's dense entry: A800, b = 1, BF16."""
    assert math.floor(n_idle_dense(A800, 2)) == 153


def test_moe_balanced_h20_is_1445() -> None:
    """The deployment lookup's MoE entry: H20, k = 8, E = 256, LLaDA-2.1-mini dims."""
    assert round(n_idle_moe(H20, 2, active_experts=256, **LLADA)) == 1445


def test_over_prediction_factors_of_the_lookup() -> None:
    """Against M_attn = 64, idle compute over-predicts by 2.4x to 23x."""
    assert n_idle_dense(A800, 2) / 64 == pytest.approx(2.4, abs=0.05)
    assert n_idle_moe(H20, 2, active_experts=256, **LLADA) / 64 == pytest.approx(22.6, abs=0.1)
    assert round(n_idle_moe(H20, 2, active_experts=256, **LLADA) / 64) == 23


@pytest.mark.parametrize("top_k", [1, 2, 8, 64, 256])
def test_moe_skewed_h20_is_45_for_every_k(top_k: int) -> None:
    """k cancels under skewed routing: 45.2 on H20."""
    n = n_idle_moe(H20, 2, hidden=2048, expert_width=512, top_k=top_k, active_experts=top_k)
    assert n == pytest.approx(45.2, abs=0.05)


def test_moe_skewed_is_larger_on_a800_and_unbounded_on_h800() -> None:
    """605 on A800; H800 has so much compute that activations alone keep the memory busy."""
    assert round(n_idle_moe(A800, 2, active_experts=8, **LLADA)) == 605
    assert n_idle_moe(H800, 2, active_experts=8, **LLADA) == math.inf


def test_attention_is_unbounded_for_short_contexts_and_tends_to_half_of_balance() -> None:
    """2L <= rho*s sets no bound; for long L the bound falls to rho*s/2, divided by the group for GQA."""
    assert n_idle_attention(H800, 2, context=256) == math.inf
    assert n_idle_attention(H20, 2, context=10**7) == pytest.approx(H20, rel=1e-4)
    assert n_idle_attention(H20, 2, context=10**7, group=4) == pytest.approx(H20 / 4, rel=1e-4)


@given(balances, st.sampled_from([0.5, 1, 2, 4]), st.integers(1, 64))
def test_dense_is_proportional_to_balance_and_bytes_and_inverse_to_batch(b: float, s: float, batch: int) -> None:
    """rho*s/(2b)."""
    assert n_idle_dense(b, s, batch) == pytest.approx(n_idle_dense(b, s) / batch)
    assert n_idle_dense(2 * b, s, batch) == pytest.approx(2 * n_idle_dense(b, s, batch))
    assert n_idle_dense(b, 2 * s, batch) == pytest.approx(2 * n_idle_dense(b, s, batch))


@given(balances, balances, st.integers(1, 10**5))
def test_attention_and_moe_grow_with_balance(a: float, b: float, context: int) -> None:
    """More compute per byte never makes idle compute smaller."""
    low, high = sorted((a, b))
    assert n_idle_attention(low, 2, context) <= n_idle_attention(high, 2, context) * (1 + 1e-9)
    assert n_idle_moe(low, 2, active_experts=8, **LLADA) <= n_idle_moe(high, 2, active_experts=8, **LLADA) * (1 + 1e-9)


@given(st.floats(1, 30), st.integers(1, 8), st.integers(8, 4096), st.integers(8, 4096))
def test_moe_solves_intensity_equals_balance(b: float, k: int, d: int, f: int) -> None:
    """At N_idle, FLOPs over bytes as the docstring counts them is the balance."""
    n = n_idle_moe(b, 2, d, f, k, 64)
    if math.isfinite(n):
        flops = 4 * n * k * d * f
        moved = 2 * (2 * 64 * d * f + 4 * n * k * (d + f))
        assert flops / moved == pytest.approx(b, rel=1e-6)


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
def test_a_wrong_number_is_named(bad: float) -> None:
    """The error says which argument was wrong."""
    with pytest.raises(ValueError, match="balance must be a finite number above 0"):
        n_idle_dense(bad, 2)
    with pytest.raises(ValueError, match="context"):
        n_idle_attention(37, 2, bad)  # type: ignore[arg-type]
