"""Which experts the layers of a full model are given, and what is counted of them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pytest_nfp.backends import Unsupported  # noqa: E402
from pytest_nfp.backends.expert_routing import Routes  # noqa: E402
from pytest_nfp.cases import Backend, Case  # noqa: E402
from pytest_nfp.catalog import Attention, Dense, Model, Moe  # noqa: E402
from pytest_nfp.principle.routing import Replay, active_experts  # noqa: E402

MODEL = Model(
    name="m", layers=3, hidden=8, dense=Dense(width=8), moe=Moe(experts=16, top_k=2, width=8, dense_layers=1),
    attention=Attention(heads=1, kv_heads=1, head_dim=8), source="t",
)  # fmt: skip
TRACE = Replay(tuple((i % 16, (i + 5) % 16) for i in range(10)))


def routes(routing: Any) -> Routes:
    return Routes(
        Case("cpu", Backend("vllm", "0.32.0"), "model", MODEL, "fp32", context=64, top_k=2, routing=routing), 0
    )


def forward(made: Routes, positions: int, layers: int = 2) -> None:
    """What an engine does: each layer of experts takes the next route."""
    made.use(positions)
    for _ in range(layers):
        made.note(made.take(made.tokens, torch.device("cpu"), torch.int64))


@pytest.mark.parametrize("routing", ["balanced", "skewed", TRACE], ids=str)
def test_every_layer_reads_what_the_routing_says(routing: Any) -> None:
    """At one position and at several, each layer at its own first expert."""
    made = routes(routing)
    for n in (1, 3, 8):
        forward(made, n)
        assert made.active(n) == active_experts(routing, n, 16, 2)


def test_a_layer_that_was_not_seen_or_has_collapsed_is_not_hidden_by_the_others() -> None:
    """Two layers have experts: one seen, or three, is none; of two that differ the one that is off is told."""
    for layers, active in ((1, 0), (2, 6), (3, 0)):
        made = routes("balanced")
        forward(made, 3, layers)
        assert made.active(3) == active
    assert made.active(4) == 0
    for routing, off in (("balanced", 1), ("skewed", 6)):
        made = routes(routing)
        forward(made, 3, 1)
        made.note(torch.zeros(3, 2, dtype=torch.int64) if routing == "balanced" else torch.arange(6).view(3, 2))
        assert made.active(3) == off


def test_a_trace_goes_round_in_what_is_not_measured_alone() -> None:
    """A prefill of 64 tokens meets the trace's ten again and again; 11 measured positions are more than it can tell of."""
    made = routes(TRACE)
    made.use(4)
    prefill = made.take(64, torch.device("cpu"), torch.int64)
    assert prefill.shape == (64, 2)
    assert torch.equal(prefill[:10], prefill[10:20])
    made.use(11)
    with pytest.raises(Unsupported, match="the trace has 10 tokens, 11 are needed"):
        made.take(11, torch.device("cpu"), torch.int64)
