"""A full model by SGLang's own model runner, in this process: one EXTEND forward of N positions of each of b requests over a
prefix that is cached, as `sglang.benchmark.one_batch` runs it.

T is the time of the runner's forward; the step beside it adds the batch's making (`prepare_for_extend`). Proof of N are the counts
that the forward was given and the KV slots that it took. Run on a CPU with every minor release from 0.5.9 to 0.5.23, by attention in
torch, whose work follows L + N; on a GPU not run yet, eager there, without graphs.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import random
import sys
import tempfile
import time
import types
from array import array
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
    architectures,
    hf_config,
    memory,
    most_positions,
    require_room,
)
from pytest_nfp.backends.expert_routing import Routes
from pytest_nfp.cases import Case

ASKED_AT_IMPORT = ("torchvision", "sgl_kernel", "gguf")
"""Packages that SGLang imports, and that none of its kernels on a CPU without AMX computes with."""


def prepare(case: Case, seed: int, cache_bytes: int) -> PreparedEngine:
    """Raises Unsupported for an architecture that SGLang does not register, and a model that does not fit; ImportError."""
    memory.require(case)
    if case.gpu == "cpu":
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        _stand_in()
    engine = _Engine(case, seed)

    def forward(positions: int) -> Forward:
        require_room(case, positions)
        return lambda: engine.extend(positions)

    return PreparedEngine(
        forward,
        case.bytes_read,
        case.bytes_read,
        f"sglang.{engine.architecture}",
        1,
        proof=lambda: dict(engine.proofs),
        host=lambda: {n: median(us) for n, us in engine.host.items()},
        own_timer=True,
        active=None if engine.routes is None else engine.routes.active,
        modes=lambda: dict(engine.modes),
        alone=True,
    )


class _Nothing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for a package that is missing: whatever is asked of it is a class of that name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name == "sgl_kernel.scalar_type":
            raise ImportError(name)  # SGLang has a stand-in of its own for this one.
        if name.partition(".")[0] not in ASKED_AT_IMPORT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


class _Empty(types.ModuleType):
    """A module that has every name but special ones."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Named(type):
    """A class whose attributes are their names: enumerations are read at import."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _stand_in() -> None:
    """Let SGLang be imported on a CPU where packages are missing that it does not compute with there."""
    import transformers.image_utils  # noqa: F401  # before the stand-in: it would use torchvision if it saw one

    if not any(isinstance(finder, _Nothing) for finder in sys.meta_path):
        sys.meta_path.append(_Nothing())  # Behind the others: what is installed is found before it.


def _one_batch() -> Any:
    """SGLang's benchmark of one batch: `benchmark.one_batch` from 0.5.15 on, `bench_one_batch` before."""
    import sglang  # noqa: F401  # not installed: ImportError with its name

    newer = importlib.util.find_spec("sglang.benchmark") is not None
    newer = newer and importlib.util.find_spec("sglang.benchmark.one_batch") is not None
    return importlib.import_module("sglang.benchmark.one_batch" if newer else "sglang.bench_one_batch")


def server_arguments(known: set[str], case: Case, folder: str, seed: int) -> dict[str, Any]:
    """What a server is started with, as far as this release knows it. known: what its ServerArgs take."""
    assert case.context is not None
    wanted: dict[str, Any] = {
        "model_path": folder,
        "device": "cpu" if case.gpu == "cpu" else "cuda",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": hf_config.torch_name(case.dtype),
        "sampling_backend": "pytorch",
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        "disable_piecewise_cuda_graph": True,
        "disable_overlap_schedule": True,
        # The prefixes, their extension, and a slot that the allocator keeps for padding.
        "max_total_tokens": case.batch * (case.context + most_positions(case)) + 64,
        "max_running_requests": max(8, 2 * case.batch),
        "chunked_prefill_size": -1,
        "page_size": 1,
        "random_seed": seed,
        "log_level": "error",
    }
    if case.gpu == "cpu":
        wanted |= {"attention_backend": "torch_native", "mem_fraction_static": 0.1}
    else:
        # The paper's, and the one that the model's attention is composed of: SGLang's own choice differs by GPU.
        wanted["attention_backend"] = "flashinfer"
    return {name: value for name, value in wanted.items() if name in known}


class _Engine:
    """One model runner with the prefixes of its requests in the cache."""

    def __init__(self, case: Case, seed: int) -> None:
        self._case, self._random = case, random.Random(seed)  # noqa: S311  # tokens, not secrets
        self._ob = ob = _one_batch()
        self.architecture = hf_config.architecture_of(case)
        self.routes = Routes(case, seed) if case.subject.moe is not None else None
        self.proofs: dict[int, Proof] = {}
        self.host: dict[int, list[float]] = defaultdict(list)
        self.modes: dict[int, str] = {}
        with tempfile.TemporaryDirectory(prefix="pytest-nfp-") as name:
            folder = hf_config.write(case, Path(name))
            given = server_arguments(set(inspect.signature(ob.ServerArgs).parameters), case, str(folder), seed)
            self._runner = self._load(ob.ServerArgs(**given))
        if self.routes is not None:
            _install(self.routes)
        context = case.context
        assert context is not None
        vocabulary = case.subject.vocabulary or 1024
        self._ids = [[self._random.randrange(2, vocabulary) for _ in range(context)] for _ in range(case.batch)]
        most = most_positions(case)
        self._fresh = [[self._random.randrange(2, vocabulary) for _ in range(most)] for _ in range(case.batch)]
        self._requests = [self._request(str(i), ids) for i, ids in enumerate(self._ids)]
        self._use(context)
        self._forward(self._batch())
        self._keep_rows()

    def _load(self, arguments: Any) -> Any:
        """The model runner. Raises Unsupported where SGLang can't run the model."""
        ob = self._ob
        ob.get_tokenizer = lambda *_, **__: None  # Asked for whatever the arguments say.
        try:
            if hasattr(arguments, "resolve_once"):
                arguments.resolve_once()
            ob._set_envs_and_config(arguments)
            ports = ob.PortArgs.init_new(arguments)
            self._publish(arguments)
            loaded = ob.load_model(arguments, ports, 0, 0)[0]
        except (ValueError, KeyError) as error:
            raise architectures.refusal("SGLang", self._case, str(error)) from error
        return getattr(loaded, "torch_runner", loaded)

    def _publish(self, arguments: Any) -> None:
        """What the layers of this process read: handed to each of them up to 0.5.18, published since, with its rank from 0.5.21 on."""
        ob = self._ob
        published = hasattr(ob, "publish")
        if hasattr(ob, "spawn_world_rank"):
            rank = ob.spawn_world_rank(arguments, tp_rank=0, pp_rank=0)
            ob.publish(arguments, role="scheduler", ranks=ob.SpawnRanks(world_rank=rank, gpu_id=0))
        elif published:
            ob.publish(arguments, role="scheduler")
        if hasattr(ob, "_init_process_global_configs"):  # 0.5.22
            ob._init_process_global_configs()
            return
        for name in ("initialize_moe_config", "initialize_fp8_gemm_config", "initialize_fp4_gemm_config"):
            if (initialise := getattr(ob, name, None)) is not None:
                initialise(*(() if published else (arguments,)))

    def _use(self, positions: int) -> None:
        if self.routes is not None:
            self.routes.use(positions)

    def _request(self, name: str, tokens: list[int]) -> Any:
        """A request for a prompt."""
        ob = self._ob
        parameters = ob.SamplingParams(temperature=0, max_new_tokens=1)
        ids = list(tokens) if _is_up_to_0_5_12(ob) else array("q", tokens)
        request = ob.Req(rid=name, origin_input_text="", origin_input_ids=ids, sampling_params=parameters)
        request.logprob_start_len = -1
        self._set_tokens(request, tokens, 0)
        return request

    def _keep_rows(self) -> None:
        """The requests' rows of the token pool are theirs from now on: up to 0.5.9 the pool refuses two that have one already."""
        pool = self._runner.req_to_token_pool
        own = pool.alloc

        def kept(requests: list[Any], *arguments: Any, **keywords: Any) -> Any:
            rows = [getattr(request, "req_pool_idx", None) for request in requests]
            return own(requests, *arguments, **keywords) if None in rows else rows

        if type(pool).__name__ == "ReqToTokenPool":  # One of a recurrent model allocates more than rows.
            pool.alloc = kept

    def _set_tokens(self, request: Any, tokens: list[int], prefix: int) -> None:
        """The request's tokens, of which `prefix` are in the cache: each release has its own fields for it."""
        if _is_up_to_0_5_12(self._ob):
            request.fill_ids = list(tokens)
        else:
            request.full_untruncated_fill_ids = array("q", tokens)
        if hasattr(request, "set_extend_input_len"):  # up to 0.5.14, whose fill_len is read from 0.5.13 on
            request.fill_len = len(tokens)
            request.set_extend_input_len(len(tokens) - prefix)
        elif hasattr(request, "set_extend_range"):  # up to 0.5.21
            request.set_extend_range(prefix, len(tokens))
        else:
            request.extend_end = len(tokens)
        if prefix == 0:
            return
        if hasattr(request, "prefix_len") or not hasattr(request, "prefix_indices"):  # 0.5.22
            request.prefix_len = prefix
        else:
            row = request.req_pool_idx if hasattr(request, "req_pool_idx") else request.kv.req_pool_idx  # 0.5.19
            slots = self._runner.req_to_token_pool.req_to_token[row, :prefix]
            request.prefix_indices = slots.to(torch.int64)

    def _batch(self) -> Any:
        """The requests as one batch to extend: it takes the KV slots of their new tokens."""
        ob, runner = self._ob, self._runner
        pool = runner.token_to_kv_pool_allocator
        tree = ob.TreeCacheNamespace(page_size=1, device=runner.device, token_to_kv_pool_allocator=pool)
        batch = ob.ScheduleBatch.init_new(
            reqs=self._requests,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=pool,
            tree_cache=tree,
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=ob.SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        if batch.input_ids is None:  # Since 0.5.13 the scheduler moves them to the device.
            batch.input_ids, batch.prefill_input_ids_cpu = batch.prefill_input_ids_cpu.to(batch.device), None
        return batch

    def _forward(self, batch: Any) -> tuple[Any, Any, float]:
        """The batch as the forward sees it, what comes out, and the microseconds of the runner's forward."""
        ob = self._ob
        if _is_up_to_0_5_12(ob):
            seen = ob.ForwardBatch.init_new(batch.get_model_worker_batch(), self._runner)
        else:
            make = ob.ForwardBatch.init_new
            if "return_hidden_states_before_norm" in inspect.signature(make).parameters:  # 0.5.16
                seen = make(batch, self._runner, return_hidden_states_before_norm=False)
            else:
                seen = make(batch, self._runner)
        self._synchronise()
        began = time.perf_counter_ns()
        with torch.no_grad():
            out = self._runner.forward(seen)
        self._synchronise()
        return seen, out, (time.perf_counter_ns() - began) / 1e3

    def _synchronise(self) -> None:
        if self._case.gpu != "cpu":
            torch.cuda.synchronize()

    def extend(self, positions: int) -> float:
        """Microseconds of one forward in which every request extends its prefix by `positions` tokens, which it then gives back."""
        context = self._case.context
        assert context is not None
        pool = self._runner.token_to_kv_pool_allocator
        free = pool.available_size()
        self._use(positions)
        for request, ids, fresh in zip(self._requests, self._ids, self._fresh, strict=True):
            self._set_tokens(request, ids + fresh[:positions], context)
        began = time.perf_counter_ns()
        batch = self._batch()
        try:
            seen, out, took = self._forward(batch)
            whole = (time.perf_counter_ns() - began) / 1e3
            taken = free - pool.available_size()
        finally:  # A forward that raises must not keep the slots that the next N needs.
            pool.free(batch.out_cache_loc)
            for request in self._requests:
                if (kv := getattr(request, "kv", None)) is not None:
                    kv.kv_allocated_len = context
        self.proofs[positions] = Proof(counted(seen, taken), int(seen.extend_prefix_lens.sum()))
        self.host[positions].append(whole - took)
        self.modes[positions] = "graph" if getattr(out, "can_run_graph", False) else "eager"
        return took


def _is_up_to_0_5_12(ob: Any) -> bool:
    """Whether a batch is still translated for its worker, and requests hold lists."""
    return hasattr(ob.ScheduleBatch, "get_model_worker_batch")


def counted(seen: Any, taken: int) -> int:
    """Token rows that a forward processed: what it was given, if it took a KV slot for each and its inputs are as many; else 0."""
    rows = int(seen.extend_num_tokens)
    lengths = int((seen.seq_lens - seen.extend_prefix_lens).sum())
    return rows if rows == taken == lengths == seen.input_ids.shape[0] else 0


def _install(routes: Routes) -> None:
    """Replace the router's choice, whose own work stays in the model; the newest engine's routes are the ones in force.

    Raises Unsupported where this release chooses experts elsewhere.
    """
    from sglang.srt.layers.moe import topk

    if not hasattr(topk, "select_experts"):
        raise Unsupported("this SGLang chooses experts elsewhere, so routing can't be set")
    own = getattr(topk.select_experts, "nfp_own", topk.select_experts)

    def chosen(hidden_states: torch.Tensor, router_logits: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        out = own(hidden_states, router_logits, *arguments, **keywords)
        tokens = hidden_states.shape[0]
        ids = routes.take(tokens, out.topk_ids.device, out.topk_ids.dtype)
        if tokens == routes.tokens:
            routes.note(ids)
        weights = torch.full_like(out.topk_weights, 1 / ids.shape[1])
        return out._replace(topk_ids=ids, topk_weights=weights)

    chosen.nfp_own = own  # type: ignore[attr-defined]
    topk.select_experts = chosen
