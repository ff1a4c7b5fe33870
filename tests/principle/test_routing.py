"""Rows per expert, active experts, N0."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp.principle import active_experts, baseline_positions, rows_per_expert
from pytest_nfp.principle.routing import Replay, check_routing


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
    groups = rows_per_expert(routing, tokens, experts, k)
    assert sum(n * rows for n, rows in groups) == tokens * k
    assert sum(n for n, _ in groups) == active_experts(routing, tokens, experts, k)
    assert max(rows for _, rows in groups) - min(rows for _, rows in groups) <= 1


def test_random_routing_touches_nearly_twice_the_experts_with_two_tokens() -> None:
    """8 of 256: the expected union of two draws is 1.97 times one (a published slowdown of 2.2 is weight traffic)."""
    one, two = active_experts("uniform", 1, 256, 8), active_experts("uniform", 2, 256, 8)
    assert one == pytest.approx(8)
    assert two / one == pytest.approx(1.97, abs=0.005)
    with pytest.raises(ValueError, match="top_k must be at most experts"):
        active_experts("uniform", 1, 4, 8)


@given(
    st.sampled_from(["uniform", "power-law-1.01", "power-law-1.2"]), st.integers(1, 700), st.integers(2, 300), st.data()
)
def test_drawn_rows_add_up_in_expectation(routing: str, tokens: int, experts: int, data: st.DataObject) -> None:
    """tokens*k rows over at most E experts, none with more rows than tokens."""
    k = data.draw(st.integers(1, min(experts, 16)))
    groups = rows_per_expert(routing, tokens, experts, k)
    assert sum(n * rows for n, rows in groups) == pytest.approx(tokens * k, rel=1e-5)
    assert sum(n for n, _ in groups) <= experts * (1 + 1e-9)
    assert max(rows for _, rows in groups) <= tokens


def test_uniform_routing_touches_the_expected_union() -> None:
    """The binomial groups count as many active experts as the closed form of the union."""
    assert active_experts("uniform", 16, 128, 8) == pytest.approx(128 * (1 - (1 - 8 / 128) ** 16))


def test_a_power_law_is_more_skewed_than_uniform_draws() -> None:
    """Its largest expert has more rows, and a steeper law more than a flat one."""
    largest = [
        max(n for _, n in rows_per_expert(r, 512, 128, 8)) for r in ("uniform", "power-law-1.01", "power-law-1.2")
    ]
    assert largest == sorted(largest)
    assert largest[2] > 2 * largest[0]


def test_a_replay_is_the_mean_of_its_windows() -> None:
    """Four tokens of k = 1 as two windows of two: one of the windows sends both to expert 0."""
    replay = Replay(((0,), (0,), (1,), (2,)))
    assert sorted(rows_per_expert(replay, 2, 4, 1)) == [(0.5, 2), (1.0, 1)]
    assert rows_per_expert(replay, 4, 4, 1) == [(1, 2), (2, 1)]
    with pytest.raises(ValueError, match="the trace has 4 tokens: it can't say how 5 are routed"):
        rows_per_expert(replay, 5, 4, 1)
    with pytest.raises(ValueError, match="routes to expert 2: the model has 2"):
        rows_per_expert(replay, 4, 2, 1)
    with pytest.raises(ValueError, match="has 1 experts a token, the model takes 2"):
        rows_per_expert(replay, 4, 4, 2)
    with pytest.raises(ValueError, match="at least one token"):
        Replay(())
    assert str(replay) != str(Replay(((0,), (0,), (1,), (3,))))


@pytest.mark.parametrize("name", ["random", "power-law-", "power-law-x", "power-law-1", "power-law-inf"])
def test_an_unknown_routing_says_what_there_is(name: str) -> None:
    """With the names, or how a power law is written."""
    with pytest.raises(ValueError, match=r"power-law-A"):
        check_routing(name)
