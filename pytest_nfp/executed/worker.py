"""Runs one of vLLM's Triton kernels under Triton's interpreter and counts its matrix products.

A script for an interpreter that has vLLM: it imports nothing of pytest-nfp. Question on standard input, answer on standard
output behind EXECUTED. Two compiled helpers of fused experts, which sort tokens by expert and sum over k, are written in
torch here: they hold no matrix product.
"""

from __future__ import annotations

import json
import math
import os
import sys
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


def experts(q: dict[str, Any], counted: dict[str, int]) -> dict[str, Any]:
    """VLLM's fused_experts at every N, by a forced configuration or its own."""
    import torch
    import torch.nn.functional as F  # noqa: N812
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe import fused_moe as own
    from vllm.model_executor.layers.fused_moe import override_config

    ops.moe_align_block_size, ops.moe_sum = sort_by_expert, sum_over_experts
    generator = torch.Generator().manual_seed(SEED)
    count, top_k, hidden, width = q["experts"], q["top_k"], q["hidden"], q["width"]
    w1 = torch.randn(count, 2 * width, hidden, generator=generator) / hidden**0.5
    w2 = torch.randn(count, hidden, width, generator=generator) / width**0.5
    flops, settings, error = {}, {}, 0.0
    for n in q["positions"]:
        x = torch.randn(n, hidden, generator=generator)
        slots = torch.arange(top_k).expand(n, top_k) if q["routing"] == "skewed" else torch.arange(n * top_k)
        ids = (slots.reshape(n, top_k) % count).to(torch.int32)
        weights = torch.full((n, top_k), 1 / top_k)
        # The selector's own answer, also where a configuration is forced.
        chosen = q["setting"] or own.try_get_optimal_moe_config(w1.shape, w2.shape, top_k, None, n)
        settings[n] = {k: v for k, v in chosen.items() if isinstance(v, int)}
        counted["flops"] = 0
        with override_config(chosen):
            out = own.fused_experts(x, w1, w2, weights, ids)
        flops[n] = counted["flops"]
        expected = torch.zeros(n, hidden, dtype=torch.float64)
        for token in range(n):
            for expert in ids[token].tolist():
                gate, up = (x[token].double() @ w1[expert].double().T).chunk(2)
                expected[token] += (F.silu(gate) * up) @ w2[expert].double().T / top_k
        error = max(error, relative_error(out, expected))
    return {"kernel": "vllm fused_moe_kernel", "flops": flops, "settings": settings, "error": error}


def attention(q: dict[str, Any], counted: dict[str, int]) -> dict[str, Any]:
    """VLLM's unified_attention of one request over a paged cache, at every N."""
    import torch
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
    return {"kernel": "vllm kernel_unified_attention", "flops": flops, "settings": {}, "error": error}


def main() -> None:
    """Answer one question."""
    question = json.loads(sys.stdin.read())
    try:
        counted = count_products()
        import vllm
        from vllm.triton_utils import HAS_TRITON
    except ImportError as error:
        print("EXECUTED" + json.dumps({"reason": f"the kernel was not run: {error}"}))
        return
    if not HAS_TRITON:
        print("EXECUTED" + json.dumps({"reason": f"vLLM {vllm.__version__} does without Triton here"}))
        return
    answer = {"moe": experts, "attention": attention}[question["module"]](question, counted)
    print("EXECUTED" + json.dumps(answer | {"release": vllm.__version__}))


if __name__ == "__main__":
    main()
