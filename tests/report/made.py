"""Records of a few cases, as a run would leave them."""

from __future__ import annotations

from typing import Any

from pytest_nfp import records
from pytest_nfp.records import CaseRecord, Record

PREDICTED = {"principle": {"n_max": 32, "limiting": "branch"}, "tile_roofline": {"n_max": 512, "limiting": "moe"}}


def case(name: str, **changed: object) -> CaseRecord:
    fields: dict[str, object] = {
        "id": f"h200-vllm==1-{name}",
        "gpu": "h200",
        "backend": "vllm==1",
        "module": "moe",
        "subject": name,
        "workload": "moe-bf16-b1-k8-balanced",
        "dtype": "bf16",
        "batch": 1,
        "top_k": 8,
        "routing": "balanced",
        "kind": "recorded",
        "outcome": "PASS",
        "predicted": PREDICTED,
        "n_idle": 1445.07,
        "baseline_positions": 32,
        "n_max": 512,
        "n_max_interval": (512, 767),
        "n_first_exit": 256,
        "curve": [(32, 400.0), (64, 410.5), (512, 440.25), (768, 700.0)],
    }
    return CaseRecord.model_validate(fields | changed)


def record(*cases: CaseRecord, partial: bool = False, **changed: Any) -> Record:
    fields: dict[str, Any] = {
        "schema": records.SCHEMA,
        "tool": "pytest-nfp 0",
        "gpu": "h200",
        "started": "2026-01-01T00:00:00+00:00",
        "partial": partial,
        "tolerance": 0.2,
        "match_tolerance": 0.15,
        "protocol": "adaptive",
        "seed": 0,
        "machine": {"title": "a machine", "identity": {"gpu": "NVIDIA H200", "driver": "570.1"}},
        "cases": list(cases),
    }
    return Record.model_validate(fields | changed)


TILES = [(1, 32, 16), (33, 512, 64)]
GRANULARITY = {
    "kernel": "triton",
    "tiles": TILES,
    "source": "default rule",
    "artifact": "vllm-1.whl",
    "sha256": "ab" * 32,
    "origin": "index",
    "warnings": [],
    "edges": [32],
}
BASELINE = {
    "name": "the baseline of vllm==0.9",
    "exact": False,
    "kernel": "triton",
    "tiles": [(1, 512, 16)],
    "predicted": {"principle": {"n_max": 256, "limiting": "moe"}, "tile_roofline": {"n_max": 512, "limiting": "moe"}},
    "kind": "recorded",
    "n_max": 512,
    "n_max_interval": (512, 767),
    "curve": [(32, 410.0), (64, 420.5), (512, 430.25), (768, 710.0)],
}
FINE = [
    (32, 400.0),
    (48, 405.0),
    (64, 410.5),
    (96, 412.0),
    (128, 415.0),
    (192, 420.0),
    (256, 430.0),
    (320, 500.0),
    (512, 600.0),
]
"""A curve whose steps are small beside a move of N_max from 256 to 32."""
