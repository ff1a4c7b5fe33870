"""MoE experts by torch's grouped_mm: gather by expert, two grouped GEMMs with SwiGLU between, weighted combine."""

from __future__ import annotations

from itertools import cycle

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own convention

from pytest_nfp.backends import Forward, Prepared, Unsupported, correctness, tensors
from pytest_nfp.backends.expert_routing import expert_banks, expert_ids, prepared, starts
from pytest_nfp.cases import Case


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """X [b*N, d], W13 [E, d, 2f], W2 [E, f, d], on the case's device in its dtype. The first expert moves on with every forward."""
    moe, hidden, top_k = case.subject.moe, case.subject.hidden, case.top_k
    assert moe is not None and top_k is not None
    if not hasattr(F, "grouped_mm"):
        raise Unsupported("this torch has no grouped_mm")
    device, dtype, generator = tensors.device_of(case), tensors.dtype_of(case), tensors.generator_of(case, seed)
    expert_bytes = dtype.itemsize * 3 * hidden * moe.width
    count = expert_banks(case, expert_bytes, cache_bytes)

    def drawn(*shape: int, std: float = 1.0) -> torch.Tensor:
        return tensors.drawn(generator, *shape, device=device, dtype=dtype, std=std)

    banks = [
        (
            drawn(moe.experts, hidden, 2 * moe.width, std=hidden**-0.5),
            drawn(moe.experts, moe.width, hidden, std=moe.width**-0.5),
        )
        for _ in range(count)
    ]

    def build(positions: int) -> tuple[Forward, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The forward, where it writes, and its input with the first expert ids."""
        tokens = case.batch * positions
        x = drawn(tokens, hidden)
        scores = torch.full((tokens * top_k, 1), 1 / top_k, device=device, dtype=dtype)
        ids = [expert_ids(case, positions, start, seed) for start in starts(case, positions)]
        routes = []
        for flat in (route.flatten().to(device) for route in ids):
            order = torch.argsort(flat, stable=True)
            ends = torch.bincount(flat, minlength=moe.experts).cumsum(0).to(torch.int32)
            routes.append((order // top_k, ends))
        turn = cycle([(w13, w2, rows, ends) for w13, w2 in banks for rows, ends in routes])
        out = torch.empty(tokens, hidden, device=device, dtype=dtype)

        def run() -> torch.Tensor:
            w13, w2, rows, ends = next(turn)
            gate, up = F.grouped_mm(x[rows], w13, offs=ends).chunk(2, -1)
            y = F.grouped_mm(F.silu(gate) * up, w2, offs=ends)
            return out.zero_().index_add_(0, rows, y * scores)

        return run, out, (x, ids[0])

    def check(positions: int) -> str:
        run, out, (x, ids) = build(positions)
        correctness.poison(out)
        w13, w2 = (w.transpose(1, 2) for w in banks[0])
        weights = torch.full(ids.shape, 1 / top_k, device=device)
        return correctness.wrong(run(), correctness.experts(x, w13, w2, ids.to(device), weights))

    return prepared(case, seed, lambda positions: build(positions)[0], check, count, expert_bytes, "torch.grouped_mm")
