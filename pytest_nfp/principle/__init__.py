"""The Near-Free Parallelism principle as pure arithmetic: no torch, no files, no clock."""

from pytest_nfp.principle.boundary import Boundary, Point, find_boundary, sensitivity
from pytest_nfp.principle.closed_form import ClosedForm, attention_term, branch_term, closed_form, dense_term, moe_term
from pytest_nfp.principle.idle_compute import n_idle_attention, n_idle_dense, n_idle_moe
from pytest_nfp.principle.routing import active_experts, baseline_positions, rows_per_expert
from pytest_nfp.principle.tile_roofline import (
    Calibration,
    Prediction,
    attention_work,
    dense_work,
    moe_work,
    predict_boundary,
    predict_on,
)

__all__ = [
    "Boundary",
    "Calibration",
    "ClosedForm",
    "Point",
    "Prediction",
    "active_experts",
    "attention_term",
    "attention_work",
    "baseline_positions",
    "branch_term",
    "closed_form",
    "dense_term",
    "dense_work",
    "find_boundary",
    "moe_term",
    "moe_work",
    "n_idle_attention",
    "n_idle_dense",
    "n_idle_moe",
    "predict_boundary",
    "predict_on",
    "rows_per_expert",
    "sensitivity",
]
