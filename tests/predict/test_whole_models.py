"""A model is the sum of its modules: which ones, how often, at which shape, and where the bound lies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pytest_nfp import catalog
from pytest_nfp.cases import Backend
from pytest_nfp.catalog import UnknownName
from pytest_nfp.catalog.parallel import on_rank, parse_parallel
from pytest_nfp.cli import main
from pytest_nfp.predict import Predicted, lookup, whole_models
from pytest_nfp.predict.whole_models import Workload
from pytest_nfp.principle import Prediction, closed_form, predict_on
from pytest_nfp.principle.routing import Replay
from pytest_nfp.verdict import term_in_words

VLLM, FLASH = Backend("vllm", "0.24.0"), Backend("flash-attn", "2.8.3")
H200 = Workload("h200", VLLM, FLASH)


def roofline(composed: whole_models.Composed, positions: Sequence[int] = ()) -> Prediction:
    """What the sum of the parts says."""
    found = composed.predict(0.2, positions).tile_roofline
    assert found is not None
    return found


def weights(model: str) -> float:
    """Weights that the GEMMs and experts of a model hold together."""
    m = catalog.model(model)
    total = 0.0
    for p in whole_models.parts(m, H200):
        if p.case.gemm is not None:
            total += p.count * p.case.gemm[0] * p.case.gemm[1]
        elif p.case.module == "moe":
            assert m.moe is not None
            total += p.count * m.moe.experts * 3 * m.hidden * m.moe.width
    return total


@pytest.mark.parametrize(
    ("model", "billions"),
    [("qwen3-8b", 7.57), ("llada-2.1-mini", 15.9), ("qwen3-30b-a3b", 30.2), ("mixtral-8x7b", 46.6)],
)
def test_the_parts_hold_the_models_weights(model: str, billions: float) -> None:
    """Within 1.5% of the published count without the embedding (8.19 - 0.62, 16.3 - 0.32, 30.5 - 0.31, 46.7 - 0.13 billion), and
    to the weight what the catalog's model counts.
    """
    assert weights(model) / 1e9 == pytest.approx(billions, rel=0.015)
    assert weights(model) == catalog.model(model).weights()


def test_ranks_cut_the_head_and_the_experts() -> None:
    """Eight ranks: each holds an eighth of the weights but for the copied router and KV projections."""
    whole, eighth = (catalog.model("qwen3-30b-a3b"), on_rank(catalog.model("qwen3-30b-a3b"), parse_parallel("tp8")))
    assert eighth.vocabulary == 151936 // 8
    assert eighth.weights() == pytest.approx(whole.weights() / 8, rel=0.03)


@pytest.mark.network
def test_a_short_trace_bounds_what_can_be_composed() -> None:
    """200 tokens say nothing of more: the curve ends there, and N_max is found within it."""
    tokens = tuple(tuple((8 * t + i) % 128 for i in range(8)) for t in range(200))
    on = replace(H200, routing=Replay(tokens), batch=2)
    composed = whole_models.compose(catalog.model("qwen3-30b-a3b"), on)
    assert composed.last == 100
    assert roofline(composed, [8, 500]).points[-1].positions <= 100


@pytest.mark.network
def test_experts_of_many_ranks_are_not_the_recorded_ones() -> None:
    """Expert parallelism was recorded with other routing: the prediction stands, an eighth of it a rank."""
    model = on_rank(catalog.model("qwen3-30b-a3b"), parse_parallel("ep8"))
    composed = whole_models.compose(model, H200, recorded=True)
    assert composed.basis["experts"].startswith("calibrated on")


def test_merged_and_single_gemms_are_the_same_weights() -> None:
    """Engines merge q, k, v and gate, up; transformers does not."""

    def size(merged: bool) -> int:
        found = whole_models.parts(catalog.model("qwen3-8b"), H200, merged)
        return sum(p.count * p.case.gemm[0] * p.case.gemm[1] for p in found if p.case.gemm is not None)

    assert size(True) == size(False)
    names = {p.name for p in whole_models.parts(catalog.model("qwen3-8b"), H200, merged=False)}
    assert names == {"q", "k and v", "attention", "o", "ffn up", "ffn down", "head"}


def test_weights_of_few_bits_leave_cache_head_and_router_in_bf16() -> None:
    """FP8 weights: the KV cache is not quantised with them."""
    found = {
        p.name: p.case.dtype for p in whole_models.parts(catalog.model("llada-2.1-mini"), replace(H200, dtype="fp8"))
    }
    assert {name for name, dtype in found.items() if dtype == "bf16"} == {"attention", "router", "head"}
    assert found["experts"] == "fp8"


@pytest.mark.network
def test_attention_takes_over_from_the_experts_as_the_context_grows() -> None:
    """LLaDA-2.1-mini on H200, b = 1: experts bound it at 256 cached tokens, attention at 32768, and N_max never grows."""
    found = [
        roofline(whole_models.compose(catalog.model("llada-2.1-mini"), replace(H200, context=context)))
        for context in (256, 4096, 16384, 32768)
    ]
    assert (found[0].limiting, found[-1].limiting) == ("experts", "attention")
    n_max = [p.n_max for p in found]
    assert n_max == sorted(n_max, reverse=True)


@pytest.mark.network
def test_the_sum_is_its_parts_and_a_floor_of_the_models_weights() -> None:
    """Shares add up to one; T(1) of a dense model is no less than its weights over the bandwidth."""
    composed = whole_models.compose(catalog.model("qwen3-8b"), H200)
    assert sum(composed.shares(1).values()) == pytest.approx(1.0)
    assert composed.latency_us(1) == pytest.approx(sum(t(1) for t in composed.latencies.values()))
    floor = 2 * weights("qwen3-8b") / catalog.gpu("h200").bandwidth * 1e6
    assert floor < composed.latency_us(1) < 1.6 * floor
    low, high = roofline(composed).boundary.n_max_interval
    assert low <= roofline(composed).n_max
    assert high is None or roofline(composed).n_max <= high


@pytest.mark.network
def test_recorded_modules_stand_where_their_tables_hold_the_shape() -> None:
    """Each part says what it is; N_max so composed lies in the predicted interval, for four models over their contexts."""
    for name in ("qwen3-8b", "llada-2.1-mini", "qwen3-30b-a3b", "mixtral-8x7b"):
        model = catalog.model(name)
        for context in model.context:
            on = replace(H200, context=context)
            recorded, predicted = (whole_models.compose(model, on, recorded=r) for r in (True, False))
            assert recorded.basis["attention"].startswith("recorded at one position (aiconfigurator-core")
            if model.moe is not None:
                assert recorded.basis["experts"].startswith("recorded (aiconfigurator-core")
            assert recorded.basis["head"].startswith("calibrated on")
            low, high = roofline(predicted).boundary.n_max_interval
            assert low <= roofline(recorded).n_max <= (high or recorded.last)


def test_without_an_attention_framework_it_is_said_to_be_missing() -> None:
    """The bound is then that of the other modules."""
    composed = whole_models.compose(catalog.model("qwen3-8b"), replace(H200, attention=None))
    assert composed.missing == ("attention",)
    assert "attention" not in composed.latencies


def test_a_module_shape_is_one_layer_of_what_it_describes() -> None:
    """Its FFN or its experts, and nothing is missing: it is the module, not a model."""
    dense, experts = catalog.model("dense-ffn-4096x9216"), catalog.model("moe-ffn-256x4096x1024")
    assert [(p.name, p.count) for p in whole_models.parts(dense, H200)] == [("ffn up", 1), ("ffn down", 1)]
    assert [p.name for p in whole_models.parts(experts, H200)] == ["router", "experts"]
    assert whole_models.missing(dense, H200) == ()


def test_the_projections_of_mla_are_in_no_part_and_its_framework_is_one_that_has_it() -> None:
    """Latent attention has its core where FlashInfer is named; flash-attn's is not described."""
    model = catalog.model("deepseek-v3")
    on = replace(H200, attention=Backend("flashinfer-python", "0.5.3"))
    names = [p.name for p in whole_models.parts(model, on)]
    assert "attention" in names and "qkv" not in names
    assert whole_models.missing(model, on) == ("attention projections",)
    with pytest.raises(UnknownName, match="flash-attn's MLA is not described"):
        whole_models.compose(model, H200)


@pytest.mark.network
@pytest.mark.parametrize("gpu", ["h20", "h800", "h200"])
def test_every_command_gives_the_same_bound_of_a_model(capsys: pytest.CaptureFixture[str], gpu: str) -> None:
    """predict, check and table of one workload: N_idle, the principle, the tile roofline and what limits it; the lookup its principle."""
    asked = ["--gpu", gpu, "--model", "llada-2.1-mini", "--backend", "vllm==0.9.1", "--attention", "flash-attn==2.8.3"]

    def answer(command: str, *more: str) -> Any:
        main([command, *asked, "--json", *more])
        return json.loads(capsys.readouterr().out)

    predicted = answer("predict", "--context", "256")
    checked = answer("check", "--context", "256", "--positions", "4096")
    [cell] = answer("table", "--context", "256", "--batch", "1")["cells"]
    own = predicted["tile_roofline"]
    for other in (checked, cell):
        assert (other["n_max"], other["limiting"]) == (own["n_max"], own["limiting"])
        assert (other["principle"]["n_max"], other["n_idle"]) == (predicted["n_max"], predicted["n_idle"])
        assert other["baseline_positions"] == predicted["baseline_positions"] == 32
    if gpu in lookup.GPUS:
        row = next(r for r in lookup.lookup([gpu]) if r["module"] == "experts balanced, k=8")
        assert (row["n_max"], row["limiting"]) == (predicted["n_max"], predicted["limiting"])


def test_a_bound_below_n0_is_not_near_free_at_n0() -> None:
    """N_max is the largest N >= N0 within tolerance of T(N0): N0 itself where the smallest term lies below it, with that term beside it."""
    c = closed_form(moe=2048, attention=32, baseline_positions=128)
    assert (c.n_max, c.bound, c.is_near_free, c.limiting) == (128, 32, False, "attention")
    assert closed_form(moe=2048, attention=128, baseline_positions=128).is_near_free
    roof = predict_on({"": float}, [128, 256], 0.2, 128, (1.0, 1.0))
    term = Predicted(None, c, roof, "").as_dict()["principle"]
    assert term_in_words(term) == "128 (not near-free at N0: the bound is 32)"
