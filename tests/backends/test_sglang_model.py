"""SGLang's engine by what can be told without SGLang: what a server is started with, and what counts as proof."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from pytest_nfp.backends import MAX_POSITIONS, sglang_model, vllm_model  # noqa: E402
from pytest_nfp.cases import Backend, Case  # noqa: E402
from pytest_nfp.catalog import Attention, Dense, Model  # noqa: E402

MODEL = Model(
    name="d",
    layers=2,
    hidden=8,
    dense=Dense(width=16),
    attention=Attention(heads=2, kv_heads=1, head_dim=4),
    source="t",
)
CASE = Case("h200", Backend("sglang", "0.5.9"), "model", MODEL, "bf16", batch=2, context=300)


def test_a_server_is_given_what_its_release_knows() -> None:
    """Room for the prefixes and their extension; graphs off under either release's name for them; nothing unknown."""
    known = {"model_path", "max_total_tokens", "disable_cuda_graph", "dtype", "device"}
    given = sglang_model.server_arguments(known, CASE, "folder", 0)
    assert set(given) == known
    assert given["max_total_tokens"] >= 2 * (300 + MAX_POSITIONS)
    assert (given["disable_cuda_graph"], given["dtype"], given["device"]) == (True, "bfloat16", "cuda")


@pytest.mark.parametrize(
    ("changed", "taken", "rows"),
    [({}, 8, 8), ({}, 7, 0), ({"extend_num_tokens": 6}, 8, 0), ({"input_ids": torch.zeros(9)}, 8, 0)],
)
def test_only_counts_that_agree_prove_n(changed: dict[str, object], taken: int, rows: int) -> None:
    """Rows, lengths behind the prefixes, inputs and KV slots that were taken must be the same number."""
    given = {
        "extend_num_tokens": 8,
        "seq_lens": torch.tensor([304, 304]),
        "extend_prefix_lens": torch.tensor([300, 300]),
        "input_ids": torch.zeros(8),
    }
    assert sglang_model.counted(SimpleNamespace(**given | changed), taken) == rows


def test_vllms_graph_mode_is_read_from_the_forwards_context() -> None:
    """Mode and padded rows of a replayed graph; eager where there is none, or no context that tells."""

    def context(name: str, rows: int) -> SimpleNamespace:
        return SimpleNamespace(
            cudagraph_runtime_mode=SimpleNamespace(name=name), batch_descriptor=SimpleNamespace(num_tokens=rows)
        )

    assert vllm_model.graph_of(context("PIECEWISE", 24)) == ("piecewise", 24)
    assert vllm_model.graph_of(context("NONE", 24)) == ("eager", None)
    assert vllm_model.graph_of(SimpleNamespace()) == ("eager", None)


def test_graphs_are_captured_for_every_n() -> None:
    """Sizes reach b * the most positions, in steps that grow: no N runs eagerly beside others that do not; and they are not hundreds."""
    for batch in (1, 2, 8, 64):
        sizes = vllm_model.capture_sizes(batch)
        assert sizes == sorted(set(sizes))
        assert batch * MAX_POSITIONS <= sizes[-1] < batch * MAX_POSITIONS + max(256, 64 * batch)
        assert len(sizes) < 100
