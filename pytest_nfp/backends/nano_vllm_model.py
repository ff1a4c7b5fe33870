"""A full model by nano-vLLM's model runner: a prefill of N positions of each of b requests over a prefix in its paged cache.

T is the time of `run_model`, the step beside it adds `prepare_prefill`; its prefill runs eagerly, with logits for the last position
of a request. Proof of N is what every attention layer was given: rows, cached lengths, pages, slots. Dense Qwen3 alone, 16 bits (its
norm at FP32 overwrites the residual), one GPU. Its commits of 2025-11-04 to 2026-04-26 were read, and their runner was run on a CPU
with stand-ins for CUDA and flash-attn; on a GPU not run yet. Its releases all say 0.2.0.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pytest_nfp.backends import (
    Forward,
    PreparedEngine,
    Proof,
    Unsupported,
    hf_config,
    memory,
    most_positions,
    require_room,
)
from pytest_nfp.cases import Case

PREFIX_CHUNK = 2048
"""Tokens of a prefix that are put into the cache at a time: a multiple of every page size."""


def prepare(case: Case, seed: int, cache_bytes: int) -> PreparedEngine:
    """Raises Unsupported for experts, other dtypes than 16 bits, a CPU, and a model that does not fit; ImportError."""
    if case.gpu == "cpu":
        raise Unsupported("nano-vLLM runs on a GPU alone")
    if case.subject.moe is not None:
        raise Unsupported(f"nano-vLLM has dense models alone: {case.subject.name} has experts")
    if case.dtype not in ("bf16", "fp16"):
        raise Unsupported(f"nano-vLLM computes in 16 bits: give --nfp-dtype=bf16, not {case.dtype}")
    memory.require(case)
    engine = _Engine(case, seed)
    return PreparedEngine(
        engine.forward,
        case.bytes_read,
        case.bytes_read,
        "nano-vllm.Qwen3ForCausalLM",
        1,
        proof=lambda: dict(engine.proofs),
        host=lambda: {n: median(us) for n, us in engine.host.items()},
        own_timer=True,
        modes=lambda: dict.fromkeys(engine.proofs, "eager"),
        alone=True,
    )


class _Engine:
    """One runner whose cache holds the prefixes, each in pages of its own."""

    def __init__(self, case: Case, seed: int) -> None:
        from nanovllm.config import Config
        from nanovllm.engine import model_runner
        from nanovllm.engine.sequence import Sequence
        from nanovllm.layers.attention import Attention
        from nanovllm.utils import context

        assert case.context is not None
        self._case, self._context = case, context
        self._attention, self._sequence, self._set_context = Attention, Sequence, context.set_context
        longest = case.context + most_positions(case)
        with tempfile.TemporaryDirectory(prefix="pytest-nfp-") as folder:
            hf_config.write(case, Path(folder))
            most = max(longest, case.batch * most_positions(case))
            config = Config(
                folder, enforce_eager=True, max_model_len=longest, max_num_batched_tokens=most, max_num_seqs=case.batch
            )
            # Older commits hand this dictionary to a cache that can't hold one; theta is in the config.
            config.hf_config.rope_scaling = None
            page = config.kvcache_block_size
            Sequence.block_size = page
            pages = -(-longest // page)
            default = torch.get_default_dtype()
            try:
                self._runner = _runner_of(model_runner.ModelRunner, Attention, case.batch * pages)(config, 0, [])
            finally:
                # A constructor that fails leaves them behind; one that does not, a default device.
                torch.set_default_device(None)
                torch.set_default_dtype(default)
        self._page = page
        self._tables = [list(range(i * pages, (i + 1) * pages)) for i in range(case.batch)]
        _draw(self._runner.model, seed)
        drawn = random.Random(seed)  # noqa: S311  # tokens, not secrets
        vocabulary = case.subject.vocabulary or 1024
        self._tokens = [[drawn.randrange(2, vocabulary) for _ in range(longest)] for _ in range(case.batch)]
        self.proofs: dict[int, Proof] = {}
        self.host: dict[int, list[float]] = defaultdict(list)
        for at in range(0, case.context, PREFIX_CHUNK):
            self._prefill(at, min(PREFIX_CHUNK, case.context - at))

    def _sequences(self, cached: int, new: int) -> list[Any]:
        """Each request with `new` tokens to compute behind `cached` ones; its length is exactly that, as older commits ask."""
        found = []
        for tokens, table in zip(self._tokens, self._tables, strict=True):
            sequence = self._sequence(tokens[: cached + new])
            sequence.block_table = table[: -(-(cached + new) // self._page)]
            sequence.num_cached_tokens = cached
            sequence.num_scheduled_tokens = new
            found.append(sequence)
        return found

    def _prefill(self, cached: int, new: int) -> None:
        try:
            ids, positions = self._runner.prepare_prefill(self._sequences(cached, new))
            self._runner.run_model(ids, positions, True)
        finally:
            self._context.reset_context()

    def forward(self, positions: int) -> Forward:
        """One forward of so many positions, proven once. The slots behind the prefix are written anew each time."""
        require_room(self._case, positions)
        context = self._case.context
        assert context is not None

        def run() -> float:
            began = time.perf_counter_ns()
            try:
                ids, at = self._runner.prepare_prefill(self._sequences(context, positions))
                torch.cuda.synchronize()
                started = time.perf_counter_ns()
                self._runner.run_model(ids, at, True)
                torch.cuda.synchronize()
            finally:
                self._context.reset_context()
            ended = time.perf_counter_ns()
            self.host[positions].append((started - began) / 1e3)
            return (ended - started) / 1e3

        self.proofs[positions] = self._proof(run, positions)
        self.host[positions].clear()
        return run

    def _proof(self, run: Forward, positions: int) -> Proof:
        """What every attention layer is given in one forward; nothing where they are not given the same, or write elsewhere."""
        context = self._case.context
        assert context is not None
        seen: list[tuple[int, int, list[int]]] = []

        def look(layer: Any, arguments: tuple[Any, ...]) -> None:
            given = self._context.get_context()
            rows = int(arguments[0].shape[0])
            keys = int(given.cu_seqlens_k[-1]) if given.block_tables is not None else rows
            seen.append((rows, keys - rows, given.slot_mapping.tolist()))

        layers = [m for m in self._runner.model.modules() if isinstance(m, self._attention)]
        hooks = [layer.register_forward_pre_hook(look) for layer in layers]
        try:
            run()
        finally:
            for hook in hooks:
                hook.remove()
        slots = [
            table[p // self._page] * self._page + p % self._page
            for table in self._tables
            for p in range(context, context + positions)
        ]
        rows, cached, written = seen[0] if seen else (0, 0, [])
        alike = len(seen) == len(layers) and all(s == seen[0] for s in seen)
        return Proof(rows, cached) if alike and written == slots else Proof(0, 0)


def _runner_of(own: Any, attention: Any, blocks: int) -> Any:
    """The runner's class with a cache of so many pages, in place of all the memory that is free; nothing is warmed up in it."""

    class Runner(own):  # type: ignore[misc]
        def warmup_model(self) -> None:
            """The sweep warms up what it measures."""

        def allocate_kv_cache(self) -> None:
            """[K and V, layers, pages, rows of a page, KV heads, head_dim], zeros."""
            hf = self.config.hf_config
            width = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
            self.config.num_kvcache_blocks = blocks
            layers = [m for m in self.model.modules() if isinstance(m, attention)]
            self.kv_cache = torch.zeros(2, len(layers), blocks, self.block_size, hf.num_key_value_heads, width)
            for i, layer in enumerate(layers):
                layer.k_cache, layer.v_cache = self.kv_cache[0, i], self.kv_cache[1, i]

    return Runner


def _draw(model: Any, seed: int) -> None:
    """Weights of a sensible size: without a file they are whatever the memory held."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
