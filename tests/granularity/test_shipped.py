"""The shipped table, and that it says what the releases' own rules say."""

from __future__ import annotations

import pytest

from pytest_nfp import catalog
from pytest_nfp.cases import Backend, expand
from pytest_nfp.granularity import Granularity, RuleUnknown, granularity_of, query_of, refresh, shape_of, shipped


def first_case(gpu: str, backend: Backend, model: str, module: str) -> Granularity:
    return granularity_of(next(expand(gpu, backend, module, catalog.model(model))))  # type: ignore[arg-type]


@pytest.mark.usefixtures("offline")
def test_without_an_index_the_table_answers_and_says_so() -> None:
    """The base install is enough for the gate; nobody takes the table for a fresh reading."""
    g = first_case("h20", Backend("vllm", "0.9.1"), "llada-2.1-mini", "moe")
    assert g.tiles() == [[1, 256, 16], [257, 4096, 64]]
    assert g.origin == "shipped table"
    assert g.artifact_file.startswith("vllm-0.9.1-")


@pytest.mark.usefixtures("offline")
def test_what_the_table_lacks_is_unknown_with_both_reasons() -> None:
    """No index and no entry: the case says so and goes on."""
    with pytest.raises(RuleUnknown, match=r"no-index.*; the shipped table holds no map of vllm 0.33.0"):
        first_case("h20", Backend("vllm", "0.33.0"), "llada-2.1-mini", "moe")


@pytest.mark.parametrize(
    ("gpu", "backend", "module", "tiles"),
    [
        ("a800", Backend("vllm", "0.9.1"), "moe", [[1, 256, 16], [257, 4096, 64]]),
        ("a800", Backend("sglang", "0.5.9"), "moe", [[1, 256, 16], [257, 4096, 64]]),
        ("h20", Backend("flash-attn", "2.8.3"), "attention", [[1, 4096, 64]]),
        ("h20", Backend("flashinfer-python", "0.5.3"), "attention", [[1, 16, 16], [17, 64, 64], [65, 4096, 128]]),
    ],
)
@pytest.mark.usefixtures("offline")
def test_published_rules(gpu: str, backend: Backend, module: str, tiles: list[list[int]]) -> None:
    """M_moe = 16 up to E, then 64; kBlockM = 64; CTA_TILE_Q 16, 64, 128 (appendices E.3 and F.3)."""
    assert first_case(gpu, backend, "llada-2.1-mini", module).tiles() == tiles


@pytest.mark.network
def test_the_table_is_what_the_releases_say() -> None:
    """Every entry, read again from the releases on the index: the file's bytes come out the same."""
    assert shipped.table_text(refresh.shipped_wanted()) == shipped.TABLE.read_text(encoding="utf-8")


@pytest.mark.network
@pytest.mark.parametrize(
    ("gpu", "release", "tiles"),
    [
        ("h200", "0.24.0", [[1, 32, 16], [33, 96, 32], [97, 512, 64], [513, 4096, 128]]),
        ("h20", "0.27.1", [[1, 32, 16], [33, 96, 32], [97, 512, 64], [513, 4096, 128]]),
        ("h20", "0.33.0", [[1, 768, 16], [769, 4096, 64]]),
        ("h20", "0.16.0", [[1, 256, 16], [257, 4096, 64]]),
    ],
)
def test_changes_that_users_felt(gpu: str, release: str, tiles: list[list[int]]) -> None:
    """The rewrite after 0.16, and the tuned H20 file of 0.33, from releases that no table holds."""
    case = next(expand(gpu, Backend("vllm", release), "moe", catalog.model("llada-2.1-mini")))
    assert granularity_of(case, use_table=False).tiles() == tiles
    assert shape_of(query_of(case))["experts"] == 256
