"""nfp check, cost-table, table: the questions of a deployment.

Is a method near-free here, what is T(N, b), where is the bound?

Every answer is a prediction: the sum of a model's modules, each by its own kernel (predict/whole_models.py), or the
closed form.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from pytest_nfp import catalog
from pytest_nfp.catalog import Model, UnknownName
from pytest_nfp.cli import workload
from pytest_nfp.cli.options import positive, routing, with_walls
from pytest_nfp.files import finite
from pytest_nfp.predict import Predicted, whole_models
from pytest_nfp.predict.lookup import GPUS, SETUP, future, lookup
from pytest_nfp.principle import active_experts
from pytest_nfp.principle.boundary import bracketed
from pytest_nfp.principle.routing import Replay
from pytest_nfp.verdict import term_in_words

BATCHES = (1, 2, 4, 8, 16, 32)
GROWTH = 0.005
"""Experts are saturated where one more position raises the number of experts read by at most this share."""
POSITIONS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def add(commands: Any) -> None:
    """Declare the commands."""
    p = commands.add_parser(
        "check",
        help="is a number of positions, or a method, near-free on this model and GPU?",
        description="Predicts T(N) of a whole model and says whether N positions stay within the tolerance, what they cost"
        " against one position, how much headroom is left and which module limits it. Exit code 0: near-free, 1: not, 3: the"
        " interval of the prediction does not decide it.",
        epilog="examples: nfp check --gpu h200 --model qwen3-8b --backend vllm==0.24.0 --attention flash-attn==2.8.3 --positions 16;"
        " nfp check ... --method eagle-3 --accepted 3.1",
    )
    workload.add(p)
    _add_recorded(p)
    n = p.add_mutually_exclusive_group(required=True)
    n.add_argument("--positions", type=positive, help="N: positions that one forward processes")
    n.add_argument("--method", help="a method of the catalog, whose N its source states (nfp table --methods)")
    p.add_argument(
        "--accepted", type=float, help="tokens that one step commits on average, measured by you: at most the positions"
    )
    p.add_argument("--context", type=positive, default=4096, help="L, cached tokens a request (default 4096)")
    p.add_argument("--batch", type=positive, default=1, help="b, requests in the forward (default 1)")
    p.set_defaults(run=check)

    p = commands.add_parser(
        "cost-table",
        help="T(N, b) of a model as JSON, for adaptive speculation",
        description="Predicted microseconds of one forward for every batch and number of positions, with the interval of the"
        " calibrations, as JSON: what a scheduler that chooses its speculation length needs.",
        epilog="example: nfp cost-table --gpu h200 --model llada-2.1-mini --backend vllm==0.24.0 --attention flash-attn==2.8.3",
    )
    workload.add(p)
    _add_recorded(p)
    p.add_argument("--context", type=positive, default=4096, help="L, cached tokens a request (default 4096)")
    p.add_argument("--batch", type=positive, action="append", default=[], help=f"repeatable (default {BATCHES})")
    p.add_argument("--positions", type=positive, action="append", default=[], help=f"repeatable (default {POSITIONS})")
    p.set_defaults(run=cost_table)

    p = commands.add_parser(
        "table",
        help="the deployment lookup, an N_max(b, L) grid of a model, or the view over GPU generations",
        description="Without --model: idle compute against the principle, with the factor by which it over-predicts. With"
        " --model: N_idle, the principle and N_max of the composed model over batch and context, and what limits each. With --future: the balance of each"
        " GPU, and which of idle compute and the attention tile bounds a dense model there.",
        epilog="example: nfp table --gpu h200 --model llada-2.1-mini --backend vllm==0.24.0 --attention flash-attn==2.8.3",
    )
    workload.add(p, is_required=False)
    _add_recorded(p)
    p.add_argument(
        "--methods", action="store_true", help="the catalogue of methods, with the source of their positions"
    )
    p.add_argument("--future", action="store_true", help="rho over GPU generations with the attention bound")
    p.add_argument(
        "--context", type=positive, action="append", default=[], help="repeatable (default: the model's grid)"
    )
    p.add_argument("--batch", type=positive, action="append", default=[], help=f"repeatable (default {BATCHES})")
    p.set_defaults(run=table)


def _add_recorded(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--recorded",
        action="store_true",
        help="where a recorded table of the backend's release holds exactly a module's shape, its times stand in place of the prediction",
    )


def _composed(
    given: argparse.Namespace, batch: int, context: int | None
) -> tuple[Model, whole_models.Workload, whole_models.Composed]:
    """The model on one rank, its workload, and the sum of its parts. Raises UnknownName, RuleUnknown, FileError."""
    model, on = workload.read(given, batch, context)
    return model, on, whole_models.compose(model, on, given.artifacts, given.recorded)


def _kind(composed: whole_models.Composed) -> str:
    """What the numbers come from. None of them is a measurement of the model."""
    is_recorded = any(basis.startswith("recorded") for basis in composed.basis.values())
    return "composed of recorded and predicted modules" if is_recorded else "predicted"


def check(given: argparse.Namespace) -> int:
    """Print whether the positions are near-free. Raises UnknownName, RuleUnknown."""
    n, method_text = given.positions, ""
    if given.method:
        method = catalog.method(given.method)
        if method.positions is None:
            raise UnknownName(
                f"{method.name}: its source states no positions ({method.stated}): give --positions, not accepted tokens"
            )
        n, method_text = method.positions, f" ({method.name}: {method.stated}; {method.source})"
    if given.accepted is not None and not 0 < given.accepted <= n:
        raise UnknownName(
            f"--accepted {given.accepted:g}: a step of {n} positions commits more than 0 and at most {n} tokens"
        )
    tolerance = workload.value(given, "tolerance")
    model, on, composed = _composed(given, given.batch, given.context)
    predicted = composed.predict(tolerance, [n])
    roofline = predicted.tile_roofline
    assert roofline is not None
    low, high = roofline.boundary.n_max_interval
    t1, t0, t = (composed.latency_us(m) for m in (1, composed.base, n))
    outcome = "near-free" if n <= low else "not near-free" if high is not None and n > high else "undecided"
    if n < composed.base:
        # Below N0 each position still adds experts, so the forward is compared with that of one position.
        limit, (few, many) = 1 + tolerance, composed.spread
        outcome = "near-free" if t / t1 / few <= limit else "not near-free" if t / t1 / many > limit else "undecided"
    answer: dict[str, Any] = {
        "outcome": outcome,
        "kind": _kind(composed),
        "positions": n,
        "n_max": roofline.n_max,
        "n_max_interval": [low, high],
        "headroom": roofline.n_max - n,
        "limiting": roofline.limiting,
        "principle": _principle(predicted),
        "n_idle": finite(predicted.n_idle),
        "baseline_positions": composed.base,
        "latency_us": round(t, 1),
        "ratio_to_one": round(t / t1, 3),
        "ratio_to_baseline": round(t / t0, 3),
        "shares": {name: round(share, 3) for name, share in composed.shares(n).items()},
        "missing": list(composed.missing),
        "basis": composed.basis,
    }
    answer |= _coverage(given, n)
    if given.accepted is not None:
        # The used share of the capacity: accepted tokens over near-free positions.
        answer["utilisation"] = round(given.accepted / roofline.n_max, 3)
        answer["speedup"] = round(given.accepted * t1 / t, 3)
    if given.json:
        print(json.dumps(with_walls(answer), indent=1))
    else:
        _print_check(given, answer, method_text, workload.notes(model, on, composed))
    return {"near-free": 0, "not near-free": 1, "undecided": 3}[outcome]


def _coverage(given: argparse.Namespace, positions: int) -> dict[str, Any]:
    """How many experts a forward reads, and whether one more position reads more. Empty for a model without experts."""
    model = catalog.model(given.model)
    if model.moe is None:
        return {}
    experts, top_k = model.moe.experts, given.top_k or model.moe.top_k
    rule = routing(workload.value(given, "routing"))
    active = active_experts(rule, positions * given.batch, experts, top_k)
    if isinstance(rule, Replay) and (positions + 1) * given.batch > len(rule.tokens):
        return {"active_experts": round(active, 1), "coverage": "not known past the trace"}
    active_after = active_experts(rule, (positions + 1) * given.batch, experts, top_k)
    coverage = "growing" if active_after > active * (1 + GROWTH) else "saturated"
    return {"active_experts": round(active, 1), "coverage": coverage}


def _principle(predicted: Predicted) -> dict[str, Any] | None:
    """The principle's term, in the form that every command prints; None under drawn or replayed routing."""
    return predicted.as_dict().get("principle")


def _principle_in_words(predicted_term: dict[str, Any] | None) -> str:
    if predicted_term is None:
        return "none for this routing"
    return f"{term_in_words(predicted_term)} {predicted_term['limiting']}"


def _print_check(given: argparse.Namespace, a: dict[str, Any], said: str, notes: list[str]) -> None:
    n = a["positions"]
    print(f"{given.model} on {catalog.gpu(given.gpu).title}, b={given.batch}, L={given.context}: {a['kind']}")
    print(f"  {n} positions{said}: {a['outcome']}")
    interval = bracketed(a["n_max_interval"])
    print(f"  N_max {a['n_max']}, interval {interval}, headroom {a['headroom']}, limited by {a['limiting']}")
    print(f"  principle {_principle_in_words(a['principle'])}")
    base = a["baseline_positions"]
    first = f", {a['ratio_to_baseline']:.2f} T(N0={base})" if base > 1 else ""
    print(f"  T({n}) {a['latency_us']:.0f} us: {a['ratio_to_one']:.2f} T(1){first}")
    if "coverage" in a:
        print(f"  experts read: {a['active_experts']:g}, {a['coverage']}")
    if "utilisation" in a:
        pays = "pays" if a["speedup"] > 1 else "does not pay"
        print(f"  {given.accepted:g} tokens a step: {a['utilisation']:.0%} of the near-free capacity;")
        print(f"  {a['speedup']:.2f} times the tokens a second of one position, drafting not counted: it {pays}")
    for name, basis in a["basis"].items():
        if basis.startswith("recorded"):
            print(f"  {name}: {basis}")
    for note in notes:
        print(f"  {note}")


def cost_table(given: argparse.Namespace) -> int:
    """Print T(N, b). Raises UnknownName, RuleUnknown."""
    rows: list[dict[str, Any]] = []
    missing: tuple[str, ...] = ()
    kinds: list[str] = []
    for batch in given.batch or BATCHES:
        _, _, composed = _composed(given, batch, given.context)
        low, high = composed.latency_spread
        missing = composed.missing
        kinds.append(_kind(composed))
        for n in given.positions or POSITIONS:
            t = composed.latency_us(n)
            rows.append(
                {
                    "batch": batch,
                    "positions": n,
                    "latency_us": round(t, 2),
                    "low": round(t / high, 2),
                    "high": round(t / low, 2),
                }
            )
        print(f"  batch {batch} done", file=sys.stderr)
    head = {
        "schema": 1,
        "kind": max(kinds, key=len),
        "gpu": catalog.gpu(given.gpu).name,
        "model": given.model,
        "backend": given.backend,
        "attention": given.attention,
        "dtype": workload.value(given, "dtype"),
        "context": given.context,
        "routing": workload.value(given, "routing"),
        "top_k": given.top_k,
        "parallel": workload.value(given, "parallel"),
        "missing": list(missing),
    }
    print(json.dumps(with_walls(head | {"points": rows}), indent=1))
    return 0


def table(given: argparse.Namespace) -> int:
    """Print a table. Raises UnknownName, RuleUnknown."""
    asked = [
        "backend",
        "attention",
        "top-k",
        "routing",
        "dtype",
        "tolerance",
        "parallel",
        "recorded",
        "batch",
        "context",
        "artifacts",
    ]
    if given.model:
        workload.refuse(given, ["methods", "future"], "beside --model")
        return _grid(given)
    workload.refuse(given, asked, "without --model: they belong to the grid of a model")
    if given.methods:
        workload.refuse(given, ["gpu", "future"], "beside --methods")
        for m in catalog.methods():
            print(f"{m.name:<16} {m.positions or 'not stated':>10}  {m.stated} ({m.source})")
        return 0
    if given.future:
        workload.refuse(given, ["gpu"], "beside --future, which shows every GPU")
    rows = future() if given.future else lookup([given.gpu] if given.gpu else GPUS)
    if given.json:
        print(json.dumps(rows, indent=1))
        return 0
    if not given.future:
        print(f"experts and attention as {SETUP} run them; the principle against idle compute")
    columns = list(rows[0])
    texts = [[_cell(row[c]) for c in columns] for row in rows]
    widths = [max(len(c), *(len(t[i]) for t in texts)) for i, c in enumerate(columns)]
    print("  ".join(c.replace("_", " ").ljust(w) for c, w in zip(columns, widths, strict=True)).rstrip())
    for line in texts:
        print("  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip())
    return 0


def _cell(value: object) -> str:
    if value is None:
        return "unbounded"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _grid(given: argparse.Namespace) -> int:
    """Print N_max over batch and context, with the limiting part."""
    if given.gpu is None:
        raise UnknownName(f"a grid of {given.model} needs --gpu")
    contexts = given.context or list(catalog.model(given.model).context) or [workload.CONTEXT]
    batches = given.batch or BATCHES
    cells: list[dict[str, Any]] = []
    kind = "predicted"
    notes: list[str] = []
    for context in contexts:
        for batch in batches:
            model, on, composed = _composed(given, batch, context)
            kind = max(kind, _kind(composed), key=len)
            predicted = composed.predict(workload.value(given, "tolerance"))
            roofline = predicted.tile_roofline
            assert roofline is not None
            # The notes are the same for every cell: the parts, whose attention, and what is missing.
            notes = notes or workload.notes(model, on, composed)
            cells.append(
                {
                    "context": context,
                    "batch": batch,
                    "baseline_positions": composed.base,
                    "n_idle": finite(predicted.n_idle),
                    "principle": _principle(predicted),
                    "n_max": roofline.n_max,
                    "n_max_interval": list(roofline.boundary.n_max_interval),
                    "limiting": roofline.limiting,
                    "kind": _kind(composed),
                    "basis": composed.basis,
                }
            )
    if given.json:
        head = {"kind": kind, "gpu": given.gpu, "model": given.model, "notes": notes}
        print(json.dumps(with_walls(head | {"cells": cells}), indent=1))
        return 0
    print(f"{given.model} on {catalog.gpu(given.gpu).title}: {kind} N_max and what limits it")
    rows = [["L", "b", "N0", "N_idle", "principle", "tile roofline"]]
    for c in cells:
        idle = "unbounded" if c["n_idle"] is None else f"{c['n_idle']:.1f}"
        interval = bracketed(c["n_max_interval"]) + " " if c["n_max_interval"][0] != c["n_max_interval"][1] else ""
        roofline_text = f"{c['n_max']} {interval}{c['limiting']}"
        first = [str(c["context"]), str(c["batch"]), str(c["baseline_positions"])]
        rows.append([*first, idle, _principle_in_words(c["principle"]), roofline_text])
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    for r in rows:
        print("  " + "  ".join(text.ljust(w) for text, w in zip(r, widths, strict=True)).rstrip())
    for note in notes:
        print(f"  {note}")
    return 0
