"""nano-vLLM's engine against a stand-in of the runner that it calls: pages, prefixes, proof, and what it is not asked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pytest_nfp.backends import Unsupported, memory, nano_vllm_model  # noqa: E402
from pytest_nfp.cases import Backend, Case  # noqa: E402
from pytest_nfp.catalog import Attention, Dense, Model, Moe  # noqa: E402

DENSE = Model(
    name="d",
    layers=2,
    hidden=8,
    dense=Dense(width=16, matrices=3),
    attention=Attention(heads=2, kv_heads=1, head_dim=4),
    vocabulary=64,
    source="t",
)
CASE = Case("h200", Backend("nano-vllm", "0.2.0"), "model", DENSE, "bf16", batch=2, context=300)


class Context:
    """The global that the runner sets and its layers read."""

    def __init__(self) -> None:
        self.given: Any = None

    def set_context(self, given: Any) -> None:
        self.given = given

    def get_context(self) -> Any:
        return self.given

    def reset_context(self) -> None:
        self.given = None


class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, rows: Any) -> Any:
        return rows


def runner_class(context: Context, shift: int) -> type:
    """A runner that computes nothing and sets what nano-vLLM's sets; its slots are off by `shift`."""

    class Runner:
        def __init__(self, config: Any, rank: int, event: list[Any]) -> None:
            self.config, self.block_size = config, config.kvcache_block_size
            torch.set_default_dtype(torch.bfloat16)  # as a constructor that fails leaves it
            self.model = torch.nn.Sequential(Layer(), torch.nn.Linear(4, 4, dtype=torch.float32), Layer())
            self.warmup_model()
            self.allocate_kv_cache()
            self.ran: list[int] = []

        def warmup_model(self) -> None:
            raise AssertionError("the whole memory would be taken")

        def allocate_kv_cache(self) -> None:
            raise AssertionError("the whole memory would be taken")

        def prepare_prefill(self, sequences: list[Any]) -> tuple[Any, Any]:
            slots: list[int] = []
            for s in sequences:
                assert len(s.tokens) == s.num_cached_tokens + s.num_scheduled_tokens
                assert len(s.block_table) == -(-len(s.tokens) // self.block_size)
                slots += [
                    s.block_table[p // self.block_size] * self.block_size + p % self.block_size + shift
                    for p in range(s.num_cached_tokens, len(s.tokens))
                ]
            ends = torch.tensor([len(s.tokens) for s in sequences]).cumsum(0)
            cached = any(s.num_cached_tokens for s in sequences)
            context.set_context(
                SimpleNamespace(
                    cu_seqlens_k=ends, block_tables=torch.zeros(1) if cached else None, slot_mapping=torch.tensor(slots)
                )
            )
            return torch.zeros(len(slots), 4, dtype=torch.float32), torch.zeros(len(slots))

        def run_model(self, ids: Any, positions: Any, is_prefill: bool) -> Any:
            self.ran.append(len(ids))
            return self.model(ids)

    return Runner


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    context = Context()

    def module(name: str, **held: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(held)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    def sequence(tokens: list[int]) -> Any:
        return SimpleNamespace(tokens=tokens)

    def config(folder: str, **given: Any) -> Any:
        hf = SimpleNamespace(head_dim=4, num_key_value_heads=1, rope_scaling={})
        return SimpleNamespace(kvcache_block_size=256, hf_config=hf, **given)

    held = module("nanovllm.utils.context", reset_context=context.reset_context, get_context=context.get_context)
    held.set_context = context.set_context  # type: ignore[attr-defined]
    for name in ("nanovllm", "nanovllm.engine", "nanovllm.layers"):
        module(name)
    module("nanovllm.utils", context=held)
    module("nanovllm.config", Config=config)
    module("nanovllm.engine.sequence", Sequence=sequence)
    module("nanovllm.layers.attention", Attention=Layer)
    runner = module("nanovllm.engine.model_runner", ModelRunner=runner_class(context, 0))
    sys.modules["nanovllm.engine"].model_runner = runner  # type: ignore[attr-defined]
    monkeypatch.setattr(memory, "require", lambda case: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    yield context
    torch.set_default_dtype(torch.float32)


def test_each_forward_extends_the_prefix_by_n_and_is_proven(context: Context) -> None:
    """b * N rows over b * L cached tokens, in slots of each request's own pages, the step no shorter than its forward; torch's
    default dtype is as before, and no context is left set.
    """
    prepared = nano_vllm_model.prepare(CASE, 0, 1)
    assert torch.get_default_dtype() == torch.float32
    took = {n: prepared.forward(n)() for n in (1, 17)}
    assert prepared.proof is not None and prepared.host is not None and prepared.modes is not None
    assert prepared.proof() == {1: (2, 600), 17: (34, 600)}
    assert all(isinstance(us, float) and prepared.host()[n] >= 0 for n, us in took.items())
    assert prepared.modes() == {1: "eager", 17: "eager"}
    assert prepared.alone
    assert context.given is None


def test_a_forward_that_writes_elsewhere_is_not_proven(context: Context) -> None:
    """Slots that are not those behind the prefix: nothing is proven, so the session calls the point invalid."""
    sys.modules["nanovllm.engine.model_runner"].ModelRunner = runner_class(context, 1)  # type: ignore[attr-defined]
    prepared = nano_vllm_model.prepare(CASE, 0, 1)
    prepared.forward(4)
    assert prepared.proof is not None
    assert prepared.proof() == {4: (0, 0)}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"gpu": "cpu"}, "runs on a GPU alone"),
        ({"dtype": "fp32"}, "computes in 16 bits: give --nfp-dtype=bf16"),
        ({"subject": DENSE.model_copy(update={"moe": Moe(experts=4, top_k=2, width=8)})}, "d has experts"),
    ],
)
def test_what_it_has_not_is_refused(changed: dict[str, Any], reason: str) -> None:
    """A CPU, 32 bits, experts: said before anything is imported."""
    with pytest.raises(Unsupported, match=reason):
        nano_vllm_model.prepare(replace(CASE, **changed), 0, 1)
