"""SGLang's engine by what can be told without SGLang: what a server is started with, and what counts as proof."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pytest_nfp.backends import MAX_POSITIONS, sglang_model  # noqa: E402
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
    assert sglang_model.server_arguments({"attention_backend"}, CASE, "folder", 0) == {
        "attention_backend": "flashinfer"
    }
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


def engine_of(**module: object) -> tuple[sglang_model._Engine, list[tuple[str, tuple[object, ...]]]]:
    """An engine of a release that has these names, none of which does anything but be called."""
    called: list[tuple[str, tuple[object, ...]]] = []

    def record(name: str) -> Callable[..., str]:
        def call(*arguments: object, **keywords: object) -> str:
            called.append((name, (*arguments, *keywords)))
            return name

        return call

    made = sglang_model._Engine.__new__(sglang_model._Engine)
    made._ob = SimpleNamespace(**{name: record(name) if value is None else value for name, value in module.items()})
    return made, called


@pytest.mark.parametrize(
    ("names", "calls"),
    [
        (("initialize_moe_config", "initialize_fp8_gemm_config"), [("initialize_moe_config", ("a",)), ("initialize_fp8_gemm_config", ("a",))]),
        (("publish", "initialize_moe_config"), [("publish", ("a", "role")), ("initialize_moe_config", ())]),
        (
            ("publish", "spawn_world_rank", "SpawnRanks", "initialize_moe_config"),
            [("spawn_world_rank", ("a", "tp_rank", "pp_rank")), ("SpawnRanks", ("world_rank", "gpu_id")),
             ("publish", ("a", "role", "ranks")), ("initialize_moe_config", ())],
        ),
        (
            ("publish", "spawn_world_rank", "SpawnRanks", "_init_process_global_configs", "initialize_moe_config"),
            [("spawn_world_rank", ("a", "tp_rank", "pp_rank")), ("SpawnRanks", ("world_rank", "gpu_id")),
             ("publish", ("a", "role", "ranks")), ("_init_process_global_configs", ())],
        ),
    ],
    ids=["to 0.5.18", "0.5.19", "0.5.21", "0.5.22"],
)  # fmt: skip
def test_what_layers_read_is_given_as_the_release_takes_it(
    names: tuple[str, ...], calls: list[tuple[str, tuple[object, ...]]]
) -> None:
    """Handed over, published, published with a rank, or by one call: the four ways of 0.5.9 to 0.5.23."""
    made, called = engine_of(**dict.fromkeys(names))
    made._publish("a")
    assert called == calls


class Request(SimpleNamespace):
    """A request that notes how its extension was told."""

    def __init__(self, how: str | None, **fields: object) -> None:
        super().__init__(told=[], **fields)
        if how is not None:
            setattr(self, how, lambda *given: self.told.append(given))


class Translated:
    """A batch of a release that translates it for its worker."""

    get_model_worker_batch = None


@pytest.mark.parametrize(
    ("how", "batch", "told", "fields"),
    [
        ("set_extend_input_len", Translated, [(3,)], {"fill_ids": [7, 7, 7, 7, 7]}),
        ("set_extend_input_len", object, [(3,)], {"fill_len": 5, "full_untruncated_fill_ids": array("q", [7] * 5)}),
        ("set_extend_range", object, [(2, 5)], {"full_untruncated_fill_ids": array("q", [7] * 5)}),
        (None, object, [], {"extend_end": 5, "full_untruncated_fill_ids": array("q", [7] * 5)}),
    ],
    ids=["to 0.5.12", "to 0.5.14", "to 0.5.21", "0.5.22"],
)
def test_a_requests_tokens_are_told_as_the_release_reads_them(
    how: str | None, batch: type, told: list[tuple[int, ...]], fields: dict[str, object]
) -> None:
    """Five tokens of which two are cached, in the four ways of 0.5.9 to 0.5.23; the cached ones' slots, or their number."""
    made, _ = engine_of(ScheduleBatch=batch)
    slots = torch.arange(20, dtype=torch.int32).view(2, 10)
    made._runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=slots))
    request = Request(how, req_pool_idx=1, prefix_indices=None)
    made._set_tokens(request, [7] * 5, 2)
    assert request.told == told
    assert {name: getattr(request, name) for name in fields} == fields
    assert request.prefix_indices.tolist() == [10, 11]
    moved = Request(how, kv=SimpleNamespace(req_pool_idx=0), prefix_indices=None)  # 0.5.19 to 0.5.21
    made._set_tokens(moved, [7] * 5, 2)
    assert moved.prefix_indices.tolist() == [0, 1]
    newest = Request(None, prefix_len=0)
    made._set_tokens(newest, [7] * 5, 2)
    assert newest.prefix_len == 2


class ReqToTokenPool:
    """0.5.9's pool of rows: two requests that have one already are refused."""

    def alloc(self, requests: list[Any]) -> list[int]:
        assert sum(r.req_pool_idx is not None for r in requests) <= 1
        return [9 if r.req_pool_idx is None else r.req_pool_idx for r in requests]


def test_requests_keep_their_rows() -> None:
    """Those that have one get it again, however many they are; a new one is the pool's to place; another pool is left alone."""
    made, _ = engine_of()
    pool = ReqToTokenPool()
    made._runner = SimpleNamespace(req_to_token_pool=pool)
    made._keep_rows()
    assert pool.alloc([SimpleNamespace(req_pool_idx=3), SimpleNamespace(req_pool_idx=4)]) == [3, 4]
    assert pool.alloc([SimpleNamespace(req_pool_idx=3), SimpleNamespace(req_pool_idx=None)]) == [3, 9]
    recurrent = SimpleNamespace(alloc=len)
    made._runner = SimpleNamespace(req_to_token_pool=recurrent)
    made._keep_rows()
    assert recurrent.alloc is len
