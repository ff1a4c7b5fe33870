"""MoE experts by SGLang's Triton fused experts on a GPU (0.5.9 to 0.5.23).

Not run on a GPU yet: the logic is tested on the CPU with stand-ins, the call against the sources of each release.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from pytest_nfp.backends import Prepared, Unsupported, fused_experts
from pytest_nfp.cases import Case

PLACES = (
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe",
    "sglang.srt.layers.moe.fused_moe_triton.fused_moe",
)
"""Where fused_experts lies: from 0.5.12, and before."""


def prepare(case: Case, seed: int, cache_bytes: int) -> Prepared:
    """Raises Unsupported on a CPU and where no known release is installed, ImportError where none is."""
    if case.gpu == "cpu":
        raise Unsupported("SGLang's fused experts run on a GPU alone")
    own = _module()
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    _publish_server_arguments()
    config = MoeRunnerConfig(inplace=False)

    def compute(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        # The logits are what routing would have given: nothing reads them once ids and weights are there.
        out: torch.Tensor = own.fused_experts(x, w1, w2, StandardTopKOutput(weights, ids, weights), config)
        return out

    selector = own.try_get_optimal_moe_config
    return fused_experts.prepare(case, seed, cache_bytes, compute, "sglang.fused_experts", selector)


def _publish_server_arguments() -> None:
    """The kernel asks the server's arguments for a few switches: here those of a server that was given none."""
    try:
        from sglang.srt.runtime_context import RuntimeContext, get_context
    except ModuleNotFoundError:
        RuntimeContext = None
    if hasattr(RuntimeContext, "override_server_args"):
        get_context().override_server_args().install()
        return
    # Before 0.5.16.
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))


def _module() -> Any:
    for name in PLACES:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            # A part of SGLang that is not where this release has it; anything else that is missing is the reason.
            if error.name is None or not error.name.startswith("sglang.srt.layers.moe"):
                raise
    raise Unsupported(f"this SGLang has its fused experts in none of {', '.join(PLACES)}")
