"""Rows per expert, active experts, N0."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp.principle import active_experts, baseline_positions, expected_active_experts, rows_per_expert


def test_n0_activates_every_expert() -> None:
    """ceil(E / (b*k)) for balanced MoE, else 1."""
    assert baseline_positions("balanced", 256, 8) == 32
    assert baseline_positions("balanced", 256, 8, batch=4) == 8
    assert baseline_positions("balanced", 10, 3) == 4
    assert baseline_positions("skewed", 256, 8) == baseline_positions(None) == 1


@given(st.sampled_from(["balanced", "skewed"]), st.integers(1, 5000), st.integers(1, 300), st.integers(1, 64))
def test_every_row_has_an_expert(routing: str, tokens: int, experts: int, k: int) -> None:
    """Rows add up to tokens*k; balanced rows differ by one at most; the active experts are those counted."""
    k = min(k, experts)
    groups = rows_per_expert(routing, tokens, experts, k)  # type: ignore[arg-type]
    assert sum(n * rows for n, rows in groups) == tokens * k
    assert sum(n for n, _ in groups) == active_experts(routing, tokens, experts, k)  # type: ignore[arg-type]
    assert max(rows for _, rows in groups) - min(rows for _, rows in groups) <= 1


def test_random_routing_touches_nearly_twice_the_experts_with_two_tokens() -> None:
    """8 of 256: the expected union of two draws is 1.97 times one (a published slowdown of 2.2 is weight traffic)."""
    one, two = expected_active_experts(1, 256, 8), expected_active_experts(2, 256, 8)
    assert one == pytest.approx(8)
    assert two / one == pytest.approx(1.97, abs=0.005)
    with pytest.raises(ValueError, match="top_k must be at most experts"):
        expected_active_experts(1, 4, 8)
