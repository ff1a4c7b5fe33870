"""A full model by vLLM's own engine, in this process: N positions of each of b requests over a prefix that is cached.

extend: the prefix and N fresh tokens, whose last one alone has logits, as in a chunked prefill. drafts: one token and N - 1 drafts
to verify, all of them with logits, as in speculative decoding. T is the time of the model runner's forward; the engine's step,
with its scheduler and output, is kept beside it. The scheduler's own counts are the proof of N. On a CPU run with 0.27 to 0.32,
eagerly; on a GPU not run yet: with piecewise graphs (full ones match one query length alone, so that a curve would mix modes), and eagerly
where the routing of experts is set.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from packaging.version import Version

from pytest_nfp.backends import (
    Forward,
    PreparedEngine,
    Proof,
    Unsupported,
    architectures,
    hf_config,
    memory,
    most_positions,
    quiet,
    require_room,
)
from pytest_nfp.backends.expert_routing import Routes
from pytest_nfp.cases import Case
from pytest_nfp.frameworks import DRAFTS

STRATEGY = "pytest-nfp"
KV_BYTES = 2 * 2**30
SIMULATED = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "2"}
"""One process, so that the runner can be watched; a cache of 2 GiB."""


def prepare(case: Case, seed: int, cache_bytes: int) -> PreparedEngine:
    """Raises Unsupported for an architecture that vLLM does not register, and a model that does not fit; ImportError."""
    memory.require(case, KV_BYTES)
    wanted = dict(ENVIRONMENT)
    routing = None
    if case.subject.moe is not None:
        routing = _register(case, seed)
        wanted[SIMULATED] = STRATEGY
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        engine = _Engine(case, seed)
    except BaseException:
        _restore(before)
        raise

    def close() -> None:
        engine.close()
        _restore(before)

    def forward(positions: int) -> Forward:
        require_room(case, positions)

        def run() -> float:
            if routing is not None:
                routing.use(positions)
            with quiet():
                return engine.verify(positions) if case.kernel == DRAFTS else engine.extend(positions)

        return run

    return PreparedEngine(
        forward,
        case.bytes_read,
        # Attention, head and KV cache are read again in the next forward, whatever experts it takes.
        case.bytes_read,
        f"vllm.{engine.architecture}" + (f"[{DRAFTS}]" if case.kernel == DRAFTS else ""),
        1,
        proof=lambda: dict(engine.proofs),
        host=lambda: {n: median(us) for n, us in engine.host.items()},
        own_timer=True,
        modes=lambda: {n: mode for n, (mode, _) in engine.graphs.items()},
        padded=lambda: {n: padded for n, (_, padded) in engine.graphs.items() if padded is not None},
        active=None if routing is None else routing.active,
        close=close,
    )


CPU_ROUTERS = (
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
)
"""Modules of vLLM whose CPU kernels choose their experts themselves, up to 0.27 and in 0.28 and 0.29."""


class NoDrafts:
    """A proposer that proposes nothing: the drafts that are verified are put in by hand."""

    def __init__(self, config: Any) -> None:
        """As vLLM makes a proposer of the user's."""

    def load_model(self, *_: Any, **__: Any) -> None:
        """It has none."""

    def propose(self, sampled: list[list[int]], *_: Any, **__: Any) -> list[list[int]]:
        """No draft for any request."""
        return [[] for _ in sampled]


def _speculation(case: Case) -> dict[str, Any]:
    """How drafts are allowed: by a proposer of our own, or before 0.22 by n-grams, which random tokens do not repeat."""
    most = {"num_speculative_tokens": most_positions(case) - 1}
    if Version(case.backend.release) >= Version("0.22"):
        return {"method": "custom_class", "model": f"{__name__}.{NoDrafts.__name__}", **most}
    return {"method": "ngram", "prompt_lookup_max": 4, **most}


def _graphs(case: Case) -> dict[str, Any]:
    """One graph mode for every N: piecewise, which was the default before 0.11 let it be chosen; eager with experts, whose choice a
    graph would keep as it was when it was captured.
    """
    if case.gpu == "cpu" or case.subject.moe is not None:
        return {"enforce_eager": True}
    sizes = capture_sizes(case.batch, most_positions(case))
    if Version(case.backend.release) < Version("0.11"):
        return {"compilation_config": {"cudagraph_capture_sizes": sizes}}
    return {"compilation_config": {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": sizes}}


def capture_sizes(batch: int, positions: int) -> list[int]:
    """Token counts to capture for b requests of up to so many positions: beyond the last one a forward runs eagerly, and a curve would
    mix modes. vLLM's own end at twice the requests, which are few here; to 512 these are its own where there are many. Further up a
    step is 64 positions of every request, so that there are not hundreds of them.
    """
    most, step = batch * positions, max(256, 64 * batch)
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(576, 1025, 64)]
    sizes += range(1024 + step, most + step, step)
    return sizes


def graph_of(context: Any) -> tuple[str, int | None]:
    """Mode of a forward by its context, and the token rows that it was padded to; no rows where no graph is replayed."""
    mode = getattr(getattr(context, "cudagraph_runtime_mode", None), "name", "NONE")
    if mode == "NONE":
        return "eager", None
    descriptor = getattr(context, "batch_descriptor", None)
    return mode.lower(), None if descriptor is None else int(descriptor.num_tokens)


def _restore(before: Mapping[str, str | None]) -> None:
    """The environment as it was: another engine of this process is none of ours."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class _Forward(NamedTuple):
    """Token rows of one forward, over how many cached tokens of their requests, and its microseconds."""

    tokens: int
    cached: int
    took_us: float


def _cached(scheduled: Any) -> int:
    """Tokens that the requests of a step had computed before it."""
    known = scheduled.scheduled_cached_reqs
    # A list of requests up to 0.9, one record of lists since.
    running = [r.num_computed_tokens for r in known] if isinstance(known, list) else known.num_computed_tokens
    return int(sum(running) + sum(r.num_computed_tokens for r in scheduled.scheduled_new_reqs))


class _Engine:
    """One engine with the prefixes of its requests in the cache."""

    def __init__(self, case: Case, seed: int) -> None:
        from vllm import LLM

        self._case, self._random, self._numbers = case, random.Random(seed), count()  # noqa: S311  # tokens, not secrets
        assert case.context is not None
        positions = most_positions(case)
        most = case.batch * max(case.context + 1, positions)
        with tempfile.TemporaryDirectory(prefix="pytest-nfp-") as folder:
            try:
                self._llm: Any = LLM(
                    str(hf_config.write(case, Path(folder))),
                    load_format="dummy",
                    skip_tokenizer_init=True,
                    **_graphs(case),
                    enable_prefix_caching=True,
                    dtype=hf_config.torch_name(case.dtype),
                    max_num_seqs=max(2, case.batch),
                    max_num_batched_tokens=most,
                    max_model_len=case.context + positions + 1,
                    async_scheduling=False,
                    disable_log_stats=True,
                    seed=seed,
                    speculative_config=_speculation(case) if case.kernel == DRAFTS else None,
                )
            except ValueError as error:
                # The reason comes after the name of vLLM's own record.
                raise architectures.refusal("vLLM", case, str(error)) from error
        self._engine = self._llm.llm_engine
        self._runner: Any = None
        self._core: Any = None
        try:
            self._begin(case)
        except BaseException:
            self.close()
            raise

    def _begin(self, case: Case) -> None:
        """Watch the runner, and put the prefixes into the cache."""
        from vllm import SamplingParams

        assert case.context is not None
        self._runner = self._find_runner()
        self.architecture = hf_config.architecture_of(case)
        self._vocabulary = case.subject.vocabulary or 1024
        self._parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        self._verified = SamplingParams(
            max_tokens=most_positions(case), temperature=0.0, detokenize=False, ignore_eos=True
        )
        self._forwards: list[_Forward] = []
        self.proofs: dict[int, Proof] = {}
        self.host: dict[int, list[float]] = defaultdict(list)
        self.graphs: dict[int, tuple[str, int | None]] = {}
        self._graph: tuple[str, int | None] | None = None
        self._watch()
        self._prefixes = [self._tokens(case.context) for _ in range(case.batch)]
        for prefix in self._prefixes:
            self._llm.generate([{"prompt_token_ids": [*prefix, 2]}], self._parameters, use_tqdm=False)

    def _find_runner(self) -> Any:
        """The model runner of an engine in this process. Raises Unsupported where this release keeps it elsewhere."""
        try:
            self._core = self._engine.engine_core.engine_core
            worker = self._core.model_executor.driver_worker
            return getattr(worker, "worker", worker).model_runner
        except AttributeError as error:
            raise Unsupported(f"this vLLM keeps its model runner elsewhere: {error}") from error

    def _watch(self) -> None:
        """Note what every forward was given, and its time."""
        own = self._runner.execute_model

        def watched(scheduled: Any, *arguments: Any, **keywords: Any) -> Any:
            began = time.perf_counter_ns()
            out = own(scheduled, *arguments, **keywords)
            if self._case.gpu != "cpu":
                torch.cuda.synchronize()
            took = (time.perf_counter_ns() - began) / 1e3
            self._forwards.append(_Forward(sum(scheduled.num_scheduled_tokens.values()), _cached(scheduled), took))
            return out

        self._runner.execute_model = watched
        run = getattr(self._runner, "_model_forward", None)
        if run is None:
            return  # Before 0.11: the record has no graph mode.
        from vllm.forward_context import get_forward_context

        def looked_at(*arguments: Any, **keywords: Any) -> Any:
            self._graph = graph_of(get_forward_context())
            return run(*arguments, **keywords)

        self._runner._model_forward = looked_at

    def _tokens(self, n: int) -> list[int]:
        return [self._random.randrange(2, self._vocabulary) for _ in range(n)]

    def extend(self, positions: int) -> float:
        """Microseconds of the forward of one step in which every request extends its prefix by `positions` fresh tokens."""
        for prefix in self._prefixes:
            prompt = {"prompt_token_ids": prefix + self._tokens(positions)}
            self._engine.add_request(str(next(self._numbers)), prompt, self._parameters)
        took = self._timed_step(positions)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return took

    def verify(self, positions: int) -> float:
        """Microseconds of the forward of one step in which every request verifies `positions` - 1 drafts behind its next token."""
        names = [str(next(self._numbers)) for _ in self._prefixes]
        for name, prefix in zip(names, self._prefixes, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prefix}, self._verified)
        self._engine.step()
        for request in self._core.scheduler.requests.values():
            request.spec_token_ids = self._tokens(positions - 1)
        took = self._timed_step(positions)
        self._engine.abort_request(names)
        return took

    def _timed_step(self, positions: int) -> float:
        """One step of the engine, with its proof: a second forward means that the first did not hold all tokens."""
        self._forwards.clear()
        began = time.perf_counter_ns()
        self._engine.step()
        whole = (time.perf_counter_ns() - began) / 1e3
        first = self._forwards[0]
        self.proofs[positions] = Proof(first.tokens, first.cached)
        if self._graph is not None:
            self.graphs[positions] = self._graph
        self.host[positions].append(whole - first.took_us)
        return first.took_us

    def close(self) -> None:
        """Ends the engine and gives back its memory."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._engine = self._runner = self._core = self._llm = None
        gc.collect()
        cleanup_dist_env_and_memory()


class _Strategy(Routes):
    """A routing strategy of vLLM's simulator that gives the case's experts."""

    def route_tokens(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, top_k: int, indices_type: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids [tokens, k], for as many tokens as there are: a prefill has more than a step."""
        tokens = hidden_states.shape[0]
        ids = self.take(tokens, hidden_states.device, indices_type or torch.int32)
        if self.positions and tokens == self.tokens:
            self.note(ids)
        return torch.full(ids.shape, 1 / top_k, dtype=torch.float32, device=hidden_states.device), ids


def _register(case: Case, seed: int) -> _Strategy:
    """The strategy that gives the case's experts: in the routing simulator, or before 0.10.2 in the layer's own choice."""
    found = _Strategy(case, seed)
    try:
        from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulator
    except ModuleNotFoundError as missing:
        if missing.name is None or not missing.name.startswith("vllm."):
            raise
        try:
            from vllm.model_executor.layers.fused_moe.routing_simulator import RoutingSimulator
        except ModuleNotFoundError:
            _install_in_layer(found)
            return found
    RoutingSimulator.register_strategy(STRATEGY, found)
    if case.gpu == "cpu":
        _install_in_cpu_kernels(found)
    return found


def _install_in_layer(strategy: _Strategy) -> None:
    """Replace the layer's own choice of experts, which every kernel asked up to 0.10.1. Raises Unsupported where it is not there."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoE

    own = getattr(FusedMoE, "select_experts", None)
    if own is None:
        raise Unsupported("this vLLM chooses experts elsewhere, so routing can't be set")
    FusedMoE.select_experts = staticmethod(_chosen(getattr(own, "nfp_own", own), strategy))


def _install_in_cpu_kernels(strategy: _Strategy) -> None:
    """Replace the choice of CPU kernels that route by themselves, past the simulator; the newest engine's is in force."""
    for name in CPU_ROUTERS:
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue
        own = getattr(module, "select_experts", None)
        own = getattr(own, "nfp_own", own)
        # What is imported from the router is behind the simulator.
        if own is not None and own.__module__ == name:
            module.select_experts = _chosen(own, strategy)


def _chosen(own: Callable[..., Any], strategy: _Strategy) -> Callable[..., Any]:
    """A kernel's own choice, whose work stays, with the strategy's experts."""

    def choose(hidden_states: torch.Tensor, *arguments: Any, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids = own(hidden_states, *arguments, **keywords)[1]
        return strategy.route_tokens(hidden_states, hidden_states, ids.shape[1], ids.dtype)

    choose.nfp_own = own  # type: ignore[attr-defined]
    return choose
