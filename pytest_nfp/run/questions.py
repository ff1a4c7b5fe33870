"""The three questions of a case, asked and noted: its map, its prediction, its boundary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pytest_nfp.baselines import BaselineFile, PredictedTerms, measured_of, tiles_of
from pytest_nfp.cases import Case, read_key
from pytest_nfp.curves import Curve
from pytest_nfp.devices.lock import TooLong, time_limit
from pytest_nfp.granularity import Granularity, RuleUnknown
from pytest_nfp.measure.sweep import Interrupted
from pytest_nfp.run.confirmation import confirm
from pytest_nfp.run.inputs import Stored
from pytest_nfp.run.measuring import curve_of, runs_of_baseline
from pytest_nfp.run.results import Results
from pytest_nfp.run.whole_model import judge_model
from pytest_nfp.verdict import (
    NOTHING_KNOWN,
    Basis,
    Evidence,
    Verdict,
    changes_in_words,
    effect_in_words,
    gate_by_boundary,
    judge_boundary,
    judge_granularity,
    judge_prediction,
    prediction_agrees,
)


def check_granularity(results: Results, case: Case) -> Verdict:
    """Does this release still map tokens to the same tiles, through the same kernel?"""
    inputs = results.inputs
    stored = inputs.baseline(case)
    tiles = stored.file.granularity.get(case.map_key) if stored else None
    try:
        predicted, granularity = inputs.predicted(case)
    except RuleUnknown as reason:
        unknown = Verdict("UNDECIDED", (f"the rule is unknown: {reason}",), must_decide=tiles is not None)
        return results.note(case, "granularity", unknown)
    assert granularity is not None
    entry = stored.file.cases.get(case.key) if stored else None
    reach = reach_of(stored.file, case, granularity) if stored else None
    effect = effect_in_words(predicted, entry)
    verdict = judge_granularity(granularity, tiles, stored.name if stored else "", effect, reach)
    if verdict.outcome == "FAIL" and inputs.settings.gate == "boundary" and tiles is not None:
        verdict = gate_by_boundary(verdict, granularity, tiles, predicted, entry)
    verdict = _require_baseline(results, verdict, tiles is not None)
    if results.is_update(is_stored=_is_exact(stored) and tiles is not None, verdict=verdict):
        file = results.updates.file_of(inputs.baseline_gpus(case)[0], case)
        file.granularity[case.map_key] = tiles_of(granularity)
        file.provenance |= {"artifact": granularity.artifact_file, "sha256": granularity.artifact_sha256}
        verdict = Verdict("PASS", ("baseline written",))
    return results.note(case, "granularity", verdict, Basis(predicted, granularity))


def check_prediction(results: Results, case: Case) -> Verdict:
    """Is the predicted N_max what the baseline says?"""
    inputs = results.inputs
    try:
        predicted, granularity = inputs.predicted(case)
    except RuleUnknown as reason:
        return results.note(case, "prediction", Verdict("UNDECIDED", (f"the rule is unknown: {reason}",)))
    stored = inputs.baseline(case)
    entry = stored.file.cases.get(case.key) if stored else None
    changes = []
    if stored and granularity and (tiles := stored.file.granularity.get(case.map_key)):
        changes = changes_in_words(tiles, granularity)
    verdict = judge_prediction(predicted, entry, stored.name if stored else "", changes)
    has_baseline = entry is not None and entry.predicted is not None
    verdict = _require_baseline(results, verdict, has_baseline)
    if results.is_update(is_stored=_is_exact(stored) and has_baseline, verdict=verdict):
        mine = results.updates.case_of(inputs.baseline_gpus(case)[0], case)
        mine.predicted = PredictedTerms.model_validate(predicted.as_dict())
        verdict = Verdict("PASS", ("baseline written",))
    return results.note(case, "prediction", verdict, Basis(predicted, granularity))


def check_boundary(results: Results, case: Case) -> Verdict:
    """Does the curve leave the tolerance where prediction and baseline say? Raises Interrupted."""
    inputs = results.inputs
    basis = NOTHING_KNOWN
    try:
        if case.module != "model":
            basis = Basis(*inputs.predicted(case))
    except RuleUnknown as reason:
        basis = Basis(unknown=f"the rule is unknown: {reason}")
        if inputs.measuring_device(case.gpu) is None:
            return results.note(case, "boundary", Verdict("UNDECIDED", (basis.unknown,)))
    if resumed := results.resumed(case):
        return resumed
    try:
        with time_limit(inputs.settings.case_timeout):
            measured = curve_of(inputs, case, basis.granularity)
    except Interrupted as interrupted:
        results.note_interrupted(case, basis, interrupted.curve)
        raise
    except TooLong as reason:
        return results.note(case, "boundary", Verdict("INVALID", (str(reason),)), basis)
    finally:
        if (device := inputs.measuring_device(case.gpu)) is not None:
            device.clean()
    curve = measured.curve
    if curve is None:
        assert measured.why_not is not None
        return results.note(case, "boundary", measured.why_not, basis)
    if case.module == "model":
        return judge_model(results, case, curve, judge(results, case, curve, basis))
    if not basis.unknown:
        basis = replace(basis, figures=inputs.figures(case, basis.granularity))
    verdict = judge(results, case, curve, basis, partial(confirm, inputs))
    if curve.kind == "measured":
        record = results.cases[case.id]
        inputs.say(f"{case.key} has n_max {record.n_max}, interval {record.n_max_interval}: {verdict.outcome}")
    return verdict


def judge(
    results: Results,
    case: Case,
    curve: Curve,
    basis: Basis,
    confirmed: Callable[[Evidence, Verdict], Verdict] | None = None,
) -> Verdict:
    """Hold a curve to what is known, note the verdict and store what --nfp-update asks for.

    confirmed: what is left of a FAIL when it is looked at once more. Raises Interrupted.
    """
    settings = results.inputs.settings
    boundary = curve.boundary(settings.tolerance)
    if boundary is None:
        verdict = Verdict("INVALID" if curve.invalid else "UNDECIDED", curve.invalid or ("no point was measured",))
        return results.note(case, "boundary", verdict, basis, curve)
    stored = results.inputs.baseline(case)
    # A measured boundary is held to one of the same release alone: another release is what it may differ by.
    known = stored.file.cases.get(case.key) if stored and stored.is_exact else None
    evidence = Evidence(case, curve, boundary, basis, known, settings.match_tolerance)
    verdict = judge_boundary(evidence)
    has_baseline = known is not None and known.measured is not None
    will_be_stored = has_baseline and settings.update == "all"
    if verdict.outcome == "FAIL" and curve.kind == "measured" and confirmed is not None and not will_be_stored:
        try:
            verdict = confirmed(evidence, verdict)
        except Interrupted:  # What the first measurement found is kept.
            results.note_interrupted(case, basis, curve)
            raise
    verdict = _require_baseline(results, verdict, has_baseline)
    verdict = _updated_boundary(results, evidence, verdict, has_baseline)
    if basis.unknown and verdict.outcome == "UNDECIDED":
        verdict = replace(verdict, reasons=(*verdict.reasons, basis.unknown))
    return results.note(case, "boundary", verdict, basis, curve, boundary)


def _updated_boundary(results: Results, evidence: Evidence, verdict: Verdict, has_baseline: bool) -> Verdict:
    """The verdict after --nfp-update: a boundary that is sure is stored where it is asked for."""
    settings, case, curve = results.inputs.settings, evidence.case, evidence.curve
    is_sure = not curve.invalid and not evidence.boundary.undecided
    if settings.update and not is_sure and (not has_baseline or settings.update == "all"):
        refused = f"no baseline was written: {verdict.outcome}, a boundary must be sure before it is stored"
        return replace(verdict, reasons=(*verdict.reasons, refused))
    if not is_sure or not results.is_update(is_stored=has_baseline, verdict=verdict):
        return verdict
    agrees, because = prediction_agrees(evidence)
    runs = runs_of_baseline(results.inputs, case, evidence.basis.granularity, curve, evidence.boundary)
    entry = results.updates.case_of(results.inputs.baseline_gpus(case)[0], case)
    entry.measured = measured_of(curve, evidence.boundary, agrees, because, runs)
    return Verdict("PASS", ("baseline written" + ("" if agrees else f", prediction deviates: {because}"),))


def _require_baseline(results: Results, verdict: Verdict, has_baseline: bool) -> Verdict:
    settings = results.inputs.settings
    if settings.require_baseline and not has_baseline and not settings.update:
        return Verdict("FAIL", (*verdict.reasons, "no baseline, and --nfp-require-baseline asks for one"))
    return verdict


def _is_exact(stored: Stored | None) -> bool:
    return stored is not None and stored.is_exact


def reach_of(file: BaselineFile, case: Case, granularity: Granularity) -> int | None:
    """The row count of the map at which its last measured boundary was decided; None where one of its cases was never measured.

    Rows are b * N tokens of experts, and N of a request for attention, times the group where its heads are packed into them.
    """
    attention, reached = case.subject.attention, []
    for key, entry in file.cases.items():
        named = read_key(key)
        if named is None or (named["module"], named["dtype"], named["top_k"]) != (case.module, case.dtype, case.top_k):
            continue
        if entry.measured is None or entry.measured.interval[1] is None:
            return None
        rows = entry.measured.interval[1] + 1
        if case.module == "attention":
            reached.append(rows * (attention.group if granularity.packed and attention is not None else 1))
        else:
            reached.append(rows * named["batch"])
    return max(reached, default=None)
