"""The paper's deployment lookup comes out as it was published."""

from __future__ import annotations

import pytest

from pytest_nfp import catalog
from pytest_nfp.catalog import UnknownName
from pytest_nfp.predict import lookup


def test_the_published_over_prediction() -> None:
    """Dense on A800 2.4 times (153 against 64), balanced experts on H20 with k = 8 23 times (1445 against 64)."""
    rows = {(r["gpu"], r["module"]): r for r in lookup.lookup(lookup.GPUS)}
    dense, experts = rows["a800", "dense, b=1"], rows["h20", "experts balanced, k=8"]
    assert (round(dense["n_idle"]), dense["n_max"], dense["limiting"], dense["over_prediction"]) == (
        153,
        64,
        "attention",
        2.4,
    )
    assert (round(experts["n_idle"]), experts["n_max"]) == (1445, 64)
    assert round(experts["over_prediction"]) == 23
    assert rows["h20", "dense, b=1"]["over_prediction"] == 1.0


def test_skewed_experts_are_unbounded_by_idle_compute_where_the_paper_says_so() -> None:
    """45 on H20 for every k, larger on A800, unbounded on H800: there no factor is given."""
    rows = {(r["gpu"], r["module"]): r for r in lookup.lookup(lookup.GPUS)}
    assert round(rows["h20", "experts skewed, k=8"]["n_idle"]) == 45
    assert round(rows["a800", "experts skewed, k=8"]["n_idle"]) == 605
    assert rows["h800", "experts skewed, k=8"]["n_idle"] is None
    assert rows["h800", "experts skewed, k=8"]["over_prediction"] is None


def test_balance_grows_and_the_attention_tile_takes_over() -> None:
    """Every GPU of the catalog, by its balance; from 64 on the tile bounds a dense model."""
    rows = lookup.future()
    assert [r["balance"] for r in rows] == sorted(r["balance"] for r in rows)
    assert {r["gpu"] for r in rows} == {g.name for g in catalog.gpus()}
    for r in rows:
        assert r["limiting"] == ("dense" if r["n_idle"] < 64 else "attention")
        assert r["n_max"] <= 64


def test_an_unknown_gpu_is_named() -> None:
    """With the near matches."""
    with pytest.raises(UnknownName, match="h200"):
        lookup.lookup(["h201"])
