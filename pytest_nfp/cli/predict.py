"""nfp predict: N_max of a model on a GPU, by both predictors."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pytest_nfp import catalog, frameworks
from pytest_nfp.catalog import UnknownName
from pytest_nfp.cli import layer_curve, options, workload
from pytest_nfp.cli.options import positive
from pytest_nfp.files import finite
from pytest_nfp.granularity import Granularity
from pytest_nfp.predict import Predicted, whole_models
from pytest_nfp.verdict import term_in_words

TERMS = ("dense", "moe", "attention", "branch")


def add(commands: Any) -> None:
    """Declare the command."""
    predict = commands.add_parser(
        "predict",
        help="N_max of a model on a GPU, by both predictors",
        description="Predict N_max: idle compute, the principle with its terms and limiting module, and the tile roofline.",
        epilog="example: nfp predict --gpu h20 --model llada-2.1-mini --backend sglang==0.5.9 --attention flashinfer==0.5.3",
    )
    workload.add(predict, is_required=False)
    options.add_renamed(predict, "--release", "give the release with --backend FRAMEWORK==RELEASE")
    options.add_renamed(predict, "--tp", "give --parallel tpN")
    predict.add_argument("--batch", type=positive, default=1, help="requests in the forward (default 1)")
    predict.add_argument("--context", type=positive, help="cached tokens per request (default 4096)")
    predict.add_argument(
        "--curve",
        action="store_true",
        help="the predicted T(N) of the MoE layer, or of a shape by hand, with its interval",
    )
    for name, help_text in layer_curve.OPTIONS.items():
        predict.add_argument(f"--{name}", type=positive, help=help_text)
    predict.add_argument(
        "--kernel",
        help="with --curve: a calibrated kernel, such as triton, by its name here or in recordings (default: the one that"
        " the release runs)",
    )
    predict.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print the prediction. Raises UnknownName, RuleUnknown."""
    if given.gpu is None:
        raise UnknownName("give --gpu, a catalog name such as h20")
    if given.curve:
        return layer_curve.run(given)
    workload.refuse(given, [*layer_curve.OPTIONS, "kernel"], "without --curve")
    if given.model is None:
        raise UnknownName("give --model, or --curve with a shape by hand")
    model, on = workload.read(given, given.batch, given.context or workload.CONTEXT)
    if on.attention is None and model.attention is not None and not model.is_latent:
        known = ", ".join(n for n, module in frameworks.with_rule().items() if module == "attention")
        raise UnknownName(
            "which attention kernels run can't be told here: give --attention FRAMEWORK==RELEASE"
            f" (one of {known}), such as --attention flash-attn==2.8.3"
        )
    composed = whole_models.compose(model, on, given.artifacts)
    predicted = composed.predict(workload.value(given, "tolerance"))
    answer = _as_json(model.name, on, composed, predicted) | {"notes": workload.notes(model, on, composed)}
    if given.json:
        print(json.dumps(options.with_walls(answer), indent=1))
    else:
        print("\n".join(_in_words(on, predicted, answer)))
    return 0


def _as_json(
    model: str, on: whole_models.Workload, composed: whole_models.Composed, predicted: Predicted
) -> dict[str, Any]:
    terms, roofline = predicted.principle, predicted.tile_roofline
    assert roofline is not None
    maps = {k.part.case: k.granularity for k in composed.known if k.granularity is not None}
    return {
        "gpu": on.gpu,
        "model": model,
        "modules": {case.module: str(case.backend) for case in maps},
        "batch": on.batch,
        "context": on.context,
        "baseline_positions": composed.base,
        "n_idle": finite(predicted.n_idle),
        "terms": {n: getattr(terms, n) for n in TERMS} if terms else None,
        "n_max": terms.n_max if terms else None,
        "limiting": terms.limiting if terms else None,
        "near_free_at_baseline": terms.is_near_free if terms else None,
        "bound": terms.bound if terms else None,
        "tile_roofline": {
            "n_max": roofline.n_max,
            "limiting": roofline.limiting,
            "interval": list(roofline.boundary.n_max_interval) if predicted.is_interval else None,
            "basis": predicted.basis,
        },
        "parts": list(composed.latencies),
        "not_described": list(composed.missing),
        "granularity": {g.module: _map_as_json(g) for g in maps.values()},
    }


def _map_as_json(g: Granularity) -> dict[str, Any]:
    return {
        "kernel": g.kernel,
        "tiles": g.tiles(),
        "artifact": g.artifact_file,
        "origin": g.origin,
        "warnings": list(g.warnings),
    }


def _in_words(on: whole_models.Workload, predicted: Predicted, answer: dict[str, Any]) -> list[str]:
    """The answer as lines of text."""
    terms, words = answer["terms"], predicted.as_dict()
    idle = "unbounded" if answer["n_idle"] is None else f"{answer['n_idle']:.1f}"
    title = f"{answer['model']} on {catalog.gpu(on.gpu).title}"
    lines = [
        f"{title}, b={on.batch}, L={on.context}, N0={answer['baseline_positions']}",
        f"  idle compute     N_idle {idle}",
    ]
    if terms is None:
        lines.append(f"  principle        none: the closed form knows balanced and skewed routing, not {on.routing}")
    else:
        lines.append(f"  principle        N_max {term_in_words(words['principle'])}, limited by {answer['limiting']}")
        lines += [f"    {name:<14} {term}" for name, term in terms.items() if term is not None]
    roofline = answer["tile_roofline"]
    n_max = term_in_words(words["tile_roofline"])
    lines.append(f"  tile roofline    N_max {n_max}, limited by {roofline['limiting']} ({roofline['basis']})")
    lines += [f"  {note}" for note in answer["notes"]]
    for module, g in answer["granularity"].items():
        ranges = ", ".join(f"{first}..{last}: {tile}" for first, last, tile in g["tiles"])
        lines.append(f"  {module} tiles: {ranges} rows ({g['origin']}: {g['artifact']})")
        lines += [f"    {warning}" for warning in g["warnings"]]
    return lines
