"""The closed form: published lookups, rounding, and which module limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp.principle import attention_term, branch_term, closed_form, dense_term, moe_term


@pytest.mark.parametrize(
    ("k", "n_max", "limiting"),
    [(8, 64, "attention"), (64, 64, "moe"), (128, 32, "moe"), (256, 16, "moe")],
)
def test_moe_model_with_flash_attention(k: int, n_max: int, limiting: str) -> None:
    """E = 256, M_moe = 16, tau = 256, M_attn = 64: attention limits until k makes padding scarcer."""
    c = closed_form(moe=moe_term("balanced", 16, 256, k), branch=branch_term(256), attention=attention_term(64))
    assert (c.n_max, c.limiting) == (n_max, limiting)


def test_skewed_is_one_tile_whatever_k() -> None:
    """M_moe / b: skewed routing has no aggregate slack."""
    assert {moe_term("skewed", 16, 256, k) for k in (1, 2, 8, 256)} == {16}
    assert moe_term("skewed", 16, 256, 8, batch=4) == 4


def test_dense_model_is_the_smaller_of_idle_compute_and_the_query_tile() -> None:
    """A800, b = 1: 153 of idle compute, 64 of the tile; at b = 4 the FFN limits."""
    balance = 312 / 2.039
    assert closed_form(dense=dense_term(balance, 2), attention=64).limiting == "attention"
    assert closed_form(dense=dense_term(balance, 2, 4), attention=64).n_max == 38


def test_a_packed_tile_holds_fewer_positions() -> None:
    """FlashInfer's 128 rows at GQA 4 are 32 positions; a tile smaller than the group still holds one."""
    assert attention_term(128, 4) == 32
    assert attention_term(16, 64) == 1


def test_terms_that_are_missing_do_not_limit() -> None:
    """A term that does not apply stays None; without any there is nothing to say."""
    assert closed_form(dense=5).moe is None
    with pytest.raises(ValueError, match="at least one"):
        closed_form()


@given(st.integers(1, 512), st.integers(1, 512), st.integers(1, 64), st.integers(1, 64))
def test_terms_are_whole_bounded_and_fall_with_batch(block: int, experts: int, k: int, batch: int) -> None:
    """Never below 1; skewed is at most balanced while k <= E; more requests leave no more positions."""
    k = min(k, experts)
    balanced, skewed = moe_term("balanced", block, experts, k, batch), moe_term("skewed", block, experts, k, batch)
    assert 1 <= skewed <= balanced <= max(1, experts * block)
    assert moe_term("balanced", block, experts, k, batch + 1) <= balanced


@given(st.dictionaries(st.sampled_from(["dense", "moe", "attention", "branch"]), st.integers(1, 9999), min_size=1))
def test_the_smallest_term_limits(terms: dict[str, int]) -> None:
    """n_max is the minimum, and the limiting module has it."""
    c = closed_form(**terms)
    assert c.n_max == min(terms.values()) == terms[c.limiting]


def test_the_closed_form_has_no_term_for_drawn_routing() -> None:
    """Balanced and skewed are its upper and lower bound; the tile roofline takes the others."""
    with pytest.raises(ValueError, match="balanced and skewed routing, not uniform"):
        moe_term("uniform", 16, 256, 8)
