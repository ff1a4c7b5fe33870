"""The record of a case: its prediction, the map of its release, and its curve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pytest_nfp.cases import Backend, Case, Module
from pytest_nfp.curves import Curve
from pytest_nfp.files import finite
from pytest_nfp.granularity import Granularity
from pytest_nfp.interpreted import Executed
from pytest_nfp.measure.composition import Composition
from pytest_nfp.predict import Predicted, edge_positions
from pytest_nfp.principle import Boundary, sensitivity
from pytest_nfp.principle.plateaus import plateaus
from pytest_nfp.records.schema import CaseRecord, Question, TestResult
from pytest_nfp.verdict import Verdict


def case_record(case: Case, question: Question, verdict: Verdict) -> CaseRecord:
    """The record of a case with the verdict on one of its questions."""
    return CaseRecord(
        id=case.id,
        gpu=case.gpu,
        backend=str(case.backend),
        module=case.module,
        subject=case.subject.name,
        workload=case.key,
        dtype=None if case.module == "own" else case.dtype,
        batch=case.batch,
        context=case.context,
        top_k=case.top_k,
        routing=None if case.routing is None else str(case.routing),
        kind="predicted",
        outcome=verdict.outcome,
        tests={question: result_of(verdict)},
        baseline_positions=case.baseline_positions,
    )


def result_of(verdict: Verdict) -> TestResult:
    """A verdict in the form of a record."""
    return TestResult(outcome=verdict.outcome, reasons=list(verdict.reasons), held_to=list(verdict.held_to))


def add_idle(record: CaseRecord, n_idle: float | None) -> None:
    """Add N_idle. An infinite one is stored as unbounded."""
    record.n_idle = finite(n_idle)
    record.n_idle_unbounded = n_idle is not None and record.n_idle is None


def add_prediction(record: CaseRecord, predicted: Predicted) -> None:
    """Add the terms of both predictors. Their N_max is the case's N_max until a curve gives one."""
    add_idle(record, predicted.n_idle)
    record.predicted, record.basis = predicted.as_dict(), predicted.basis
    n_max = predicted.principle or predicted.tile_roofline
    record.n_max = None if n_max is None else n_max.n_max


def add_map(record: CaseRecord, case: Case, granularity: Granularity) -> None:
    """Add the map of the release's rule, and where the rule was read."""
    record.granularity = {
        "kernel": granularity.kernel,
        "tiles": granularity.tiles(),
        "source": ", ".join(dict.fromkeys(r.source for r in granularity.ranges)),
        "artifact": granularity.artifact_file,
        "sha256": granularity.artifact_sha256,
        "origin": granularity.origin,
        "warnings": list(granularity.warnings),
        "edges": edge_positions(case, granularity),
        "choice": granularity.choice_digest,
        "kernel_reason": granularity.kernel_reason,
    }


def add_curve(record: CaseRecord, curve: Curve, boundary: Boundary | None) -> None:
    """Put a curve in place of the prediction. boundary: None where the curve has none."""
    if curve.points:
        record.kind = "recorded" if curve.kind == "recorded" else "measured"
    if record.kind == "measured":
        record.measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    record.n_max = record.n_max_interval = record.n_first_exit = None
    record.curve = [(p.positions, round(p.latency_us, 2)) for p in curve.points]
    record.ratios = [
        (p.positions, round(p.ratio_low, 4), round(p.ratio_high, 4))
        for p in curve.points
        if p.ratio_low is not None and p.ratio_high is not None and math.isfinite(p.ratio_high)
    ]
    record.source, record.kernel = curve.source, curve.kernel
    record.counts, record.trust, record.timer = curve.counts, curve.trust, curve.timer
    record.kernels, record.modes, record.settings = curve.kernels, curve.modes, curve.settings
    record.active_experts = curve.active_experts
    record.proof, record.steps, record.padded = curve.proof, curve.steps, curve.padded
    record.plateaus = [(p.first, p.last, round(p.latency_us, 2)) for p in plateaus(curve.points)]
    record.log = list(curve.log)
    record.samples = {n: [round(s, 2) for s in samples] for n, samples in curve.samples.items()}
    record.baseline_positions = curve.baseline_positions
    if boundary is not None:
        record.n_max, record.n_max_interval = boundary.n_max, boundary.n_max_interval
        record.n_first_exit = boundary.n_first_exit
        record.sensitivity = {
            f"{t:.2f}": b.n_max for t, b in sensitivity(curve.points, curve.baseline_positions).items()
        }


def composed_record(composed: Composition) -> dict[str, Any]:
    """A composition in the form of a record: boundary, error, limiting part, curve, and the times of each part.

    Times are in microseconds.
    """
    return {
        "n_max": composed.boundary.n_max,
        "n_max_interval": list(composed.boundary.n_max_interval),
        "error": round(composed.error, 4),
        "steps": composed.steps,
        "limiting": composed.limiting,
        "rest_us": round(composed.rest_us, 1),
        "curve": [[p.positions, round(p.latency_us, 1)] for p in composed.points],
        "parts": {
            name: [[n, round(us, 1)] for n, us in sorted(times.items())] for name, times in composed.parts.items()
        },
    }


def interpreted_record(
    gpu: str, executed: Executed, predicted: Mapping[int, float], module: Module, name: str
) -> CaseRecord:
    """A case that compares the FLOPs a kernel executed under the interpreter with those its map predicts.

    predicted: N -> FLOPs of the kernel's matrix products.
    """
    backend = Backend(executed.framework, executed.release)
    agrees = all(executed.flops.get(n) == flops for n, flops in predicted.items())
    reasons = [] if agrees else ["the kernel executed other products than its map predicts"]
    result = TestResult(outcome="PASS" if agrees else "FAIL", reasons=reasons)
    return CaseRecord(
        id=f"{gpu}-{backend}-{module}-{executed.kernel}-{name}",
        gpu=gpu,
        backend=str(backend),
        module=module,
        subject="executed work",
        workload=name,
        kind="executed",
        outcome=result.outcome,
        tests={"granularity": result},
        kernel=executed.kernel,
        executed={n: (float(executed.flops.get(n, 0)), float(flops)) for n, flops in predicted.items()},
        settings={n: " ".join(f"{k}={v}" for k, v in sorted(s.items())) for n, s in executed.settings.items() if s},
    )
