"""Judge one curve by itself, or two records against each other, without a pytest run.

The result is an outcome and its reasons.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pytest_nfp.comparison import compare_boundaries, compare_maps
from pytest_nfp.curves.formats import Table
from pytest_nfp.curves.statistics import differs
from pytest_nfp.measure import trust
from pytest_nfp.principle import Boundary
from pytest_nfp.principle.boundary import TOLERANCE
from pytest_nfp.principle.plateaus import Plateau, cliffs, plateaus
from pytest_nfp.records import CaseRecord, Record, identity_changes, is_trusted, key_of, known_boundary, known_map
from pytest_nfp.verdict import STALE, Outcome, interval_in_words, kernel_switch, worst

EXIT: dict[Outcome, int] = {"PASS": 0, "UNSUPPORTED": 0, "SKIPPED": 0, "FAIL": 1, "INVALID": 1, "UNDECIDED": 3}


@dataclass(frozen=True, slots=True)
class Judged:
    """The judgement of one curve."""

    boundary: Boundary | None
    """N_max, its interval and the first exit; None where no N_max is claimed."""
    plateaus: tuple[Plateau, ...]
    """Ranges of N with their latency in microseconds."""
    outcome: Outcome
    """PASS, UNDECIDED, UNSUPPORTED, INVALID or FAIL, as `judge_curve` describes them."""
    reasons: tuple[str, ...]
    """One text a reason, such as a cliff or an N that noise leaves open."""

    def as_dict(self) -> dict[str, Any]:
        """The JSON of nfp judge."""
        boundary = self.boundary
        return {
            "n_max": boundary and boundary.n_max,
            "n_max_interval": boundary and list(boundary.n_max_interval),
            "n_first_exit": boundary and boundary.n_first_exit,
            "plateaus": [[p.first, p.last, round(p.latency_us, 3)] for p in self.plateaus],
            "outcome": self.outcome,
            "reasons": list(self.reasons),
        }


def judge_curve(table: Table, tolerance: float = TOLERANCE, expect: int | None = None) -> Judged:
    """N_max of a curve from any source.

    PASS: N_max is known as far as the measured N allow.
    UNDECIDED: noise leaves N_max open, or its interval may lie below `expect`.
    UNSUPPORTED: the kernel refuses larger N.
    INVALID: no N_max is claimed.
    FAIL: N_max is below `expect`.
    """
    curve = table.curve
    levels = tuple(plateaus(curve.points))
    invalid = [
        r
        for r in (
            *curve.invalid,
            trust.graph_modes(curve.modes),
            trust.does_not_depend(curve.points, curve.baseline_positions),
        )
        if r
    ]
    if invalid:
        return Judged(None, levels, "INVALID", tuple(invalid))
    boundary = curve.boundary(tolerance)
    assert boundary is not None  # read_curve refuses a file without T(N0)
    low, high = boundary.n_max_interval
    reasons, outcomes = [], ["PASS"]
    if boundary.undecided and any(low < n for n in boundary.undecided):
        outcomes.append("UNDECIDED")
        reasons.append(f"noise leaves N = {', '.join(str(n) for n in boundary.undecided if n > low)} open")
    elif high is None:
        reasons.append(f"the curve ends within the tolerance: N_max is at least {low}")
    elif high > low:
        reasons.append(f"N_max is {low} to {high}: what lies between was not measured")
    if boundary.has_hole:
        reasons.append(
            f"the curve leaves the tolerance after {boundary.n_first_exit} and is back within it up to {boundary.n_max}"
        )
    if switch := kernel_switch(curve, boundary.n_max):
        reasons.append(f"{switch} That is another kernel's latency, not bandwidth or padding of the first.")
    for n, following, growth in cliffs(curve.points):
        reasons.append(f"cliff at N={following}: {growth:.2f}x T({n})")
    for n in boundary.refused:
        reasons.append(f"N={n} unsupported: {curve.unsupported[n]}")
    if boundary.refused and (high == low) and any(n == low + 1 for n in boundary.refused):
        outcomes.append("UNSUPPORTED")
        reasons.append(f"N_max is capped at {low} by what the kernel refuses, not by its latency")
    reasons += _host(table, tolerance) + _throughput(table)
    if expect is not None:
        if high is not None and high < expect:
            outcomes.append("FAIL")
            reasons.append(f"N_max {interval_in_words(boundary)} is below the expected {expect}")
        elif low < expect and "UNDECIDED" not in outcomes:
            outcomes.append("UNDECIDED")
            reasons.append(f"N_max {interval_in_words(boundary)} may be below the expected {expect}")
    return Judged(boundary, levels, _worst(outcomes), tuple(reasons))


def _worst(outcomes: list[str]) -> Outcome:
    return worst(outcomes)  # type: ignore[arg-type]  # every text above is an Outcome


def _host(table: Table, tolerance: float) -> list[str]:
    """N_max of a whole step, which is device time plus host time. Empty where the table gives no host time."""
    if not table.host_us:
        return []
    points = [
        replace(p, latency_us=p.latency_us + table.host_us[p.positions], ratio=None, ratio_low=None, ratio_high=None)
        for p in table.curve.points
        if p.positions in table.host_us
    ]
    step = replace(table.curve, points=tuple(points)).boundary(tolerance)
    if step is None:
        return ["host time is given, but not at N0: N_max is of device time alone"]
    return [f"N_max is of device time; with the host's time a step has N_max {interval_in_words(step)}"]


def _throughput(table: Table) -> list[str]:
    """Which N has the highest throughput, in tokens per second. Empty where the table gives no throughput."""
    rates = table.throughput
    base = table.curve.baseline_positions
    if base not in rates or len(rates) < 2:
        return []
    best = max(rates, key=lambda n: rates[n])
    if best == base:
        return [
            f"by throughput no N pays: off, at N={base}, gives {rates[base]:g} tokens/s, the best of the others less"
        ]
    return [f"by throughput N={best} is best: {rates[best]:g} tokens/s against {rates[base]:g} at N={base}"]


@dataclass(frozen=True, slots=True)
class Compared:
    """One case of two records."""

    name: str
    """GPU, framework, subject and workload."""
    outcome: Outcome
    """PASS: N_max stays. FAIL: it moved. UNDECIDED: the curves don't tell."""
    reasons: tuple[str, ...]
    """What changed, or why nothing can be told."""
    before: CaseRecord | None
    """The case in the older record; None where that record has no curve of it."""
    after: CaseRecord | None
    """The case in the newer record; None where that record has no curve of it."""


def compare_records(before: Record, after: Record) -> tuple[list[Compared], list[str]]:
    """The cases of two records compared, and notes on how their machines and tolerances differ.

    Cases match by GPU, framework, subject and workload. The release may differ, as an upgrade changes it.
    Machines are compared by their identity alone. Figures that jitter (clock, load) are recorded and not compared.
    """
    old, new = ({key_of(c): c for c in r.cases if c.curve} for r in (before, after))
    compared_cases = []
    for key in [*old, *(k for k in new if k not in old)]:
        compared_cases.append(_compare(key, old.get(key), new.get(key), before, after))
    notes = [f"{n}: {was} to {now}" for n, was, now in identity_changes(before.machine, after.machine)]
    if before.tolerance != after.tolerance:
        notes.append(f"tolerance: {before.tolerance:g} to {after.tolerance:g}")
    return compared_cases, notes


def _compare(name: str, old: CaseRecord | None, new: CaseRecord | None, before: Record, after: Record) -> Compared:
    if old is None or new is None:
        missing = "before" if old is None else "after"
        return Compared(name, "UNDECIDED", (f"there is no curve {missing}",), old, new)
    for case, when in ((old, "before"), (new, "after")):
        if not is_trusted(case) or case.n_max_interval is None:
            return Compared(
                name, "UNDECIDED", (f"the curve {when} is not to be trusted: {'; '.join(case.reasons)}",), old, new
            )
    was, now = known_boundary(old, before.tolerance), known_boundary(new, after.tolerance)
    assert was is not None and now is not None
    boundaries = compare_boundaries(was, now, new.baseline_positions or 1, after.match_tolerance)
    reasons = _latency(old, new) if boundaries.answer != "undecided" else [boundaries.why]
    outcome: Outcome = "PASS"
    if boundaries.answer == "moved":
        outcome = "FAIL"
        direction = "shrank" if now.n_max < was.n_max else "grew"
        reasons.insert(0, f"N_max {direction}: {was.n_max} to {now.n_max}")
        if direction == "shrank" and _base(new) < 0.9 * _base(old):
            reasons.insert(1, "a speed-up of T(N0) alone shrinks N_max")
    elif boundaries.answer == "undecided":
        outcome = "UNDECIDED"
    maps = known_map(old), known_map(new)
    if maps[0] is not None and maps[1] is not None and (unknown := compare_maps(maps[0], maps[1]).unknown):
        reasons.append(f"granularity is undecided: {unknown}")
    if old.kernel != new.kernel:
        reasons.append(f"kernel: {old.kernel} to {new.kernel}")
    return Compared(name, outcome, tuple(reasons), old, new)


def _base(case: CaseRecord) -> float:
    return dict(case.curve)[case.baseline_positions or 1]


def _latency(old: CaseRecord, new: CaseRecord) -> list[str]:
    """How T(N0) changed: by a rank test where both records hold samples of it, else by the two latencies alone."""
    was, now = _base(old), _base(new)
    base = new.baseline_positions or 1
    share = now / was - 1
    note = ""
    if base in old.samples and base in new.samples:
        try:
            if not differs(old.samples[base], new.samples[base]):
                return []
            return [f"T(N0) changed by {share:+.1%}: {was:.1f} to {now:.1f} us (rank test)"]
        except ImportError:
            note = "; both records hold samples: a rank test of them needs scipy, pip install 'pytest-nfp[stats]'"
    if was > STALE * now:
        return [f"warning: T(N0) was {was:.1f} us and is {now:.1f} us: the older record is far slower than now"]
    return [f"T(N0) {was:.1f} to {now:.1f} us ({share:+.1%}){note}"] if abs(share) > 0.05 else []
