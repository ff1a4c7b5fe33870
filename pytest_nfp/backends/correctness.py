"""Is a forward's result right? Held to FP64 references before it is timed: a wrong kernel can be fast."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own convention

TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest |out - expected| / |expected| (Frobenius norms) by the dtype that the kernel computes in."""


def wrong(out: torch.Tensor, expected: torch.Tensor) -> str:
    """What is wrong with a result; empty if nothing is. Both of the same shape; `expected` in FP64."""
    if out.shape != expected.shape:
        return f"the result has the shape {tuple(out.shape)}, expected is {tuple(expected.shape)}"
    missing = int((~torch.isfinite(out)).sum())
    if missing:
        return f"{missing} of {out.numel()} results are not finite, or were never written"
    error = float((out.double() - expected).norm() / expected.norm().clamp_min(1e-30))
    tolerance = TOLERANCES[out.dtype]
    if error > tolerance:
        return f"the result is {error:.1e} off an FP64 reference, {out.dtype} allows {tolerance:.0e}".replace(
            "torch.", ""
        )
    return ""


def poison(out: torch.Tensor) -> torch.Tensor:
    """The buffer filled with NaN, so that what a kernel leaves unwritten shows."""
    return out.fill_(float("nan"))


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """X [T, k] by weight [n, k] in FP64: [T, n]."""
    return x.double() @ weight.double().T


def ffn(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = product,
) -> torch.Tensor:
    """X [T, d] through GEMMs without an activation: up and, where there are three, times the gate, then down; or down alone.

    linear: a GEMM in FP64, of the values that a kernel of few bits computes with.
    """
    *ups, down = weights
    h = linear(x, ups[0]) if ups else x
    for gate in ups[1:]:
        h = h * linear(x, gate)
    return linear(h, down)


def experts(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """SwiGLU experts: x [T, d], w13 [E, 2f, d] (gate before up), w2 [E, d, f], ids and weights [T, k]; [T, d] in FP64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        tokens, slots = torch.where(ids == expert)
        gate, up = (x[tokens].double() @ w13[expert].double().T).chunk(2, -1)
        y = (F.silu(gate) * up) @ w2[expert].double().T
        out.index_add_(0, tokens, y * weights[tokens, slots].double()[:, None])
    return out


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Softmax attention in FP64: q [b, H, N, D], k and v [b, H_kv, L + N, D]; causal: query i sees L + i + 1 keys."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        queries, keys = q.shape[2], k.shape[2]
        rows, columns = (torch.arange(n, device=q.device) for n in (queries, keys))
        hidden = columns[None, :] > rows[:, None] + keys - queries
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1) @ v
