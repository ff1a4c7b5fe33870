"""Judge a curve by itself, or two records against each other: outcome and reasons, without a pytest run."""

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
    """What a curve says. n_max and its readings are None where no N_max is claimed."""

    boundary: Boundary | None
    plateaus: tuple[Plateau, ...]
    outcome: Outcome
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The command's JSON."""
        b = self.boundary
        return {
            "n_max": b and b.n_max,
            "n_max_interval": b and list(b.n_max_interval),
            "n_first_exit": b and b.n_first_exit,
            "plateaus": [[p.first, p.last, round(p.latency_us, 3)] for p in self.plateaus],
            "outcome": self.outcome,
            "reasons": list(self.reasons),
        }


def judge_curve(table: Table, tolerance: float = TOLERANCE, expect: int | None = None) -> Judged:
    """N_max of a curve from anywhere.

    PASS: known as far as the measured N allow. UNDECIDED: noise leaves it open. UNSUPPORTED: the kernel refuses to go
    on. INVALID: no N_max is claimed. FAIL: below `expect`.
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
    b = curve.boundary(tolerance)
    assert b is not None  # read_curve refuses a file without T(N0)
    low, high = b.n_max_interval
    reasons, outcomes = [], ["PASS"]
    if b.undecided and any(low < n for n in b.undecided):
        outcomes.append("UNDECIDED")
        reasons.append(f"noise leaves N = {', '.join(str(n) for n in b.undecided if n > low)} open")
    elif high is None:
        reasons.append(f"the curve ends within the tolerance: N_max is at least {low}")
    elif high > low:
        reasons.append(f"N_max is {low} to {high}: what lies between was not measured")
    if b.has_hole:
        reasons.append(f"the curve leaves the tolerance after {b.n_first_exit} and is back within it up to {b.n_max}")
    if switch := kernel_switch(curve, b.n_max):
        reasons.append(f"{switch} That is another kernel's latency, not bandwidth or padding of the first.")
    for n, following, growth in cliffs(curve.points):
        reasons.append(f"cliff at N={following}: {growth:.2f}x T({n})")
    for n in b.refused:
        reasons.append(f"N={n} unsupported: {curve.unsupported[n]}")
    if b.refused and (high == low) and any(n == low + 1 for n in b.refused):
        outcomes.append("UNSUPPORTED")
        reasons.append(f"N_max is capped at {low} by what the kernel refuses, not by its latency")
    reasons += _host(table, tolerance) + _throughput(table)
    if expect is not None:
        if high is not None and high < expect:
            outcomes.append("FAIL")
            reasons.append(f"N_max {interval_in_words(b)} is below the expected {expect}")
        elif low < expect and "UNDECIDED" not in outcomes:
            outcomes.append("UNDECIDED")
            reasons.append(f"N_max {interval_in_words(b)} may be below the expected {expect}")
    return Judged(b, levels, _worst(outcomes), tuple(reasons))


def _worst(outcomes: list[str]) -> Outcome:
    return worst(outcomes)  # type: ignore[arg-type]  # every text above is an Outcome


def _host(table: Table, tolerance: float) -> list[str]:
    """Device and host time apart: what a step costs is both."""
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
    """What pays: tokens per second decide, not the latency of a forward."""
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
    outcome: Outcome
    reasons: tuple[str, ...]
    before: CaseRecord | None
    after: CaseRecord | None


def compare_records(before: Record, after: Record) -> tuple[list[Compared], list[str]]:
    """Cases of two records side by side, and what differs between their machines.

    Cases match by GPU, framework, subject and workload: the release may differ, as it is what an upgrade changes.
    Machines are compared by their identity alone; what jitters (clock, load) is recorded and not compared.
    """
    old, new = ({key_of(c): c for c in r.cases if c.curve} for r in (before, after))
    found = []
    for key in [*old, *(k for k in new if k not in old)]:
        found.append(_compare(key, old.get(key), new.get(key), before, after))
    notes = [f"{n}: {was} to {now}" for n, was, now in identity_changes(before.machine, after.machine)]
    if before.tolerance != after.tolerance:
        notes.append(f"tolerance: {before.tolerance:g} to {after.tolerance:g}")
    return found, notes


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
    found = compare_boundaries(was, now, new.baseline_positions or 1, after.match_tolerance)
    reasons = _latency(old, new) if found.answer != "undecided" else [found.why]
    outcome: Outcome = "PASS"
    if found.answer == "moved":
        outcome = "FAIL"
        way = "shrank" if now.n_max < was.n_max else "grew"
        reasons.insert(0, f"N_max {way}: {was.n_max} to {now.n_max}")
        if way == "shrank" and _base(new) < 0.9 * _base(old):
            reasons.insert(1, "a speed-up of T(N0) alone shrinks N_max")
    elif found.answer == "undecided":
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
    """How T(N0) moved: by a rank test where both records hold samples, else by the figure alone."""
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
