"""vLLM's engine by what can be told without vLLM: graph modes, captured sizes, and who chooses the experts."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pytest_nfp.backends import MAX_POSITIONS, Unsupported, vllm_model  # noqa: E402
from pytest_nfp.cases import Backend, Case  # noqa: E402
from pytest_nfp.catalog import Dense, Model, Moe  # noqa: E402

MODEL = Model(name="m", hidden=8, moe=Moe(experts=16, top_k=4, width=8), source="t")
CASE = Case("cpu", Backend("vllm", "0.28.0"), "model", MODEL, "fp32", top_k=2, routing="balanced")


def test_the_graph_mode_is_read_from_the_forwards_context() -> None:
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
        sizes = vllm_model.capture_sizes(batch, MAX_POSITIONS)
        assert sizes == sorted(set(sizes))
        assert batch * MAX_POSITIONS <= sizes[-1] < batch * MAX_POSITIONS + max(256, 64 * batch)
        assert len(sizes) < 100


def test_experts_run_without_graphs_on_a_gpu() -> None:
    """A captured graph keeps the routing that it was captured with; a dense model is captured at every N, before 0.11 in the default mode."""
    dense = Model(name="d", hidden=8, dense=Dense(width=8), source="t")
    for release, mode in (("0.9.1", None), ("0.32.0", "PIECEWISE")):
        experts = replace(CASE, gpu="h200", backend=Backend("vllm", release))
        assert vllm_model._graphs(experts) == {"enforce_eager": True}
        asked = vllm_model._graphs(replace(experts, subject=dense, top_k=None, routing=None))["compilation_config"]
        assert asked.get("cudagraph_mode") == mode
        assert asked["cudagraph_capture_sizes"][-1] >= MAX_POSITIONS


def test_before_the_simulator_the_layers_own_choice_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.9.1 to 0.10.1: FusedMoE.select_experts, called on its class; a layer without it is refused."""

    class FusedMoE:
        @staticmethod
        def select_experts(hidden_states: Any, router_logits: Any, top_k: int) -> tuple[object, Any]:
            return None, torch.zeros(hidden_states.shape[0], top_k, dtype=torch.int32)

    layer = ModuleType("vllm.model_executor.layers.fused_moe.layer")
    layer.FusedMoE = FusedMoE  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.fused_moe"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, layer.__name__, layer)
    for read in (4, 4):  # A second engine of the process: its routing takes the first one's place.
        strategy = vllm_model._register(replace(CASE, gpu="h200", backend=Backend("vllm", "0.9.1")), 0)
        strategy.use(2)
        FusedMoE.select_experts(hidden_states=torch.zeros(2, 8), router_logits=torch.zeros(2, 16), top_k=2)
        assert strategy.active(2) == read
    del FusedMoE.select_experts
    with pytest.raises(Unsupported, match="chooses experts elsewhere"):
        vllm_model._register(replace(CASE, gpu="h200", backend=Backend("vllm", "0.9.1")), 0)


def test_cpu_kernels_that_choose_their_experts_get_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own choice is made and dropped, and what they then read is counted; the next engine's routing takes the last one's place;
    a function that a module only imports stays the router's.
    """
    asked: list[int] = []

    def select_experts(hidden_states: Any, router_logits: Any, top_k: int) -> tuple[object, Any]:
        asked.append(hidden_states.shape[0])
        return None, torch.zeros(hidden_states.shape[0], top_k, dtype=torch.int32)

    for at, name in enumerate(vllm_model.CPU_ROUTERS):
        module = ModuleType(name)
        module.select_experts = select_experts  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        if at == 0:
            select_experts.__module__ = name
    imported = sys.modules[vllm_model.CPU_ROUTERS[1]]
    kernel = sys.modules[vllm_model.CPU_ROUTERS[0]]
    for routing, read in (("balanced", 6), ("skewed", 2)):
        strategy = vllm_model._Strategy(
            Case("cpu", CASE.backend, "model", MODEL, "fp32", top_k=2, routing=routing),
            0,
        )
        vllm_model._install_in_cpu_kernels(strategy)
        strategy.use(3)
        weights, ids = kernel.select_experts(hidden_states=torch.zeros(3, 8), router_logits=torch.zeros(3, 16), top_k=2)
        assert (tuple(ids.shape), ids.dtype, strategy.active(3)) == ((3, 2), torch.int32, read)
        assert weights.sum(1).tolist() == [1, 1, 1]
    assert asked == [3, 3]
    assert imported.select_experts is select_experts
