"""A whole model's boundary beside the sum of its modules, which are measured here one by one."""

from __future__ import annotations

from dataclasses import replace

from pytest_nfp import catalog
from pytest_nfp.backends import REFUSALS, Unsupported
from pytest_nfp.cases import Case
from pytest_nfp.curves import Curve
from pytest_nfp.devices.lock import TooLong, device_lock, time_limit
from pytest_nfp.files import FileError
from pytest_nfp.granularity import Granularity, RuleUnknown
from pytest_nfp.measure import composition
from pytest_nfp.measure.sweep import Interrupted
from pytest_nfp.predict import Figures
from pytest_nfp.records import CaseRecord
from pytest_nfp.records.build import add_idle, composed_record
from pytest_nfp.run.inputs import Inputs
from pytest_nfp.run.results import Results
from pytest_nfp.verdict import Verdict, interval_in_words


def judge_model(results: Results, case: Case, curve: Curve, verdict: Verdict) -> Verdict:
    """A whole model's verdict with the sum of its modules beside it. Raises Interrupted.

    verdict: its boundary against its baseline. Where the sum and the boundary agree within one N of the grid, that is a PASS;
    where not, the model is more than its modules, and nothing else is known to hold it to.
    """
    inputs = results.inputs
    settings = inputs.settings
    record = results.cases[case.id]
    device = inputs.measuring_device(case.gpu)
    if curve.invalid or device is None or not curve.points:
        return verdict
    try:
        with device_lock(device), time_limit(settings.case_timeout):
            record.floor_us = _floor_us(inputs, case)
            composed = composition.measure(case, curve, device, settings.tolerance, settings.seed, inputs.say)
    except Interrupted:
        results.is_partial = True
        record.counts |= {"interrupted": True}
        raise
    except (composition.NotComposed, TooLong) as reason:
        record.composed = {"reason": str(reason)}
        verdict = replace(verdict, reasons=(*verdict.reasons, f"not composed of its modules: {reason}"))
        return results.replace_boundary(record, verdict)
    finally:
        device.clean()
    record.composed = composed_record(composed)
    _add_predictions(inputs, case, curve, record)
    # Where noise leaves the measured boundary open, the modules can't be shown to add up to it.
    is_open = curve.boundary_is_open(settings.tolerance, [p.positions for p in composed.points])
    agrees = composed.steps <= 1 and not is_open
    summary = (
        f"composed of its modules N_max {interval_in_words(composed.boundary)}, {composed.steps} steps from the measured one;"
        f" {composed.limiting} grows most; T {composed.error:.0%} off in the median"
    )
    outcome = verdict.outcome
    if outcome == "UNDECIDED" and agrees and not _has_measured_baseline(inputs, case):
        outcome = "PASS"
    held = (*verdict.held_to, *(("the sum of its modules",) if agrees else ()))
    return results.replace_boundary(record, Verdict(outcome, (summary, *verdict.reasons), held))


def _add_predictions(inputs: Inputs, case: Case, curve: Curve, record: CaseRecord) -> None:
    """What both predictors say of the model, beside what was measured and composed: told, and held to nothing."""

    def figures_of(part: Case) -> tuple[Figures, Granularity | None]:
        granularity = None if part.module == "dense" else inputs.granularity(part)
        return inputs.figures(part, granularity), granularity

    assert record.composed is not None
    try:
        model = composition.predict(case, curve, inputs.settings.tolerance, figures_of)
    except (RuleUnknown, FileError, *REFUSALS) as reason:
        record.composed["predicted"] = {"reason": str(reason)}
        return
    record.predicted, record.basis = model.predicted.as_dict(), model.predicted.basis
    add_idle(record, model.predicted.n_idle)
    record.composed["predicted"] = {"steps": model.steps, "error": round(model.error, 4)}


def _has_measured_baseline(inputs: Inputs, case: Case) -> bool:
    stored = inputs.baseline(case)
    known = stored.file.cases.get(case.key) if stored and stored.is_exact else None
    return known is not None and known.measured is not None


def _floor_us(inputs: Inputs, case: Case) -> float | None:
    """Microseconds that reading the weights and the KV cache takes at the device's bandwidth; None where it is unknown."""
    try:
        bandwidth = inputs.figures(case, None).bandwidth if case.gpu == "cpu" else catalog.gpu(case.gpu).bandwidth
    except (RuleUnknown, *REFUSALS, Unsupported) as error:
        inputs.say(f"{case.key}: the machine's bandwidth is not known: {error}")
        return None
    return case.bytes_read / bandwidth * 1e6
