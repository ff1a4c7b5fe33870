"""Write the shipped table afresh from the releases' own rules: python -m pytest_nfp.granularity.refresh.

The table holds the gate's releases on the paper's GPUs, and the recorded releases on the GPUs of their recordings.
"""

from __future__ import annotations

from pytest_nfp import catalog, frameworks
from pytest_nfp.cases import Backend, Module, expand
from pytest_nfp.files import write_atomically
from pytest_nfp.granularity import granularity_of, query_of, shape_of
from pytest_nfp.granularity.maps import Granularity
from pytest_nfp.granularity.shipped import TABLE, table_text

GATE_GPUS = ("h20", "a800", "h800")
GATE_RELEASES = (
    Backend("vllm", "0.9.1"),
    Backend("sglang", "0.5.9"),
    Backend("flash-attn", "2.8.3"),
    Backend("flashinfer-python", "0.5.3"),
)
RECORDED_MODELS = ("llada-2.1-mini", "qwen3-30b-a3b", "mixtral-8x7b")
RECORDED = {
    "h200": (
        Backend("vllm", "0.24.0"),
        Backend("sglang", "0.5.14"),
        Backend("vllm", "0.19.0"),
        Backend("sglang", "0.5.10"),
    ),
    "h100": (Backend("vllm", "0.24.0"), Backend("sglang", "0.5.14"), Backend("sglang", "0.5.10")),
    "a100": (Backend("vllm", "0.14.0"), Backend("sglang", "0.5.10")),
    "l40s": (Backend("vllm", "0.24.0"), Backend("sglang", "0.5.14")),
    "b200": (
        Backend("vllm", "0.24.0"),
        Backend("vllm", "0.22.0"),
        Backend("vllm", "0.19.0"),
        Backend("sglang", "0.5.14"),
    ),
}


def shipped_wanted() -> list[tuple[Granularity, dict[str, int | str]]]:
    """Every map of the table, read from its release, with the shape that its rule was asked about.

    Raises RuleUnknown.
    """
    asked = [
        (gpu, backend, model)
        for gpu in GATE_GPUS
        for backend in GATE_RELEASES
        for model in catalog.models()
        if model.gate
    ]
    asked += [
        (gpu, backend, catalog.model(name))
        for gpu, backends in RECORDED.items()
        for backend in backends
        for name in RECORDED_MODELS
    ]
    modules: tuple[Module, ...] = ("moe", "attention")
    maps = []
    for gpu, backend, model in asked:
        for module in modules:
            if frameworks.is_unruled(backend.framework, module):
                continue
            for case in expand(gpu, backend, module, model):
                maps.append((granularity_of(case, use_table=False), shape_of(query_of(case))))
    return maps


def main() -> None:
    """Read every map of the table from its release and write the table."""
    write_atomically(TABLE, table_text(shipped_wanted()))
    print(f"wrote {TABLE}")


if __name__ == "__main__":
    main()
