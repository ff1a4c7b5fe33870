"""GPU backends without a GPU: stand-ins with the frameworks' signatures compute on the CPU, and every check finds them right.

The calls themselves are held to the sources of each release in test_contracts.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from pytest_nfp import backends
from pytest_nfp.backends import correctness, tensors
from pytest_nfp.cases import Backend, Case
from pytest_nfp.catalog import Attention, Dense, Model, Moe

EXPERTS = Model(name="m", hidden=32, moe=Moe(experts=8, top_k=2, width=48), source="t")
MOE = Case("h200", Backend("vllm", "0.33.0"), "moe", EXPERTS, "bf16", top_k=2, routing="balanced")
HEADS = Model(name="a", hidden=64, attention=Attention(heads=4, kv_heads=2, head_dim=16), source="t")
ATTENTION = Case("h200", Backend("flash-attn", "2.8.3"), "attention", HEADS, "bf16", batch=2, context=40)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "device_of", lambda case: "cpu")


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """A module of that name with this content, and its packages."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        parent = ".".join(parts[:i])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    found = ModuleType(name)
    found.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, found)
    if len(parts) > 1:
        monkeypatch.setattr(sys.modules[".".join(parts[:-1])], parts[-1], found, raising=False)


def compute(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: Any, ids: Any) -> torch.Tensor:
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    return correctness.experts(x, w1, w2, ids, weights).to(x.dtype)


def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module(
        monkeypatch,
        "vllm.model_executor.layers.fused_moe.fused_moe",
        fused_experts=lambda hidden_states, w1, w2, topk_weights, topk_ids, inplace=False: compute(
            hidden_states, w1, w2, topk_weights, topk_ids
        ),
        try_get_optimal_moe_config=lambda w1_shape, w2_shape, top_k, dtype, M: {
            "BLOCK_SIZE_M": 16 if M <= 32 else 64,
            "E": w1_shape[0],
            "N": w2_shape[2],
        },
    )


class TopK(NamedTuple):
    """SGLang's StandardTopKOutput."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor


def sglang(monkeypatch: pytest.MonkeyPatch, place: str) -> list[Any]:
    """SGLang with its fused experts at this place; what its server arguments were set to."""
    set_to: list[Any] = []

    def fused_experts(hidden_states: Any, w1: Any, w2: Any, topk_output: TopK, moe_runner_config: Any) -> torch.Tensor:
        assert set_to, "the kernel asks for the server's arguments"
        assert moe_runner_config.inplace is False
        return compute(hidden_states, w1, w2, topk_output.topk_weights, topk_output.topk_ids)

    module(
        monkeypatch,
        place,
        fused_experts=fused_experts,
        try_get_optimal_moe_config=lambda w1_shape, w2_shape, top_k, dtype, M: {"BLOCK_SIZE_M": 16, "E": w1_shape[0]},
    )
    module(monkeypatch, "sglang.srt.layers.moe.moe_runner.base", MoeRunnerConfig=SimpleNamespace)
    module(monkeypatch, "sglang.srt.layers.moe.topk", StandardTopKOutput=TopK)
    module(
        monkeypatch,
        "sglang.srt.server_args",
        ServerArgs=SimpleNamespace,
        set_global_server_args_for_scheduler=set_to.append,
    )
    return set_to


def pages_of(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """[H_kv, length, D] of one request."""
    return cache[table.long()].flatten(0, 1)[:length].transpose(0, 1)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any,
    causal: bool,
    num_splits: int,
    block_table: Any = None,
) -> torch.Tensor:
    assert causal
    assert num_splits == 0
    out = []
    for i, length in enumerate(cache_seqlens.tolist()):
        if block_table is None:
            k, v = (c[i, :length].transpose(0, 1)[None] for c in (k_cache, v_cache))
        else:
            k, v = (pages_of(c, block_table[i], length)[None] for c in (k_cache, v_cache))
        out.append(correctness.attention(q[i : i + 1].transpose(1, 2), k, v, causal=True).transpose(1, 2))
    return torch.cat(out).to(q.dtype)


class Wrapper:
    """FlashInfer's prefill wrapper."""

    def __init__(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        assert layout == "NHD"
        self.backend = backend

    def plan(self, **given: Any) -> None:
        """Keep what was planned."""
        self.given = given

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attention of what was planned."""
        g = self.given
        assert q.shape[1:] == (g["num_qo_heads"], g["head_dim_qk"])
        out = torch.empty_like(q)
        for i in range(len(g["qo_indptr"]) - 1):
            first, last = g["qo_indptr"][i : i + 2].tolist()
            start, end = g["paged_kv_indptr"][i : i + 2].tolist()
            length = (end - start - 1) * g["page_size"] + int(g["paged_kv_last_page_len"][i])
            k, v = (pages_of(c, g["paged_kv_indices"][start:end], length)[None] for c in paged_kv_cache)
            mine = correctness.attention(q[first:last].transpose(0, 1)[None], k, v, causal=g["causal"])
            out[first:last] = mine[0].transpose(0, 1).to(q.dtype)
        return out


class DecodeWrapper:
    """FlashInfer's decode wrapper: one position a request."""

    def __init__(self, workspace: torch.Tensor, layout: str, use_tensor_cores: bool) -> None:
        assert layout == "NHD"
        assert use_tensor_cores

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        heads: int,
        kv_heads: int,
        dim: int,
        page: int,
        **dtypes: Any,
    ) -> None:
        """As a prefill of one position a request."""
        assert set(dtypes) == {"q_data_type", "kv_data_type"}
        self.prefill = Wrapper(indptr, "NHD", "decode")
        self.prefill.plan(
            qo_indptr=torch.arange(len(indptr)),
            paged_kv_indptr=indptr,
            paged_kv_indices=indices,
            paged_kv_last_page_len=last_page_len,
            num_qo_heads=heads,
            num_kv_heads=kv_heads,
            head_dim_qk=dim,
            page_size=page,
            causal=True,
        )

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attention of what was planned."""
        ran.append("decode")
        return self.prefill.run(q, paged_kv_cache)


class MlaWrapper:
    """FlashInfer's MLA wrapper: latent and rotary keys apart."""

    def __init__(self, workspace: torch.Tensor, backend: str) -> None:
        assert backend in ("fa2", "fa3")

    def plan(self, *given: Any) -> None:
        """Queries, pages, lengths, heads, widths."""
        self.queries, self.begin, self.pages, self.lengths, heads, self.latent, rotary, self.page, causal, scale, *_ = (
            given
        )
        assert causal
        assert scale == (self.latent + rotary) ** -0.5
        assert heads == 8

    def run(self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor) -> torch.Tensor:
        """Attention of each request over its latent."""
        out = torch.empty_like(q_nope)
        for i, length in enumerate(self.lengths.tolist()):
            first, last = self.queries[i : i + 2].tolist()
            start, end = self.begin[i : i + 2].tolist()
            pages = self.pages[start:end].long()
            latent, rotary = (t[pages].flatten(0, 1)[:length] for t in (ckv, kpe))
            q = torch.cat((q_nope[first:last], q_pe[first:last]), -1).transpose(0, 1)[None]
            k = torch.cat((latent, rotary), -1)[None, None]
            mine = correctness.attention(q, k, latent[None, None], causal=True)
            out[first:last] = mine[0].transpose(0, 1).to(out.dtype)
        return out


ran: list[str] = []


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: Any,
    v: Any,
    *,
    max_seqlen_q: int,
    cu_seqlens_q: Any,
    max_seqlen_k: int,
    seqused_k: Any,
    block_table: Any,
    causal: bool,
    fa_version: int,
) -> torch.Tensor:
    """VLLM's flash-attention: queries of all requests one behind the other."""
    assert (fa_version, max_seqlen_k) == (3, int(seqused_k.max()))
    assert cu_seqlens_q.tolist() == list(range(0, len(q) + 1, max_seqlen_q))
    by_request = q.view(-1, max_seqlen_q, *q.shape[1:])
    out = flash_attn_with_kvcache(
        by_request, k, v, cache_seqlens=seqused_k, block_table=block_table, causal=causal, num_splits=0
    )
    return out.flatten(0, 1)


def check(case: Case) -> backends.Prepared:
    prepared = backends.prepare(case, 0, 10**5)
    assert prepared.check is not None
    assert [prepared.check(n) for n in (1, 2, 17)] == ["", "", ""]
    if case.routing != "uniform":  # drawn experts may be those of the forward before
        assert prepared.bytes_rotated - prepared.bytes_per_forward >= 2 * 10**5
    return prepared


@pytest.mark.parametrize("routing", ["balanced", "skewed", "uniform"])
def test_vllms_fused_experts(monkeypatch: pytest.MonkeyPatch, routing: str) -> None:
    """By the five arguments that every release takes; the selector's own configuration is there for the record."""
    vllm(monkeypatch)
    prepared = check(replace(MOE, routing=routing, batch=3))
    assert prepared.setting is not None
    assert prepared.setting(11) == {"BLOCK_SIZE_M": 64, "E": 8, "N": 48}


@pytest.mark.parametrize(
    "place",
    [
        "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe",
        "sglang.srt.layers.moe.fused_moe_triton.fused_moe",
    ],
)
def test_sglangs_fused_experts_lie_in_two_places(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """From 0.5.12 and before; the server's arguments are set, x is not overwritten."""
    set_to = sglang(monkeypatch, place)
    prepared = check(replace(MOE, backend=Backend("sglang", "0.5.23")))
    assert set_to[0].model_path == "dummy"
    assert prepared.setting is not None
    assert prepared.setting(11) == {"BLOCK_SIZE_M": 16, "E": 8}


def test_a_newer_sglang_takes_its_arguments_from_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.5.16: published through the context, not by the old setter."""
    set_to = sglang(monkeypatch, "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe")

    class Context:
        def override_server_args(self) -> SimpleNamespace:
            return SimpleNamespace(install=lambda: set_to.append("installed"))

    module(monkeypatch, "sglang.srt.runtime_context", get_context=Context, RuntimeContext=Context)
    check(replace(MOE, backend=Backend("sglang", "0.5.23")))
    assert set_to == ["installed"]


def test_an_sglang_without_its_experts_says_where_they_were_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that moved them; and a dependency that is missing is the reason itself."""
    sglang(monkeypatch, "sglang.srt.layers.moe.elsewhere")
    case = replace(MOE, backend=Backend("sglang", "0.6.0"))
    with pytest.raises(backends.Unsupported, match="this SGLang has its fused experts in none of"):
        backends.prepare(case, 0, 1000)


def test_flash_attn_over_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """GQA, two requests, causal; its own split heuristic; the same cache without a page table."""
    module(monkeypatch, "flash_attn", flash_attn_with_kvcache=flash_attn_with_kvcache)
    assert check(ATTENTION).kernel == "flash_attn_with_kvcache"
    assert check(replace(ATTENTION, kernel="contiguous")).kernel == "flash_attn_with_kvcache[contiguous]"


def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrappers of FlashInfer that the backend calls."""
    module(
        monkeypatch,
        "flashinfer",
        BatchPrefillWithPagedKVCacheWrapper=Wrapper,
        BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper,
    )


@pytest.mark.parametrize(("gpu", "backend"), [("h200", "fa3"), ("a100", "fa2"), ("b200", "fa2")])
def test_flashinfer_names_its_backend(monkeypatch: pytest.MonkeyPatch, gpu: str, backend: str) -> None:
    """FA3 on Hopper, FA2 elsewhere: in the kernel's name."""
    flashinfer(monkeypatch)
    case = replace(ATTENTION, gpu=gpu, backend=Backend("flashinfer-python", "0.5.3"))
    assert check(case).kernel == f"flashinfer.prefill[{backend}]"


def test_flashinfers_variant_takes_the_decode_kernel_at_one_position_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine does: N = 1 by the decode wrapper, 2 and 17 by the prefill one, all of them right."""
    flashinfer(monkeypatch)
    ran.clear()
    case = replace(ATTENTION, gpu="h20", backend=Backend("flashinfer-python", "0.5.3"), kernel="decode-at-1")
    assert check(case).kernel == "flashinfer.prefill[fa3], decode at N=1"
    assert ran == ["decode"]


def test_flashinfers_mla_reads_the_latent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests, eight heads over one latent of 32 and a rotary key of 16, right at 1, 2 and 17 positions."""
    flashinfer(monkeypatch)
    module(monkeypatch, "flashinfer.mla", BatchMLAPagedAttentionWrapper=MlaWrapper)
    latent = Attention(heads=8, kv_heads=1, head_dim=48, value_dim=32)
    subject = Model(name="mla", hidden=64, attention=latent, source="t")
    prepared = check(replace(ATTENTION, subject=subject, backend=Backend("flashinfer-python", "0.5.3")))
    assert prepared.kernel == "flashinfer.mla[fa3]"
    assert prepared.bytes_per_forward == 2 * 2 * 40 * 48


@pytest.mark.parametrize(
    "place", ["vllm.v1.attention.backends.fa_utils", "vllm.attention.utils.fa_utils"], ids=["new", "old"]
)
def test_vllms_flash_attention_in_the_version_that_it_chooses(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Asked where this release keeps the choice; named in the kernel."""
    module(monkeypatch, "vllm.vllm_flash_attn.flash_attn_interface", flash_attn_varlen_func=flash_attn_varlen_func)
    module(monkeypatch, place, get_flash_attn_version=lambda: 3)
    case = replace(ATTENTION, backend=Backend("vllm", "0.33.0"))
    assert check(case).kernel == "vllm.flash_attn_varlen_func[fa3]"
    monkeypatch.setattr(sys.modules[place], "get_flash_attn_version", lambda: None)
    with pytest.raises(backends.Unsupported, match="vLLM takes no flash-attention on this GPU"):
        backends.prepare(case, 0, 1000)


def test_a_vllm_that_moved_its_choice_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither place is there; a dependency of it that is missing is the reason itself."""
    module(monkeypatch, "vllm.vllm_flash_attn.flash_attn_interface", flash_attn_varlen_func=flash_attn_varlen_func)
    with pytest.raises(backends.Unsupported, match="chooses its flash-attention version in none of"):
        backends.prepare(replace(ATTENTION, backend=Backend("vllm", "0.34.0")), 0, 1000)


def test_torchs_attention_and_experts_on_a_gpu() -> None:
    """SDPA over a GQA cache and grouped_mm, in BF16, right at 1, 2 and 17 positions."""
    torch_2 = Backend("torch", "2.13.0")
    assert check(replace(ATTENTION, backend=torch_2)).kernel == "torch.scaled_dot_product_attention"
    assert check(replace(MOE, backend=torch_2)).kernel == "torch.grouped_mm"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
def test_torchs_gemms_on_a_gpu(dtype: str) -> None:
    """One kernel: the vendor's; FP8 with its scales."""
    model = Model(name="d", hidden=64, dense=Dense(width=96), source="t")
    kernel = check(Case("h200", Backend("torch", "2.13.0"), "dense", model, dtype)).kernel
    assert kernel == ("torch._scaled_mm" if dtype == "fp8" else "torch.matmul")


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(MOE, dtype="fp8"), "no forward is built for fp8 weights; there are fp32, bf16, fp16"),
        (replace(MOE, gpu="cpu", backend=Backend("sglang", "0.5.23")), "SGLang's fused experts run on a GPU alone"),
        (replace(ATTENTION, gpu="cpu"), "flash-attn runs on a GPU alone"),
        (
            replace(MOE, backend=Backend("vllm", "0.8.5")),
            "vllm==0.8.5 is too old: its forwards are known from 0.9.1 on",
        ),
        (replace(ATTENTION, gpu="cpu", backend=Backend("flashinfer-python", "1")), "FlashInfer runs on a GPU alone"),
        (replace(ATTENTION, backend=Backend("vllm", "1")), "vllm can't be imported here: No module named"),
        (
            replace(MOE, backend=Backend("sglang", "0.5.23")),
            r"sglang can't be imported here: No module named 'sglang': pip install 'pytest-nfp\[sglang\]'",
        ),
    ],
)
def test_what_can_not_run_here_says_why(monkeypatch: pytest.MonkeyPatch, case: Case, reason: str) -> None:
    """One reason each, and the run goes on."""
    vllm(monkeypatch)
    with pytest.raises(backends.Unsupported, match=reason):
        backends.prepare(case, 0, 1000)


def test_weights_that_do_not_fit_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The framework's own first line, with the bytes that it asked for."""
    vllm(monkeypatch)

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 GiB.\nGPU 0 has ...")

    monkeypatch.setattr(torch, "randn", no_memory)
    with pytest.raises(
        backends.Unsupported, match=r"^vllm can't be prepared: CUDA out of memory. Tried .* 96.00 GiB\.$"
    ):
        backends.prepare(MOE, 0, 1000)
