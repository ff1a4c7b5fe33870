"""Each CPU forward computes what a plain reference computes, and reads more than a cache holds before it repeats."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pytest_nfp import backends
from pytest_nfp.backends.expert_routing import expert_ids
from pytest_nfp.cases import Backend, Case
from pytest_nfp.catalog import Attention, Dense, Model, Moe

TORCH = Backend("torch", "2.13.0")
DENSE = Case(
    "cpu", TORCH, "dense", Model(name="d", hidden=64, dense=Dense(width=96), source="t"), "fp32", kernel="matmul"
)
MOE = Case(
    "cpu",
    TORCH,
    "moe",
    Model(name="m", hidden=32, moe=Moe(experts=8, top_k=2, width=16), source="t"),
    "fp32",
    top_k=2,
    routing="balanced",
    kernel="grouped_mm",
)
ATTENTION = Case(
    "cpu",
    TORCH,
    "attention",
    Model(name="a", hidden=64, attention=Attention(heads=2, kv_heads=2, head_dim=32), source="t"),
    "fp32",
    context=40,
    kernel="sdpa",
)


def run(case: Case, positions: int) -> torch.Tensor:
    with torch.inference_mode():
        out = backends.prepare(case, 0, 1000).forward(positions)()
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize("kernel", ["matmul", "onednn-packed"])
@pytest.mark.parametrize(("batch", "positions"), [(1, 1), (2, 3), (1, 16)])
def test_dense_is_two_gemms(kernel: str, batch: int, positions: int) -> None:
    """x W1^T W2^T, whichever way the weights are laid out."""
    case = replace(DENSE, kernel=kernel, batch=batch)
    g = torch.Generator().manual_seed(0)
    banks = backends.banks_needed(4 * 2 * 64 * 96, 1000)
    weights = [[torch.randn(n, k, generator=g) / k**0.5 for n, k in ((96, 64), (64, 96))] for _ in range(banks)]
    x = torch.randn(batch * positions, 64, generator=g)
    torch.testing.assert_close(run(case, positions), x @ weights[0][0].T @ weights[0][1].T, rtol=1e-4, atol=1e-5)


def test_a_single_gemm_and_a_gated_ffn_are_right_by_their_own_check() -> None:
    """[rows, k] x [k, n] of a case with `gemm`; three matrices: up times gate, then down."""
    gated = DENSE.subject.model_copy(update={"dense": Dense(width=96, matrices=3)})
    for case in (replace(DENSE, gemm=(48, 80)), replace(DENSE, subject=gated)):
        prepared = backends.prepare(case, 0, 1000)
        assert prepared.check is not None and prepared.check(3) == ""
    assert run(replace(DENSE, gemm=(48, 80)), 3).shape == (3, 48)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_other_dtypes_are_right_by_their_own_check(dtype: str) -> None:
    """GEMMs, experts and attention (MHA and GQA) in half precision."""
    grouped = ATTENTION.subject.model_copy(update={"attention": Attention(heads=4, kv_heads=2, head_dim=32)})
    for case in (DENSE, MOE, ATTENTION, replace(ATTENTION, subject=grouped)):
        prepared = backends.prepare(replace(case, dtype=dtype), 0, 1000)
        assert prepared.check is not None
        assert [prepared.check(n) for n in (1, 2, 9)] == ["", "", ""]


def test_fp8_gemms_are_right_and_read_a_byte_a_weight() -> None:
    """Held to FP64 on the values that FP8 has; two GEMMs, three, and one."""
    gated = DENSE.subject.model_copy(update={"dense": Dense(width=96, matrices=3)})
    for case in (DENSE, replace(DENSE, subject=gated), replace(DENSE, gemm=(48, 80))):
        prepared = backends.prepare(replace(case, dtype="fp8"), 0, 1000)
        assert prepared.check is not None
        assert [prepared.check(n) for n in (1, 2, 9)] == ["", "", ""]
        assert prepared.bytes_per_forward == sum(n * k for n, k in case.gemms)
        assert prepared.kernel == "torch._scaled_mm"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"kernel": "onednn-packed"}, "oneDNN packs no FP8 weights"),
        ({"gpu": "a100"}, "a100 has no FP8 GEMMs: they need compute capability 8.9"),
        ({"gemm": (40, 64)}, "FP8 GEMMs need dimensions in multiples of 16, not 40x64"),
        ({"dtype": "int4"}, "no forward is built for int4 weights"),
    ],
)
def test_gemms_that_are_not_there_say_why(changed: dict[str, object], reason: str) -> None:
    """Packed, an older GPU, odd dimensions, four bits."""
    case = replace(DENSE, **{"dtype": "fp8", **changed})  # type: ignore[arg-type]
    with pytest.raises(backends.Unsupported, match=reason):
        backends.prepare(case, 0, 1000)


@pytest.mark.parametrize("routing", ["balanced", "skewed"])
@pytest.mark.parametrize("positions", [1, 3, 4, 9])
def test_moe_is_the_weighted_sum_of_its_experts(routing: str, positions: int) -> None:
    """SwiGLU experts one by one in a loop give what grouped_mm gives."""
    case = replace(MOE, routing=routing)
    g = torch.Generator().manual_seed(0)
    count = 1 if 8 * 4 * 3 * 32 * 16 > 4000 else backends.banks_needed(8 * 4 * 3 * 32 * 16, 1000)
    w13, w2 = next(
        (torch.randn(8, 32, 32, generator=g) / 32**0.5, torch.randn(8, 16, 32, generator=g) / 16**0.5)
        for _ in range(count)
    )
    x = torch.randn(positions, 32, generator=g)
    expected = torch.zeros(positions, 32)
    for token, experts in enumerate(expert_ids(case, positions, 0)):
        for e in experts:
            gate, up = (x[token] @ w13[e]).chunk(2)
            expected[token] += (torch.nn.functional.silu(gate) * up) @ w2[e] / 2
    torch.testing.assert_close(run(case, positions), expected, rtol=1e-4, atol=1e-5)


def test_routing_is_what_its_name_says() -> None:
    """Balanced fills every expert in turn; skewed gives every token the same k."""
    balanced = expert_ids(MOE, 4, 0)
    assert sorted(balanced.flatten().tolist()) == list(range(8))
    skewed = expert_ids(replace(MOE, routing="skewed"), 5, 6)
    assert {tuple(row) for row in skewed.tolist()} == {(6, 7)}


@pytest.mark.parametrize("positions", [1, 5])
def test_attention_is_softmax_over_cache_and_new_tokens(positions: int) -> None:
    """L + N keys for N queries."""
    g = torch.Generator().manual_seed(0)
    banks = backends.banks_needed(2 * 4 * 2 * 40 * 32, 1000)
    shape = (1, 2, 40 + 1024, 32)
    kv = [(torch.randn(shape, generator=g), torch.randn(shape, generator=g)) for _ in range(banks)]
    k, v = (t[:, :, : 40 + positions] for t in kv[0])
    q = torch.randn(1, 2, positions, 32, generator=g)
    expected = torch.softmax(q @ k.transpose(-1, -2) / 32**0.5, -1) @ v
    torch.testing.assert_close(run(ATTENTION, positions), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [DENSE, MOE, ATTENTION])
def test_more_is_rotated_than_the_cache_holds(case: Case) -> None:
    """Two cache sizes lie between two readings of a byte."""
    p = backends.prepare(case, 0, 10**6)
    assert p.bytes_rotated - p.bytes_per_forward >= 2 * 10**6


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(DENSE, backend=Backend("sglang", "1")), "no forward is built for sglang's dense module"),
        (replace(DENSE, kernel="magic"), "no dense kernel named 'magic'"),
    ],
)
def test_what_it_can_not_run_says_why(case: Case, reason: str) -> None:
    """One reason each."""
    with pytest.raises(backends.Unsupported, match=reason):
        backends.prepare(case, 0, 1000)
