"""The calls of GPU backends, held to the sources of each release: a moved argument is found without a GPU."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.version import Version

from pytest_nfp.granularity.artifacts import open_release


@dataclass(frozen=True)
class Call:
    """A function, method or record of a framework: how many arguments are given by place, and which by name.

    since and until: the releases that are called so, where not all are.
    """

    framework: str
    file: str
    name: str
    positional: int = 0
    keywords: tuple[str, ...] = ()
    since: str = "0"
    until: str = "999"


VLLM_MOE = r"vllm/model_executor/layers/fused_moe/fused_moe\.py$"
SGLANG_MOE = r"sglang/srt/layers/moe/(moe_runner/triton_utils|fused_moe_triton)/fused_moe\.py$"
SELECTOR = "try_get_optimal_moe_config"
CONTEXT = r"sglang/srt/runtime_context\.py$"
WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"
DECODE = "BatchDecodeWithPagedKVCacheWrapper"
MLA = "BatchMLAPagedAttentionWrapper"
FA_UTILS = r"vllm/(v1/attention/backends|attention/utils)/fa_utils\.py$"
BEFORE_NORM = "return_hidden_states_before_norm"
CALLS = [
    Call("vllm", VLLM_MOE, "fused_experts", 5),
    Call("vllm", VLLM_MOE, "try_get_optimal_moe_config", 5),
    Call(
        "vllm",
        r"vllm/vllm_flash_attn/flash_attn_interface\.py$",
        "flash_attn_varlen_func",
        3,
        (
            "max_seqlen_q",
            "cu_seqlens_q",
            "max_seqlen_k",
            "seqused_k",
            "block_table",
            "causal",
            "fa_version",
        ),
    ),
    Call("vllm", FA_UTILS, "get_flash_attn_version"),
    Call("vllm", r"vllm/model_executor/layers/fused_moe/layer\.py$", "FusedMoE.select_experts", 4, until="0.10.2"),
    Call("vllm", r"vllm/v1/worker/gpu_model_runner\.py$", "GPUModelRunner.execute_model", 1),
    Call("vllm", r"vllm/v1/worker/gpu_model_runner\.py$", "GPUModelRunner._model_forward", since="0.11.1"),
    Call("vllm", r"vllm/forward_context\.py$", "get_forward_context"),
    Call("sglang", SGLANG_MOE, "fused_experts", 5),
    Call(
        "sglang",
        r"srt/managers/schedule_batch\.py$",
        "ScheduleBatch.init_new",
        0,
        (
            "reqs",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
            "tree_cache",
            "model_config",
            "enable_overlap",
            "spec_algorithm",
        ),
    ),
    Call("sglang", r"srt/managers/schedule_batch\.py$", "ScheduleBatch.prepare_for_extend"),
    Call("sglang", r"srt/model_executor/forward_batch_info\.py$", "ForwardBatch.init_new", 2, until="0.5.16"),
    Call(
        "sglang",
        r"srt/model_executor/forward_batch_info\.py$",
        "ForwardBatch.init_new",
        2,
        (BEFORE_NORM,),
        since="0.5.16",
    ),
    Call("sglang", r"srt/layers/moe/topk\.py$", "select_experts", 3),
    Call(
        "sglang",
        r"fused_moe_triton/fused_moe_triton_config\.py$|triton_utils/fused_moe_triton_config\.py$",
        SELECTOR,
        5,
    ),
    Call("sglang", r"sglang/srt/layers/moe/moe_runner/base\.py$", "MoeRunnerConfig", 0, ("inplace",)),
    Call("sglang", r"sglang/srt/layers/moe/topk\.py$", "StandardTopKOutput", 3),
    Call("sglang", r"sglang/srt/server_args\.py$", "set_global_server_args_for_scheduler", 1, until="0.5.16"),
    Call("sglang", r"sglang/srt/server_args\.py$", "ServerArgs", 0, ("model_path",), until="0.5.16"),
    Call("sglang", CONTEXT, "get_context", since="0.5.16"),
    Call("sglang", CONTEXT, "RuntimeContext.override_server_args", since="0.5.16"),
    Call("sglang", CONTEXT, "_ServerArgsOverride.install", since="0.5.16"),
    Call(
        "flash-attn",
        r"(^|/)flash_attn/flash_attn_interface\.py$",
        "flash_attn_with_kvcache",
        3,
        ("cache_seqlens", "block_table", "causal", "num_splits"),
    ),
    Call("flashinfer-python", r"flashinfer/prefill\.py$", f"{WRAPPER}.__init__", 2, ("backend",)),
    Call(
        "flashinfer-python",
        r"flashinfer/prefill\.py$",
        f"{WRAPPER}.plan",
        0,
        (
            "qo_indptr",
            "paged_kv_indptr",
            "paged_kv_indices",
            "paged_kv_last_page_len",
            "num_qo_heads",
            "num_kv_heads",
            "head_dim_qk",
            "page_size",
            "causal",
            "q_data_type",
        ),
    ),
    Call("flashinfer-python", r"flashinfer/prefill\.py$", f"{WRAPPER}.run", 2),
    Call("flashinfer-python", r"flashinfer/decode\.py$", f"{DECODE}.__init__", 2, ("use_tensor_cores",)),
    Call("flashinfer-python", r"flashinfer/decode\.py$", f"{DECODE}.plan", 7, ("q_data_type", "kv_data_type")),
    Call("flashinfer-python", r"flashinfer/decode\.py$", f"{DECODE}.run", 2),
    Call("flashinfer-python", r"flashinfer/mla\.py$", f"{MLA}.__init__", 1, ("backend",)),
    Call("flashinfer-python", r"flashinfer/mla\.py$", f"{MLA}.plan", 12),
    Call("flashinfer-python", r"flashinfer/mla\.py$", f"{MLA}.run", 4),
]
RELEASES = {
    "vllm": ("0.9.1", "0.13.0", "0.19.0", "0.24.0", "0.33.0"),
    "sglang": ("0.5.9", "0.5.12", "0.5.14", "0.5.16", "0.5.23"),
    "flash-attn": ("2.5.9.post1", "2.8.3"),
    "flashinfer-python": ("0.2.5", "0.5.3", "0.6.1"),
}


def broken(call: Call, source: str) -> str:
    """What of a call a source does not take; empty if it takes it."""
    scope: list[ast.stmt] = ast.parse(source).body
    *outer, name = call.name.split(".")
    for part in outer:
        scope = next((n.body for n in scope if isinstance(n, ast.ClassDef) and n.name == part), [])
    # Overloads come first; what is defined last is what runs.
    found = [n for n in scope if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name]
    if not found:
        return f"{call.name} is not there"
    node = found[-1]
    if isinstance(node, ast.ClassDef):
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
        names = [n.target.id for n in fields if isinstance(n.target, ast.Name)]
        required = {n.target.id for n in fields if n.value is None and isinstance(n.target, ast.Name)}
        by_place, takes_any = names, False
    else:
        arguments = node.args
        names = [a.arg for a in [*arguments.posonlyargs, *arguments.args]][1 if outer else 0 :]
        required = set(names[: len(names) - len(arguments.defaults)])
        required |= {a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None}
        takes_any = arguments.kwarg is not None
        by_place, names = names, [*names, *(a.arg for a in arguments.kwonlyargs)]
    by_place = by_place[: call.positional]
    if len(by_place) < call.positional:
        return f"{call.name} takes {len(by_place)} arguments by place, {call.positional} are given"
    unknown = [k for k in call.keywords if k not in names and not takes_any]
    if unknown:
        return f"{call.name} has no argument {', '.join(unknown)}"
    missing = required - set(by_place) - set(call.keywords)
    return f"{call.name} needs {', '.join(sorted(missing))} too" if missing else ""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f(a, b, c=1, *, d=2): ...", ""),
        ("def f(a, b, *others, d, **more): ...", ""),
        ("class f:\n    a: int\n    b: int\n    d: int = 3", ""),
        ("def g(a): ...", "f is not there"),
        ("def f(a, *, d): ...", "f takes 1 arguments by place, 2 are given"),
        ("def f(a, b): ...", "f has no argument d"),
        ("def f(a, b, c, d): ...", "f needs c too"),
        ("def f(a, b, *, d, e): ...", "f needs e too"),
    ],
)
def test_a_moved_argument_is_found(source: str, said: str) -> None:
    """Given two by place and d by name."""
    assert broken(Call("x", "", "f", 2, ("d",)), source) == said


def test_a_method_is_looked_for_in_its_class() -> None:
    """Without self; the definition after its overloads is what runs."""
    source = "class A:\n    @overload\n    def f(self): ...\n    def f(self, a, b, *, d): ...\ndef f(): ..."
    assert broken(Call("x", "", "A.f", 2, ("d",)), source) == ""
    assert broken(Call("x", "", "B.f", 2, ("d",)), source) == "B.f is not there"


@pytest.mark.network
@pytest.mark.parametrize(("framework", "release"), [(f, r) for f, releases in RELEASES.items() for r in releases])
def test_every_supported_release_takes_the_backends_calls(framework: str, release: str) -> None:
    """Signatures read from the release's own sources."""
    calls = [c for c in CALLS if c.framework == framework]
    wanted = re.compile("|".join(f"(?:{c.file})" for c in calls))
    artifact = open_release(framework, release, wanted, None)
    for call in calls:
        if not Version(call.since) <= Version(release) < Version(call.until):
            continue
        files = [name for name in artifact.names if re.search(call.file, name)]
        said = [broken(call, artifact.read(name)) for name in files]
        assert "" in said, f"{framework} {release}: {said or f'no file {call.file}'}"


def test_the_backends_are_the_calls() -> None:
    """Each backend's source names what its contract names: a call that is changed here alone is noticed."""
    folder = Path(__file__).parents[2] / "pytest_nfp" / "backends"
    sources = {
        "vllm": "vllm_moe.py vllm_attention.py vllm_model.py",
        "sglang": "sglang_moe.py sglang_model.py",
        "flash-attn": "flash_attn.py",
        "flashinfer-python": "flashinfer.py",
    }
    for call in CALLS:
        text = "".join((folder / name).read_text(encoding="utf-8") for name in sources[call.framework].split())
        name = call.name.split(".")[0 if call.name.endswith("__init__") else -1]
        assert re.search(rf"\b{name}\b", text), call
        assert all(re.search(rf"\b{k}=", text) for k in call.keywords), call
