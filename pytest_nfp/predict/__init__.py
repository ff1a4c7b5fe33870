"""T(N) and N_max as the principle and the tile roofline predict them: of a module, of a whole model."""

from pytest_nfp.predict.modules import (
    Figures,
    Predicted,
    datasheet,
    edge_positions,
    gemm_latency,
    grid,
    idle_compute,
    last_position,
    module_latency,
    module_work,
    place_of,
    predict_case,
    predict_curve,
    principle_terms,
    terms_at,
    widest,
)

__all__ = [
    "Figures",
    "Predicted",
    "datasheet",
    "edge_positions",
    "gemm_latency",
    "grid",
    "idle_compute",
    "last_position",
    "module_latency",
    "module_work",
    "place_of",
    "predict_case",
    "predict_curve",
    "principle_terms",
    "terms_at",
    "widest",
]
