"""Where and how a model runs: the options that several commands share, and the workload that they describe.

The commands are `predict`, `check`, `table` and `cost-table`.

An option that has no use in a command is an error, and is never silently ignored.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pytest_nfp import catalog, frameworks
from pytest_nfp.cases import Backend, parse_backend
from pytest_nfp.catalog import Model, UnknownName
from pytest_nfp.catalog.parallel import on_rank, parse_parallel
from pytest_nfp.cli import options
from pytest_nfp.cli.options import add_artifacts, positive, release
from pytest_nfp.granularity import RuleUnknown, artifacts
from pytest_nfp.predict import whole_models
from pytest_nfp.settings import Settings

CONTEXT = 4096
"""L of a model without a grid of its own."""
DEFAULTS: dict[str, Any] = {
    "routing": "balanced",
    "dtype": options.DTYPE,
    "tolerance": Settings.tolerance,
    "parallel": "tp1",
}
"""Defaults of options. The parsers leave an option that was not given at None, so that `refuse` sees the others."""


def add(p: argparse.ArgumentParser, is_required: bool = True) -> None:
    """Declare the options of a model's workload, except batch and context."""
    p.add_argument("--gpu", required=is_required, help="catalog name, such as h20")
    p.add_argument("--model", required=is_required, help="catalog name, or path of a Hugging Face config.json")
    p.add_argument(
        "--backend", help="framework and release of GEMMs and experts: vllm==0.24.0 (dense models: optional)"
    )
    p.add_argument(
        "--attention",
        help="framework and release of the attention: flash-attn==2.8.3 (default: the backend's own package where it is"
        " installed, else the answer leaves attention out and names it as missing)",
    )
    p.add_argument("--top-k", type=positive, help="experts a token (default: the model's)")
    p.add_argument(
        "--routing",
        help="balanced (default), skewed, uniform, power-law-A (such as power-law-1.2), and trace:FILE, a CSV with a line"
        " `token,expert,expert,...` for each token; the principle knows the first two",
    )
    options.add_dtype(p, default=None)
    p.add_argument("--tolerance", type=float, help=f"epsilon (default {Settings.tolerance})")
    p.add_argument("--parallel", help="ranks: tp8 (tensor), ep8 (expert); default tp1")
    add_artifacts(p)
    p.add_argument("--json", action="store_true", help="print JSON")


def refuse(given: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise UnknownName for options that were given and have no use."""
    used = [n for n in names if getattr(given, n.replace("-", "_"), None) not in (None, False, [])]
    if used:
        raise UnknownName(f"{', '.join(f'--{n}' for n in used)}: no use {why}")


def value(given: argparse.Namespace, name: str) -> Any:
    """An option, or its default."""
    given_value = getattr(given, name)
    return DEFAULTS[name] if given_value is None else given_value


def read(given: argparse.Namespace, batch: int, context: int | None) -> tuple[Model, whole_models.Workload]:
    """The model on one rank, and its workload.

    Raises UnknownName or FileError for an option that can't be used or has no use.
    """
    model = on_rank(catalog.model(given.model), parse_parallel(value(given, "parallel")))
    if model.moe is None:
        refuse(given, ["top-k", "routing"], f"for {model.name}, which has no experts")
    elif (given.top_k or 1) > model.moe.experts:
        raise UnknownName(f"--top-k {given.top_k}: {model.name} has {model.moe.experts} experts")
    if model.attention is None:
        refuse(given, ["attention"], f"for {model.name}, which has no attention that is described")
    if model.moe is not None and not given.backend:
        raise UnknownName(f"{model.name} has experts: give their framework with --backend FRAMEWORK==RELEASE")
    backend = release(given.backend, "--backend") if given.backend else Backend("torch", "0")
    return model, whole_models.Workload(
        catalog.gpu(given.gpu).name,
        backend,
        attention(given, model),
        value(given, "dtype"),
        batch,
        context or (model.context or (CONTEXT,))[0],
        given.top_k,
        options.routing(value(given, "routing")),
    )


def attention(given: argparse.Namespace, model: Model) -> Backend | None:
    """The backend of --attention, else the framework's own package where it is installed.

    None: attention is left out, as the output says.
    """
    if model.attention is None:
        return None
    if given.attention:
        return release(given.attention, "--attention")
    framework = frameworks.get(parse_backend(given.backend).framework) if given.backend else None
    own = framework.attention if framework is not None else ""
    installed = artifacts.installed_release(own) if own and not model.is_latent else None
    return Backend(own, installed) if own and installed else None


def notes(model: Model, workload: whole_models.Workload, composed: whole_models.Composed) -> list[str]:
    """What an answer includes and leaves out, as text: the summed parts, whose attention, and what is missing."""
    sentences = [
        f"summed: {', '.join(composed.latencies)}"
        + (f"; attention of {workload.attention}" if workload.attention else "")
    ]
    if model.layers is None:
        sentences.append(f"{model.name} is a module shape: the bound is the module's, not that of a model")
    sentences += [
        f"{name} is not included: the bound covers the other modules alone, not the whole model"
        for name in composed.missing
    ]
    if workload.attention is not None and (pinned := _pinned(workload)):
        sentences.append(pinned)
    return sentences


def _pinned(workload: whole_models.Workload) -> str:
    """A note where the backend requires another release of the attention package than was asked for; else ""."""
    asked, framework = workload.attention, frameworks.get(workload.backend.framework)
    if asked is None or framework is None or not framework.pins_attention or framework.attention != asked.framework:
        return ""
    try:
        own = artifacts.pinned_requirement(framework.name, workload.backend.release, asked.framework)
    except RuleUnknown:
        return ""  # The release pins none, or no index can be read.
    return "" if own == asked.release else f"{workload.backend} brings {asked.framework} {own}, not {asked.release}"
