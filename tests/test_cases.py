"""Case identities and expansion."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_nfp import catalog
from pytest_nfp.cases import BYTES_PER_ELEMENT, Backend, Case, expand, parse_backend, read_key, variants
from pytest_nfp.catalog import UnknownName

VLLM = Backend("vllm", "0.9.1")


def test_ids_are_unique_over_the_whole_catalog() -> None:
    """No two cases share an id."""
    ids = [
        c.id
        for m in catalog.models()
        for module in ("dense", "moe", "attention")
        for gpu, backend in (
            ("h20", VLLM),
            ("h20", Backend("flash-attn", "2.8.3")),
            ("cpu", Backend("torch", "2.13.0")),
        )
        for c in expand(gpu, backend, module, m)
    ]
    assert len(ids) == len(set(ids)) > 50


def test_a_key_says_what_its_case_is() -> None:
    """Read back, of every case of the catalog on a CPU and a GPU, with its variants; a user's own curve says nothing."""
    for model in catalog.models():
        for gpu, framework, module in (
            ("h200", "vllm", "moe"), ("h200", "flash-attn", "attention"), ("h200", "torch", "dense"), ("h200", "vllm", "model"),
            ("cpu", "torch", "dense"), ("cpu", "torch", "moe"), ("cpu", "torch", "attention"),
        ):  # fmt: skip
            for dtype in BYTES_PER_ELEMENT:
                for case in expand(gpu, Backend(framework, "1"), module, model, dtype=dtype):  # type: ignore[arg-type]
                    single = [replace(case, gemm=case.gemms[0])] if module == "dense" else []
                    for c in (case, *variants(case), *single):
                        said = read_key(c.key)
                        assert said is not None
                        assert {n: said[n] for n in ("module", "dtype", "batch", "context", "top_k", "routing")} == {
                            "module": c.module, "dtype": c.dtype, "batch": c.batch, "context": c.context, "top_k": c.top_k,
                            "routing": c.routing,
                        }  # fmt: skip
                        gemm = f"gemm{c.gemm[0]}x{c.gemm[1]}" if c.gemm else None
                        assert said["variant"] == ("-".join(t for t in (c.kernel, gemm) if t) or None)
    assert read_key("curve") is None


def test_the_papers_grid() -> None:
    """k from 2 to 256, balanced and skewed; L of the attention module."""
    moe = list(expand("h20", VLLM, "moe", catalog.model("moe-ffn-256x4096x1024")))
    assert [c.top_k for c in moe if c.routing == "skewed"] == [2, 4, 8, 16, 32, 64, 128, 256]
    assert moe[0].id == "h20-vllm==0.9.1-moe-ffn-256x4096x1024-moe-bf16-b1-k2-balanced"
    attention = list(expand("h20", Backend("flash-attn", "2.8.3"), "attention", catalog.model("qwen3-8b")))
    assert [c.context for c in attention] == [128, 256, 384, 512]


def test_the_papers_grid_of_whole_models() -> None:
    """b and L of the dense ones; L of the others, and k where the experts bound them, each under both routings."""
    dense = list(expand("h20", VLLM, "model", catalog.model("qwen3-8b")))
    assert {(c.batch, c.context) for c in dense} == {(b, c) for b in (1, 2, 4, 8) for c in (128, 256, 384, 512)}
    for name in ("llada-2.1-mini", "ling-2.0-mini"):
        found = list(expand("h20", VLLM, "model", catalog.model(name)))
        assert len(found) == len(set(found)) == 2 * (4 + 7)
        for routing in ("balanced", "skewed"):
            mine = [c for c in found if c.routing == routing]
            assert [c.context for c in mine if c.top_k == 8] == [256, 4096, 16384, 32768]
            assert sorted(c.top_k or 0 for c in mine if c.context == 256) == [2, 4, 8, 16, 32, 64, 128, 256]


def test_a_backend_runs_its_own_modules_alone() -> None:
    """flash-attn has no MoE; a MoE model's few dense layers are no dense case."""
    assert not list(expand("h20", Backend("flash-attn", "2.8.3"), "moe", catalog.model("llada-2.1-mini")))
    assert not list(expand("h20", VLLM, "dense", catalog.model("llada-2.1-mini")))
    assert not list(expand("h20", VLLM, "moe", catalog.model("qwen3-8b")))


def test_n0_and_granule_of_balanced_routing() -> None:
    """ceil(E / (b*k)); 1 elsewhere."""
    c = Case("h20", VLLM, "moe", catalog.model("llada-2.1-mini"), "bf16", top_k=8, routing="balanced")
    assert c.baseline_positions == c.granule == 32
    assert Case("h20", VLLM, "dense", catalog.model("qwen3-8b"), "bf16").baseline_positions == 1


def test_backends_are_parsed_with_their_common_names() -> None:
    """flashinfer means flashinfer-python; a release may be left out."""
    assert parse_backend("flashinfer==0.5.3") == Backend("flashinfer-python", "0.5.3")
    assert parse_backend("vllm") == Backend("vllm", "")
    with pytest.raises(UnknownName, match="unknown backend 'vlm==1'; did you mean vllm"):
        parse_backend("vlm==1")
    with pytest.raises(UnknownName, match="not a version"):
        parse_backend("vllm==new")


def test_the_option_offers_the_dtypes_that_cases_know() -> None:
    """--nfp-dtype is declared where nothing heavy is imported: its list is the same."""
    from typing import get_args

    from pytest_nfp.cases import BYTES_PER_ELEMENT
    from pytest_nfp.settings import Dtype

    assert set(get_args(Dtype)) == set(BYTES_PER_ELEMENT)
