"""Runs one of vLLM's or SGLang's Triton kernels under Triton's interpreter and counts its matrix products.

A script for an interpreter that has the framework: it imports nothing of pytest-nfp. Question on standard input, answer on
standard output behind EXECUTED. What is compiled for a GPU around the experts, and holds no matrix product, is written in torch
here: sorting tokens by expert, and for vLLM the sum over k.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import math
import os
import sys
import types
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

SEED = 0
PAGE = 16


class Driver:
    """Stands where a GPU's driver would: the interpreter asks it for a device and launches nothing on it."""

    @staticmethod
    def is_active() -> bool:
        """As the only driver."""
        return True

    def get_current_device(self) -> int:
        """The first of one."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """None is ever launched on."""
        return 0

    def get_current_target(self) -> Any:
        """Any GPU that the kernels know: nothing is compiled for it."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> Any:
        """Where the tensors are."""
        import torch

        return torch.device("cpu")


def count_products() -> dict[str, int]:
    """Count the FLOPs of every product that the interpreter executes from now on."""
    from triton.backends import Backend, backends
    from triton.runtime import driver, interpreter

    backends["cpu"] = Backend(compiler=None, driver=Driver)
    driver.set_active(Driver())
    counted = {"flops": 0}
    own = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        counted["flops"] += 2 * math.prod(a.data.shape) * b.data.shape[-1]
        return own(self, a, b, *others)

    interpreter.InterpreterBuilder.create_dot = create_dot
    return counted


def relative_error(out: Any, expected: Any) -> float:
    """Of Frobenius norms; infinite where a result was never written."""
    error = float((out.double() - expected).norm() / expected.norm())
    return error if math.isfinite(error) else math.inf


def sort_by_expert(
    topk_ids: Any,
    num_experts: int,
    block_size: int,
    sorted_token_ids: Any,
    experts_ids: Any,
    num_tokens_post_pad: Any,
    *_: Any,
    **__: Any,
) -> None:
    """What moe_align_block_size computes: slots in the order of their experts, each expert's padded to whole blocks."""
    import torch

    flat = topk_ids.flatten()
    sorted_token_ids.fill_(flat.numel())
    experts_ids.fill_(-1)
    at = 0
    for expert in range(num_experts):
        slots = torch.where(flat == expert)[0]
        blocks = -(-len(slots) // block_size)
        sorted_token_ids[at : at + len(slots)] = slots.to(sorted_token_ids.dtype)
        experts_ids[at // block_size : at // block_size + blocks] = expert
        at += blocks * block_size
    num_tokens_post_pad.fill_(at)


def sum_over_experts(values: Any, out: Any, *_: Any, **__: Any) -> None:
    """What moe_sum computes: [T, k, d] to [T, d]."""
    out.copy_(values.sum(1))


class Images(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for torchvision, which SGLang imports for pictures: its experts ask nothing of it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Of torchvision and whatever is asked of inside it."""
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """A module in which every name is an empty class."""

        class Empty(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {})

        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class Off:
    """The switches of a server that was given none: each is off, in whichever group it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return AllOff()


class AllOff:
    """A group of switches."""

    def __getattr__(self, name: str) -> bool:
        return False


Compute = Callable[[Any, Any, Any, Any, Any], Any]
"""x [T, d], w1 [E, 2f, d] (gate before up), w2 [E, d, f], weights [T, k], ids [T, k] -> [T, d]."""


def vllm_experts(q: dict[str, Any], counted: dict[str, int]) -> dict[str, Any]:
    """VLLM's fused_experts at every N, by a forced configuration or its own."""
    import torch
    import vllm
    from vllm import _custom_ops as ops
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        return {"reason": f"vLLM {vllm.__version__} does without Triton here"}
    from vllm.model_executor.layers.fused_moe import fused_moe as own
    from vllm.model_executor.layers.fused_moe import override_config

    ops.moe_align_block_size, ops.moe_sum = sort_by_expert, sum_over_experts
    found = experts(q, counted, torch.float32, own.fused_experts, own.try_get_optimal_moe_config, override_config)
    return found | {"kernel": "vllm fused_moe_kernel", "release": vllm.__version__}


def sglang_experts(q: dict[str, Any], counted: dict[str, int]) -> dict[str, Any]:
    """SGLang's fused experts at every N (0.5.12 and later), in FP16, which its kernel writes whatever it is given."""
    import torch
    import transformers.image_utils  # noqa: F401  # before the stand-in: it would use torchvision if it saw one

    sys.meta_path.append(Images())
    from sglang.srt.layers.moe.moe_runner import triton_utils
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe as own
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config as rule

    def sorted_by_expert(topk_ids: Any, block_size: int, num_experts: int, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
        blocks = topk_ids.numel() + num_experts
        slots, of, end = (torch.empty(n, dtype=torch.int32) for n in (blocks * block_size, blocks, 1))
        sort_by_expert(topk_ids, num_experts, block_size, slots, of, end)
        return slots, of, end

    # What a running server would answer: its switches, its ranks, and the name of the GPU that tuned files are looked up by.
    for name, stand_in in {
        "moe_align_block_size": sorted_by_expert,
        "get_exec": Off,
        "get_global_server_args": AllOff,
        "get_parallel": Off,
        "is_allocation_symmetric": lambda: False,
        "use_symmetric_memory": lambda *_, **__: contextlib.nullcontext(),
        "get_device_name": lambda *_: "none",
        "_has_vllm_ops": False,
    }.items():
        for module in (own, rule):
            if hasattr(module, name):
                setattr(module, name, stand_in)

    def compute(x: Any, w1: Any, w2: Any, weights: Any, ids: Any) -> Any:
        # What fused_experts calls behind an operator that is registered for GPUs alone. No expert is another rank's.
        return own.fused_experts_impl(x, w1, w2, weights, ids, filter_expert=False)

    found = experts(q, counted, torch.float16, compute, rule.try_get_optimal_moe_config, triton_utils.override_config)
    return found | {"kernel": "sglang fused_moe_kernel", "release": importlib.metadata.version("sglang")}


def experts(
    q: dict[str, Any], counted: dict[str, int], dtype: Any, compute: Compute, rule: Any, override_config: Any
) -> dict[str, Any]:
    """A framework's fused experts at every N. rule: its selector; override_config: how a configuration is forced on it."""
    import torch
    import torch.nn.functional as F  # noqa: N812

    generator = torch.Generator().manual_seed(SEED)
    count, top_k, hidden, width = q["experts"], q["top_k"], q["hidden"], q["width"]
    w1 = (torch.randn(count, 2 * width, hidden, generator=generator) / hidden**0.5).to(dtype)
    w2 = (torch.randn(count, hidden, width, generator=generator) / width**0.5).to(dtype)
    flops, settings, error = {}, {}, 0.0
    for n in q["positions"]:
        x = torch.randn(n, hidden, generator=generator).to(dtype)
        slots = torch.arange(top_k).expand(n, top_k) if q["routing"] == "skewed" else torch.arange(n * top_k)
        ids = (slots.reshape(n, top_k) % count).to(torch.int32)
        weights = torch.full((n, top_k), 1 / top_k)
        # The selector's own answer, also where a configuration is forced.
        chosen = q["setting"] or rule(w1.shape, w2.shape, top_k, None, n)
        settings[n] = {k: v for k, v in chosen.items() if isinstance(v, int)}
        counted["flops"] = 0
        with override_config(chosen):
            out = compute(x, w1, w2, weights, ids)
        flops[n] = counted["flops"]
        expected = torch.zeros(n, hidden, dtype=torch.float64)
        for token in range(n):
            for expert in ids[token].tolist():
                gate, up = (x[token].double() @ w1[expert].double().T).chunk(2)
                expected[token] += (F.silu(gate) * up) @ w2[expert].double().T / top_k
        error = max(error, relative_error(out, expected))
    return {"flops": flops, "settings": settings, "error": error}


def attention(q: dict[str, Any], counted: dict[str, int]) -> dict[str, Any]:
    """VLLM's unified_attention of one request over a paged cache, at every N."""
    import torch
    import vllm
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        return {"reason": f"vLLM {vllm.__version__} does without Triton here"}
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    generator = torch.Generator().manual_seed(SEED)
    heads, kv_heads, dim, context = q["heads"], q["kv_heads"], q["head_dim"], q["context"]
    flops, error = {}, 0.0
    for n in q["positions"]:
        total = context + n
        pages = -(-total // PAGE)
        keys, values = (torch.randn(pages * PAGE, kv_heads, dim, generator=generator) for _ in range(2))
        query = torch.randn(n, heads, dim, generator=generator)
        out = torch.full_like(query, float("nan"))
        counted["flops"] = 0
        unified_attention(
            q=query,
            k=keys.view(pages, PAGE, kv_heads, dim),
            v=values.view(pages, PAGE, kv_heads, dim),
            out=out,
            cu_seqlens_q=torch.tensor([0, n], dtype=torch.int32),
            max_seqlen_q=n,
            seqused_k=torch.tensor([total], dtype=torch.int32),
            max_seqlen_k=total,
            softmax_scale=dim**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=torch.arange(pages, dtype=torch.int32)[None],
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )
        flops[n] = counted["flops"]
        group = heads // kv_heads
        k, v = (t[:total].double().repeat_interleave(group, 1).transpose(0, 1) for t in (keys, values))
        scores = query.double().transpose(0, 1) @ k.transpose(1, 2) / dim**0.5
        hidden = torch.arange(total)[None] > torch.arange(n)[:, None] + context
        expected = (torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v).transpose(0, 1)
        error = max(error, relative_error(out, expected))
    kernel = "vllm kernel_unified_attention"
    return {"kernel": kernel, "release": vllm.__version__, "flops": flops, "settings": {}, "error": error}


def main() -> None:
    """Answer one question."""
    question = json.loads(sys.stdin.read())
    answers = {
        ("vllm", "moe"): vllm_experts,
        ("sglang", "moe"): sglang_experts,
        ("vllm", "attention"): attention,
    }
    try:
        answer = answers[question["framework"], question["module"]](question, count_products())
    except ImportError as error:
        answer = {"reason": f"the kernel was not run: {error}"}
    print("EXECUTED" + json.dumps(answer))


if __name__ == "__main__":
    main()
