"""Outcome and reasons of one case: granularity and prediction held to the baseline, the boundary to both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pytest_nfp import catalog
from pytest_nfp.baselines import CaseBaseline, Measured, Tiles
from pytest_nfp.cases import Case
from pytest_nfp.comparison import (
    Answer,
    KnownBoundary,
    clocks_apart,
    compare_boundaries,
    compare_intervals,
    compare_maps,
    known_map,
    moved_predictions,
    slack,
)
from pytest_nfp.curves.curve import Curve
from pytest_nfp.granularity import UNKNOWN, Granularity
from pytest_nfp.predict import Figures, Predicted
from pytest_nfp.principle import Boundary
from pytest_nfp.principle.boundary import bracketed

Outcome = Literal["PASS", "FAIL", "UNDECIDED", "INVALID", "UNSUPPORTED", "SKIPPED"]
WIDEST = 8
"""An interval of a calibrated prediction whose end is more than this many times its beginning holds nearly every N_max: nothing is held to it."""
STALE = 1.5
"""A baseline whose T(N0) is this much longer than now was measured on something else, or before an upgrade."""
SEVERITY: tuple[Outcome, ...] = ("FAIL", "INVALID", "UNDECIDED", "UNSUPPORTED", "PASS", "SKIPPED")


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome with its reasons in words.

    held_to: what a boundary was held to and agreed with; a certificate needs something. must_decide: the baseline knew what is
    UNDECIDED now, so that a gate does not pass it over.
    """

    outcome: Outcome
    reasons: tuple[str, ...] = ()
    held_to: tuple[str, ...] = ()
    must_decide: bool = False


def worst(outcomes: list[Outcome]) -> Outcome:
    """The outcome that stands for several: a failure before anything, skipped only if all are."""
    return min(outcomes, key=SEVERITY.index, default="SKIPPED")


def changes_in_words(before: Tiles, after: Granularity) -> list[str]:
    """ "33..96 tokens: 16 to 32 rows" for every range that changed; nothing where it can't be told."""
    unit = "packed query rows" if after.packed else "query rows" if after.module == "attention" else "tokens"
    found = compare_maps(before.known(), known_map(after))
    return [f"{first}..{last} {unit}: {old} to {new} rows" for first, last, old, new in found.tiles]


def judge_granularity(
    granularity: Granularity, baseline: Tiles | None, baseline_name: str, effect: str, reach: int | None = None
) -> Verdict:
    """The map must be the baseline's, tile for tile, through the same kernel. A kernel that is unknown is UNDECIDED.

    effect: what a change does to N_max, said beside it. reach: the row count up to which the measured boundary of the
    baseline was decided, if there is one: tiles that change beyond it can't move that boundary, which is a warning.
    """
    if baseline is None and granularity.kernel == UNKNOWN:
        return Verdict("UNDECIDED", (f"which kernel runs is unknown: {granularity.kernel_reason}",))
    if baseline is None:
        return Verdict("PASS", ("no baseline for this map: nothing is held to it (--nfp-update=missing stores it)",))
    found = compare_maps(baseline.known(), known_map(granularity))
    if found.unknown:
        why = f"granularity can't be held to {baseline_name}: {found.unknown}"
        return Verdict("UNDECIDED", (why,), must_decide=baseline.kernel != UNKNOWN)
    changes = changes_in_words(baseline, granularity)
    if found.kernel is not None:
        changes.append(f"kernel: {found.kernel[0]} to {found.kernel[1]}")
    first_changed = min((c[0] for c in found.tiles), default=None)
    if changes and reach is not None and first_changed is not None and first_changed > reach:
        past = f"past the measured boundary of {baseline_name}, which was decided by {reach} rows"
        return Verdict("PASS", (f"warning: granularity changed {past}: {'; '.join(changes)}",))
    if changes:
        return Verdict("FAIL", (f"granularity changed against {baseline_name}: {'; '.join(changes)}; {effect}",))
    notes = []
    now = ", ".join(dict.fromkeys(r.source for r in granularity.ranges))
    if now != baseline.source:
        notes.append(f"same tiles from another source: {baseline.source} in {baseline_name}, {now} now")
    digest = granularity.parameters_digest
    if baseline.parameters is not None and digest is not None and digest != baseline.parameters:
        notes.append(
            f"warning: same tiles, but other tile parameters (such as BLOCK_SIZE_N) than in {baseline_name}: a faster T(N0)"
            " alone can shrink N_max, so measure again (nfp diff tells which)"
        )
    return Verdict("PASS", tuple(notes))


def gate_by_boundary(
    verdict: Verdict, granularity: Granularity, baseline: Tiles, predicted: Predicted, case: CaseBaseline | None
) -> Verdict:
    """A failure by changed tiles as a warning, where neither the kernel nor a predicted N_max of the case moved."""
    is_other = compare_maps(baseline.known(), known_map(granularity)).kernel is not None
    if is_other or case is None or case.predicted is None:
        return verdict
    before = case.predicted.as_dict()
    now = predicted.as_dict()
    if now.keys() != before.keys() or moved_predictions(before, now):
        return verdict
    return Verdict("PASS", tuple(f"warning, as it moves no predicted boundary: {r}" for r in verdict.reasons))


def effect_in_words(predicted: Predicted, baseline: CaseBaseline | None) -> str:
    """ "N_max 64 to 32 by the principle (branch), 176 to 512 by the tile roofline"."""
    if baseline is None or baseline.predicted is None:
        said = [f"{term_in_words(t)} by the {p.replace('_', ' ')}" for p, t in predicted.as_dict().items()]
        return f"N_max is {', '.join(said[:1])}"
    parts = []
    now, before = predicted.as_dict(), baseline.predicted.as_dict()
    for predictor, term in now.items():
        old, new = (term_in_words(t) if t else "unknown" for t in (before.get(predictor), term))
        change = f"{old} to {new}" if old != new else f"stays {new}"
        parts.append(f"{change} by the {predictor.replace('_', ' ')} ({term['limiting']} limits)")
    return "N_max " + ", ".join(parts)


def judge_prediction(
    predicted: Predicted, baseline: CaseBaseline | None, baseline_name: str, changes: list[str]
) -> Verdict:
    """Both predictors must give what the baseline says. changes: the tile changes behind a difference, in words."""
    if baseline is None or baseline.predicted is None:
        return Verdict("PASS", ("no baseline for this case: nothing is held to it (--nfp-update=missing stores it)",))
    now, before = predicted.as_dict(), baseline.predicted.as_dict()
    if now == before:
        return Verdict("PASS")
    cause = f" because of {'; '.join(changes)}" if changes else ""
    changed = f"against {baseline_name}: {effect_in_words(predicted, baseline)}{cause}"
    same_terms = now.keys() == before.keys() and all(before[p]["limiting"] == t["limiting"] for p, t in now.items())
    if same_terms and not moved_predictions(before, now):
        return Verdict("PASS", (f"warning: the prediction changed within its interval {changed}",))
    return Verdict("FAIL", (f"prediction changed {changed}",))


def term_in_words(term: Mapping[str, Any]) -> str:
    """ "256", "256 [192, 319]", "128 (not near-free at N0: the bound is 32)"."""
    if term.get("bound") is not None:
        return f"{term['n_max']} (not near-free at N0: the bound is {term['bound']})"
    interval = term.get("interval")
    if interval is None or interval[0] == interval[1]:
        return f"{term['n_max']}"
    return f"{term['n_max']} {bracketed(interval)}"


@dataclass(frozen=True, slots=True)
class Expected:
    """What a boundary is held to: a predictor's N_max, and the interval [low, high] of it (high None: at least)."""

    predictor: str
    n_max: int
    low: int
    high: int | None

    @property
    def is_wide(self) -> bool:
        """Whether the interval is too wide to decide anything."""
        return self.high is None or self.high + 1 > WIDEST * self.low

    def __str__(self) -> str:
        interval = "" if self.low == self.high else f" {bracketed((self.low, self.high))}"
        return f"{self.predictor} {self.n_max}{interval}"


def held_to(case: Case, predicted: Predicted, figures: Figures | None, curve: Curve) -> Expected | None:
    """The tile roofline where it is calibrated, else the closed form; None where neither says anything.

    Each with its interval: of a calibration from held-out shapes, of the closed form from what datasheet predictions were off by
    on recorded curves; only the granularity that a user's own test gives is taken at its word. A recorded curve is held to the closed form: GPU calibrations were fitted on such curves, so agreeing would prove
    nothing. So is a GPU whose calibration was carried over from another one, which nothing has proven.
    """
    roofline, principle = predicted.tile_roofline, None
    if predicted.principle is not None:
        n = predicted.principle.n_max
        principle = Expected("principle", n, n, n) if case.module == "own" else _with_datasheet_errors(case, n)
    if figures is None or figures.basis == "datasheet" or roofline is None:
        return principle
    if figures.kernel is not None and (curve.kind == "recorded" or not figures.is_proven):
        return principle
    if predicted.is_interval:
        return Expected("tile roofline", roofline.n_max, *roofline.boundary.n_max_interval)
    return Expected("tile roofline", roofline.n_max, roofline.n_max, roofline.n_max)


def _with_datasheet_errors(case: Case, n: int) -> Expected:
    """The principle's N_max with the interval that 95% of recorded curves lie in; open where nothing is recorded of the module."""
    spread = catalog.datasheet_spread(case.module, case.backend.framework)
    if spread is None:
        return Expected("principle", n, 1, None)
    few, many = spread
    return Expected("principle", n, max(1, math.floor(n * min(1.0, few))), math.ceil(n * max(1.0, many)))


def agreement(
    case: Case, curve: Curve, boundary: Boundary, low: int, high: int | None, match_tolerance: float
) -> Answer:
    """Hold a boundary to an expected interval within the match tolerance."""
    known = known_boundary(curve, boundary)
    return compare_intervals(
        (low, high), known.interval, known.positions, case.granule, match_tolerance, is_noisy=known.is_noisy
    )


def known_boundary(curve: Curve, boundary: Boundary) -> KnownBoundary:
    """A curve's boundary as it is compared."""
    return KnownBoundary(
        boundary.n_max,
        boundary.n_max_interval,
        "recorded" if curve.kind == "recorded" else "measured",
        curve.timer,
        tuple(p.positions for p in curve.points),
        any(n > boundary.n_max_interval[0] for n in boundary.undecided),
    )


@dataclass(frozen=True, slots=True)
class Basis:
    """What is known of a case before it is measured."""

    predicted: Predicted | None = None
    """None for a whole model, for a user's own forward without a granularity, and where the rule is unknown."""
    granularity: Granularity | None = None
    figures: Figures | None = None
    """None where nothing is known of the device."""
    unknown: str = ""
    """Why there is no prediction, for where nothing else can be held against the curve."""


NOTHING_KNOWN = Basis()


@dataclass(frozen=True, slots=True)
class Evidence:
    """A curve's boundary, and all that it is held to."""

    case: Case
    curve: Curve
    boundary: Boundary
    basis: Basis = NOTHING_KNOWN
    baseline: CaseBaseline | None = None
    match_tolerance: float = 0.15
    """Share by which two N_max may differ and be the same."""

    @property
    def stored(self) -> Measured | None:
        """The stored boundary."""
        return self.baseline.measured if self.baseline is not None else None


def judge_boundary(evidence: Evidence) -> Verdict:
    """Hold a curve's boundary to the prediction and to the stored boundary; the worse of the two is the outcome."""
    curve, boundary, stored = evidence.curve, evidence.boundary, evidence.stored
    if curve.invalid:
        return Verdict("INVALID", curve.invalid)
    verdicts = [_against_prediction(evidence)]
    if stored is not None:
        verdicts.append(_against_baseline(evidence, stored))
    outcomes = [v.outcome for v in verdicts if v is not None]
    reasons = [r for v in verdicts if v is not None for r in v.reasons]
    if stored is None:
        reasons.append("there is no baseline for this boundary (--nfp-update=missing stores one)")
    if not outcomes:
        outcomes = ["UNDECIDED"]
        reasons.append(f"{curve.kind} N_max {interval_in_words(boundary)} is held to nothing")
    if _is_capped(boundary, curve) and (stored is None or stored.n_max != boundary.n_max):
        outcomes.append("UNSUPPORTED")
    if boundary.has_hole:
        reasons.append(
            f"the curve has a hole: it leaves {boundary.n_first_exit} and is back within tolerance up to {boundary.n_max}"
        )
    reasons += [f"N={n} unsupported: {why}" for n, why in curve.unsupported.items()]
    # A prediction that is known not to describe the kernel is said, and is nothing that the boundary agrees with.
    held = [*(["prediction"] if verdicts[0] == Verdict("PASS") else []), *(["baseline"] if stored is not None else [])]
    return Verdict(worst(outcomes), tuple(reasons), tuple(held))


def prediction_agrees(evidence: Evidence) -> tuple[bool, str]:
    """Whether a boundary is what is predicted, and why it is not. True where nothing is predicted."""
    case, curve, boundary, basis = evidence.case, evidence.curve, evidence.boundary, evidence.basis
    expected = held_to(case, basis.predicted, basis.figures, curve) if basis.predicted is not None else None
    if expected is None:
        return True, ""
    # An interval that decides nothing agrees with everything: what is asked is whether the prediction itself does.
    low, high = (expected.n_max, expected.n_max) if expected.is_wide else (expected.low, expected.high)
    agrees = agreement(case, curve, boundary, low, high, evidence.match_tolerance) == "same"
    cause = basis.figures.cause if basis.figures is not None else ""
    return agrees, cause or explain(case, curve, boundary, expected.n_max, basis.granularity)


def confirmed(first: Verdict, second: Verdict, boundary: Boundary) -> Verdict:
    """A FAIL that a second measurement repeats; UNDECIDED where it does not, since then the machine has changed, not N_max.

    boundary: of the second measurement.
    """
    n_max = f"measured once more, N_max is {interval_in_words(boundary)}"
    if second.outcome == "FAIL":
        return replace(first, reasons=(*first.reasons, f"{n_max}: confirmed"))
    why = second.reasons[0] if second.outcome == "INVALID" else "this machine has several states"
    return Verdict("UNDECIDED", (f"not confirmed: {n_max}, which does not fail ({why})", *first.reasons))


def controlled(verdict: Verdict, moved: str) -> Verdict:
    """A FAIL against a machine's own calibration stands where the shapes of the calibration are still met.

    moved: why they are not; "" where they are.
    """
    if not moved:
        return replace(verdict, reasons=(*verdict.reasons, "shapes of the calibration are met beside it"))
    said = f"this machine is not as it was calibrated: {moved}; wait until it is quiet, or delete the calibration that nfp calibrate names"
    return Verdict("UNDECIDED", (said, *verdict.reasons))


def _is_capped(boundary: Boundary, curve: Curve) -> bool:
    """Whether the kernel refuses to go on past N_max: nothing that was measured lies between."""
    refused = [n for n in boundary.refused if n > boundary.n_max]
    measured = [p.positions for p in curve.points if p.positions > boundary.n_max]
    return bool(refused) and min(refused) < min(measured, default=math.inf)


def _against_prediction(evidence: Evidence) -> Verdict | None:
    """The boundary against the predictor that counts here; None where nothing can be held to one."""
    case, curve, boundary, stored = evidence.case, evidence.curve, evidence.boundary, evidence.stored
    predicted, figures, granularity = evidence.basis.predicted, evidence.basis.figures, evidence.basis.granularity
    if predicted is None:
        return None
    expected = held_to(case, predicted, figures, curve)
    if expected is None:
        return None
    predictor, n = expected.predictor, expected.n_max
    if _is_capped(boundary, curve):
        # Where the kernel refuses to go on, its latency says no more than: at least so far.
        boundary = replace(boundary, n_max_interval=(boundary.n_max_interval[0], None))
    said = f"{curve.kind} N_max {interval_in_words(boundary)}, {expected}"
    found = agreement(case, curve, boundary, expected.low, expected.high, evidence.match_tolerance)
    if expected.is_wide and (figures is None or figures.describes):
        why = f"{said}: not held to it, {_why_wide(case, expected, figures)}"
        if stored is not None and stored.prediction == "deviates":
            why += f"; it deviates, as the baseline says: {stored.because}"
        return Verdict("PASS" if stored is not None else "UNDECIDED", (why,))
    if stored is not None and stored.prediction == "deviates":
        if found == "same":
            gone = f"they agree, but the baseline says the prediction deviates ({stored.because}); update it"
            return Verdict("FAIL", (f"{said}: {gone}",))
        outcome: Outcome = "PASS" if found == "moved" else "UNDECIDED"
        return Verdict(outcome, (f"{said}: deviates, as the baseline says: {stored.because}",))
    if figures is not None and not figures.describes:
        why = f"{said}: not held to it, the {predictor} does not describe this kernel ({figures.cause})"
        if stored is not None:
            return Verdict("PASS", (why,))
        return Verdict("UNDECIDED", (why,))
    if found == "same":
        return Verdict("PASS")
    if found == "moved":
        return Verdict("FAIL", (f"{said}: they differ. {explain(case, curve, boundary, n, granularity)}",))
    return Verdict("UNDECIDED", (f"{said}: noise leaves N = {', '.join(map(str, boundary.undecided))} open",))


def _why_wide(case: Case, expected: Expected, figures: Figures | None) -> str:
    """Why an interval is too wide to decide anything, with the error that it comes from."""
    if expected.predictor == "principle":
        spread = catalog.datasheet_spread(case.module, case.backend.framework)
        if spread is None:
            return f"no recorded curve tells how far the principle is off for {case.module}"
        said = "95% of recorded N_max are {0:g} to {1:g} times the principle's"
    else:
        assert figures is not None
        spread = figures.spread or (1.0, 1.0)
        said = "on shapes that were held out the predicted T(N)/T(N0) was {0:g} to {1:g} of the measured one"
    return f"the interval is wider than {WIDEST} times its beginning ({said.format(*spread)})"


def _against_baseline(evidence: Evidence, stored: Measured) -> Verdict:
    """The boundary against the stored one, both ways."""
    case, curve, boundary = evidence.case, evidence.curve, evidence.boundary
    match_tolerance = evidence.match_tolerance
    before, after = stored.known(), known_boundary(curve, boundary)
    if apart := clocks_apart(before, after):
        again = f"measure with --nfp-timer={stored.timer}, or " if stored.timer else ""
        return Verdict("UNDECIDED", (f"not held to the baseline's N_max, {apart} ({again}update the baseline)",))
    found = compare_boundaries(before, after, case.granule, match_tolerance).answer
    was, base = dict(stored.curve), curve.baseline_positions
    now = {p.positions: p.latency_us for p in curve.points}
    if len({n for n, _ in stored.runs}) > 1:
        seen = sorted({n for n, _ in stored.runs})
        wide = slack(seen[-1], after.positions, case.granule, match_tolerance)
        if seen[-1] - seen[0] > wide and seen[0] - wide <= boundary.n_max <= seen[-1] + wide:
            several = f"the baseline's own runs gave N_max {', '.join(map(str, seen))}: this machine has several states"
            return Verdict("UNDECIDED", (several,))
    if found == "same":
        if base in was and was[base] > STALE * now[base]:
            stale = f"warning: T(N0) was {was[base]:.1f} us in the baseline and is {now[base]:.1f} us now: update it"
            return Verdict("PASS", (stale,))
        return Verdict("PASS")
    if found == "undecided":
        return Verdict("UNDECIDED", ("noise is too large to tell whether N_max is the baseline's",))
    way = "shrank" if boundary.n_max < stored.n_max else "grew"
    reasons = [f"N_max {way} against the baseline: {stored.n_max} to {interval_in_words(boundary)}"]
    if way == "shrank" and base in was and now[base] < 0.9 * was[base]:
        reasons.append(f"T(N0) fell from {was[base]:.1f} to {now[base]:.1f} us: a speed-up alone shrinks N_max")
    return Verdict("FAIL", tuple(reasons))


def interval_in_words(boundary: Boundary) -> str:
    """ "256", "256 to 319", "at least 64"."""
    low, high = boundary.n_max_interval
    if high is None:
        return f"at least {low}"
    return str(low) if low == high else f"{low} to {high}"


def explain(case: Case, curve: Curve, boundary: Boundary, predicted: int, granularity: Granularity | None) -> str:
    """The cause of a difference as far as the curve and the map show it."""
    points = {p.positions: p.latency_us for p in curve.points}
    base = points[curve.baseline_positions]
    n_max = boundary.n_max
    if switch := kernel_switch(curve, n_max):
        return switch
    if granularity is not None and case.module == "moe" and curve.kind == "recorded" and not _is_triton(curve.kernel):
        return f"What ran is {curve.kernel}; the tile rule describes the Triton path."
    if n_max > predicted:
        causes = []
        if granularity is not None and case.module == "moe":
            switches = [m for m in granularity.edges() if predicted <= m // case.batch < n_max]
            causes = [f"{granularity.tile(m)} to {granularity.tile(m + 1)} rows at M={m}" for m in switches]
        if causes:
            return f"The closed form ends where the tile switches; the curve is within tolerance past {', '.join(causes)}: these switches are free here."
        return f"The curve is within tolerance past the predicted boundary: T({n_max}) is {points[n_max] / base:.2f} T(N0)."
    after = min((n for n in points if n > n_max), default=None)
    if after is None:
        return "The curve ends before the prediction."
    step = points[after] / points[n_max]
    what = f"T grows {step:.2f}x from N={n_max} to {after}, to {points[after] / base:.2f} T(N0)"
    if step > 1.15 and after == n_max + 1:
        return f"{what}: one more position, so the library switches kernels there."
    if case.gemm is not None and case.gpu != "cpu":
        n, k = case.gemm
        gpu = catalog.gpu(case.gpu)
        compute_us = 2 * after * case.batch * n * k / gpu.peak_flops * 1e6
        bytes_us = case.bytes_per_element * n * k / gpu.bandwidth * 1e6
        return (
            f"{what}: at N={after} the datasheet floors are {compute_us:.1f} us of compute and {bytes_us:.1f} us of weight"
            f" bytes, {curve.kind} are {points[after]:.1f} us, so the kernel leaves its roofline before the balance point."
        )
    return f"{what}, before the predicted boundary."


def kernel_switch(curve: Curve, n_max: int) -> str:
    """The change of kernel by which the curve leaves the tolerance; empty where the same kernel runs on, or none is known."""
    after = min((n for n in curve.kernels if n > n_max), default=None)
    if after is None or n_max not in curve.kernels or curve.kernels[after] == curve.kernels[n_max]:
        return ""
    return f"The kernel changes at N={after}: {curve.kernels[n_max]} to {curve.kernels[after]}."


def _is_triton(kernel: str) -> bool:
    # vLLM's older tables call the Triton path vllm_fused_moe.
    return "triton" in kernel or kernel == "vllm_fused_moe"
