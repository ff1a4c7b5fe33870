"""Which experts the tokens of a forward take: the routing of a case as expert ids, and what rotating them reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch

from pytest_nfp.backends import Forward, Prepared, Unsupported, banks_needed
from pytest_nfp.cases import ROUTINGS, Case
from pytest_nfp.principle.routing import Replay


def expert_ids(case: Case, positions: int, start: int, seed: int = 0) -> torch.Tensor:
    """[b*N, k] experts of each token, each named once, from expert `start` on (ids wrap around at E).

    balanced: in turn. skewed: every token the same k. uniform: k drawn for each token. A replay: those of its first
    tokens. Raises Unsupported for a routing that can't be made into ids, and for a replay with too
    few tokens, or experts that the model has not.
    """
    moe, top_k = case.subject.moe, case.top_k
    assert moe is not None and top_k is not None
    tokens = case.batch * positions
    if isinstance(case.routing, Replay):
        try:
            case.routing.check(moe.experts, top_k)
        except ValueError as error:
            raise Unsupported(str(error)) from None
        if len(case.routing.tokens) < tokens:
            raise Unsupported(f"the trace has {len(case.routing.tokens)} tokens, {tokens} are needed")
        ids = torch.tensor([token[:top_k] for token in case.routing.tokens[:tokens]])
    elif case.routing == "skewed":
        ids = torch.arange(top_k).expand(tokens, top_k)
    elif case.routing == "balanced":
        ids = torch.arange(tokens * top_k).view(tokens, top_k)
    elif case.routing == "uniform":
        generator = torch.Generator().manual_seed(seed)
        ids = torch.rand(tokens, moe.experts, generator=generator).argsort(1)[:, :top_k]
    else:
        raise Unsupported(f"no expert ids are made for {case.routing} routing")
    return (ids + start) % moe.experts


def starts(case: Case, positions: int) -> list[int]:
    """First experts of the forwards of one turn: each begins where the last one's experts end, so that a whole turn
    touches every expert before one repeats.
    """
    moe, top_k = case.subject.moe, case.top_k
    assert moe is not None and top_k is not None
    step = top_k if case.routing == "skewed" else min(moe.experts, case.batch * positions * top_k)
    return list(dict.fromkeys((i * step) % moe.experts for i in range(moe.experts)))


class Routes:
    """The case's routing for the layers of a full model: each takes the next route, and what it then read is kept."""

    def __init__(self, case: Case, seed: int) -> None:
        self._case, self._seed = case, seed
        self._turns: dict[int, cycle[torch.Tensor]] = {}
        self._read: dict[int, list[torch.Tensor]] = {}
        self.positions = 0

    @property
    def tokens(self) -> int:
        """Token rows of the forward that `use` told of; 0 before the first."""
        return self._case.batch * self.positions

    def use(self, positions: int) -> None:
        """The next forward has this many positions."""
        self.positions = positions
        self._read[positions] = []

    def take(self, tokens: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Ids [tokens, k] of the next layer. Made once for a count of tokens: what is timed takes the next one."""
        if tokens not in self._turns:
            each = -(-tokens // self._case.batch)
            made = [self._ids(tokens, each, start) for start in starts(self._case, each)]
            self._turns[tokens] = cycle([ids.to(device, dtype).contiguous() for ids in made])
        return next(self._turns[tokens])

    def _ids(self, tokens: int, each: int, start: int) -> torch.Tensor:
        """Ids of so many tokens. A trace goes round where it is too short for what is not measured: a prefill, a profiling run."""
        case = self._case
        if isinstance(case.routing, Replay) and tokens != self.tokens and (known := len(case.routing.tokens)) < tokens:
            return expert_ids(replace(case, batch=1), known, start).repeat(-(-tokens // known), 1)[:tokens]
        return expert_ids(case, each, start, self._seed)[:tokens]

    def note(self, ids: torch.Tensor) -> None:
        """What a layer of the forward was given. Counted when it is asked for: here the clock runs."""
        self._read[self.positions].append(ids)

    def active(self, positions: int) -> int:
        """Experts that every layer read in the last forward of so many positions; 0 where not every layer of experts was seen.

        Where layers differ, the one that is off: the fewest of balanced routing, which a collapse makes fewer, else the most.
        """
        subject, counts = self._case.subject, [int(ids.unique().numel()) for ids in self._read.get(positions, [])]
        dense = subject.moe.dense_layers if subject.moe is not None else 0
        if subject.layers is not None and len(counts) != subject.layers - dense:
            return 0
        return (min if self._case.routing == "balanced" else max)(counts, default=0)


def expert_banks(case: Case, expert_bytes: int, cache_bytes: int) -> int:
    """Banks of all experts to rotate: one where its experts alone are four caches."""
    moe = case.subject.moe
    assert moe is not None
    bank_bytes = moe.experts * expert_bytes
    return 1 if bank_bytes > 4 * cache_bytes else banks_needed(bank_bytes, cache_bytes)


def prepared(
    case: Case,
    seed: int,
    forward: Callable[[int], Forward],
    check: Callable[[int], str],
    banks: int,
    expert_bytes: int,
    kernel: str,
    setting: Callable[[int], dict[str, Any]] | None = None,
) -> Prepared:
    """Forwards of experts, with what one of them reads and what is read before an expert is read again.

    That is all of every bank; drawn or replayed, the next forward may meet the same experts.
    """
    moe, top_k = case.subject.moe, case.top_k
    assert moe is not None and top_k is not None
    active = top_k if case.routing == "skewed" else moe.experts
    rotated = banks * moe.experts if case.routing in ROUTINGS else top_k
    return Prepared(
        forward,
        active * expert_bytes,
        rotated * expert_bytes,
        kernel,
        # At most one turn for each expert that a forward may begin with.
        banks * moe.experts,
        check,
        setting,
        lambda positions: len(expert_ids(case, positions, 0, seed).unique()),
    )
