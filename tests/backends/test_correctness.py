"""References find what is wrong with a result, and nothing wrong with a right one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from pytest_nfp import backends
from pytest_nfp.backends import correctness
from pytest_nfp.backends.expert_routing import expert_ids, starts
from pytest_nfp.cases import Case
from pytest_nfp.principle.routing import Replay

from .test_torch_backends import ATTENTION, DENSE, MOE

OUT = torch.arange(1.0, 7.0).view(2, 3)


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (OUT, ""),
        (OUT * 1.00001, ""),
        (OUT * 1.01, "the result is 1.0e-02 off an FP64 reference, float32 allows 1e-04"),
        (OUT.bfloat16() * 1.01, ""),
        (OUT.T, r"the result has the shape (3, 2), expected is (2, 3)"),
        (torch.where(OUT > 5, float("nan"), OUT), "1 of 6 results are not finite, or were never written"),
    ],
)
def test_a_wrong_result_is_told_from_rounding(out: torch.Tensor, said: str) -> None:
    """By the dtype's own tolerance; what was never written shows as NaN."""
    assert correctness.wrong(out, OUT.double()) == said


@pytest.mark.parametrize("case", [DENSE, replace(DENSE, kernel="onednn-packed"), MOE, ATTENTION])
@pytest.mark.parametrize("positions", [1, 3, 17])
def test_every_cpu_forward_is_right(case: Case, positions: int) -> None:
    """Each backend's own check, before it is timed."""
    prepared = backends.prepare(case, 0, 1000)
    assert prepared.check is not None
    assert prepared.check(positions) == ""


@pytest.mark.parametrize("routing", ["skewed", "uniform", Replay(tuple((i % 8, (i + 3) % 8) for i in range(20)))])
def test_every_routing_is_computed_right(routing: str | Replay) -> None:
    """Experts one by one in FP64 are what grouped_mm gives, whoever chose them."""
    check = backends.prepare(replace(MOE, routing=routing), 0, 1000).check
    assert check is not None
    assert check(17) == ""


def test_a_kernel_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SiLU that was forgotten."""
    identity = SimpleNamespace(grouped_mm=torch.nn.functional.grouped_mm, silu=lambda x: x)
    monkeypatch.setattr("pytest_nfp.backends.torch_moe.F", identity)
    check = backends.prepare(MOE, 0, 1000).check
    assert check is not None
    assert "off an FP64 reference" in check(3)


def test_a_causal_query_sees_the_cache_and_itself() -> None:
    """L + i + 1 keys: the last query sees all, the first none of the new tokens but its own."""
    q, k, v = (torch.randn(1, 2, n, 8) for n in (3, 10, 10))
    out = correctness.attention(q, k, v, causal=True)
    torch.testing.assert_close(out[:, :, 2:], correctness.attention(q[:, :, 2:], k, v, causal=False))
    torch.testing.assert_close(
        out[:, :, :1], correctness.attention(q[:, :, :1], k[:, :, :8], v[:, :, :8], causal=False)
    )


def test_uniform_ids_are_seeded_and_each_named_once() -> None:
    """The same seed gives the same experts; no token takes one twice."""
    case = replace(MOE, routing="uniform")
    ids = expert_ids(case, 50, 0, seed=1)
    assert torch.equal(ids, expert_ids(case, 50, 0, seed=1))
    assert not torch.equal(ids, expert_ids(case, 50, 0, seed=2))
    assert all(len(set(row)) == 2 for row in ids.tolist())


def test_a_trace_with_too_few_tokens_is_unsupported() -> None:
    """As many as are there; and a power law is no list of ids."""
    with pytest.raises(backends.Unsupported, match="the trace has 1 tokens, 3 are needed"):
        expert_ids(replace(MOE, routing=Replay(((0, 1),))), 3, 0)
    with pytest.raises(backends.Unsupported, match=r"no expert ids are made for power-law-1\.2 routing"):
        expert_ids(replace(MOE, routing="power-law-1.2"), 3, 0)


def test_a_turn_touches_every_expert_before_one_repeats() -> None:
    """Skewed k = 2 of 8: four forwards; balanced with all experts active: one."""
    assert starts(replace(MOE, routing="skewed"), 1) == [0, 2, 4, 6]
    assert starts(MOE, 4) == [0]
