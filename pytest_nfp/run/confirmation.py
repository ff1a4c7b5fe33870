"""A FAIL is looked at once more before it stands: the case again, and on a CPU shapes whose curves are known."""

from __future__ import annotations

from dataclasses import replace

from pytest_nfp.cases import Case
from pytest_nfp.run.inputs import Inputs
from pytest_nfp.run.measuring import measured_beside
from pytest_nfp.verdict import Basis, Evidence, Verdict, confirmed, controlled, judge_boundary


def confirm(inputs: Inputs, evidence: Evidence, verdict: Verdict) -> Verdict:
    """What is left of a FAIL. Raises Interrupted."""
    case, figures = evidence.case, evidence.basis.figures
    inputs.say(f"{case.key}: FAIL; measured once more to confirm it")
    curve = measured_beside(inputs, case, evidence.basis.granularity)
    boundary = curve.boundary(inputs.settings.tolerance) if curve is not None else None
    if curve is not None and boundary is not None:
        second = judge_boundary(replace(evidence, curve=curve, boundary=boundary))
        verdict = confirmed(verdict, second, boundary)
    if verdict.outcome == "FAIL" and case.gpu == "cpu" and figures is not None and figures.describes:
        verdict = controlled(verdict, _why_not_as_calibrated(inputs, case))
    return verdict


def _why_not_as_calibrated(inputs: Inputs, case: Case) -> str:
    """Why this machine is not as it was calibrated, by shapes of its calibration that are measured now; "" where it is."""
    from pytest_nfp.calibration import own_cpu

    device = inputs.measuring_device(case.gpu)
    assert device is not None
    for control in own_cpu.controls(device, case):
        inputs.say(f"{case.key}: FAIL; {control.subject.name}, a shape of the calibration, is measured beside it")
        predicted, granularity = inputs.predicted(control)
        curve = measured_beside(inputs, control, granularity)
        boundary = curve.boundary(inputs.settings.tolerance) if curve is not None else None
        if curve is None or boundary is None:
            return f"{control.subject.name} could not be measured"
        basis = Basis(predicted, granularity, inputs.figures(control, granularity))
        evidence = Evidence(control, curve, boundary, basis, None, inputs.settings.match_tolerance)
        verdict = judge_boundary(evidence)
        if verdict.outcome != "PASS":
            return f"{control.subject.name} is {verdict.outcome} too: {verdict.reasons[0]}"
    return ""
