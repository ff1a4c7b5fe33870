"""A full model by transformers: N new positions over a DynamicCache of L tokens a request, dummy weights.

Runs on a CPU; on a GPU not run yet. The router's choice is replaced by the case's routing, and what each layer then read is
counted where the experts are called.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pytest_nfp.backends import Forward, PreparedEngine, Proof, Unsupported, architectures, hf_config, memory, tensors
from pytest_nfp.backends.expert_routing import Routes
from pytest_nfp.cases import Case


def prepare(case: Case, seed: int, cache_bytes: int) -> PreparedEngine:
    """Raises Unsupported for an architecture that transformers does not have, and a model that does not fit; ImportError."""
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    subject, context = case.subject, case.context
    assert context is not None
    memory.require(case)
    device, dtype = tensors.device_of(case), tensors.dtype_of(case)
    with tempfile.TemporaryDirectory(prefix="pytest-nfp-") as folder:
        torch.manual_seed(seed)
        try:
            config = AutoConfig.from_pretrained(hf_config.write(case, Path(folder)))
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
        except (ValueError, KeyError) as error:
            # Its first line: the others list all that it has.
            raise architectures.refusal("transformers", case, str(error).partition("\n")[0]) from error
    routes = Routes(case, seed) if subject.moe is not None else None
    if routes is not None:
        _install(model, routes)
    generator = tensors.generator_of(case, seed)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(2, config.vocab_size, (case.batch, count), generator=generator, device=device)

    cache = DynamicCache(config=config)
    with torch.no_grad():
        if routes is not None:
            routes.use(context)
        model(input_ids=tokens(context), past_key_values=cache, use_cache=True)
    seen: dict[int, Proof] = {}

    def forward(positions: int) -> Forward:
        new = tokens(positions)

        def run() -> object:
            if (extra := cache.get_seq_length() - context) > 0:
                cache.crop(-extra)
            before = cache.get_seq_length()
            if routes is not None:
                routes.use(positions)
            out = model(input_ids=new, past_key_values=cache, use_cache=True)
            done = cache.get_seq_length() - before
            seen[positions] = Proof(case.batch * done, case.batch * before)
            return out.logits

        return run

    return PreparedEngine(
        forward,
        case.bytes_read,
        # Attention, head and KV cache are read again in the next forward, whatever experts it takes.
        case.bytes_read,
        f"transformers.{type(model).__name__}",
        1,
        proof=lambda: dict(seen),
        modes=lambda: dict.fromkeys(seen, "eager"),
        active=None if routes is None else routes.active,
    )


def _install(model: Any, routes: Routes) -> None:
    """Replace every router's choice, and count what each layer of experts is given. Raises Unsupported where there is none."""
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    experts = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    if not routers or len(routers) != len(experts):
        raise Unsupported(f"the routers of {type(model).__name__} are not known, so routing can't be set")

    def choosing(own: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """The router's own forward, whose work stays in the model, with other experts chosen."""

        def choose(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits, scores, _ = own(hidden)
            return logits, scores, routes.take(routes.tokens, hidden.device, torch.int64)

        return choose

    def count(layer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        ids = keywords.get("top_k_index", arguments[1] if len(arguments) > 1 else None)
        if isinstance(ids, torch.Tensor):
            routes.note(ids)

    for router in routers:
        router.forward = choosing(router.forward)
    for layer in experts:
        layer.register_forward_pre_hook(count, with_kwargs=True)
