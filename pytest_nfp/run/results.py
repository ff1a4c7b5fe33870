"""What came out of a run: the records of its cases, handed on by workers and to the journal."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from pytest_nfp import __version__, catalog
from pytest_nfp.baselines.updates import Updates, is_asked
from pytest_nfp.cases import Case
from pytest_nfp.curves import Curve
from pytest_nfp.principle import Boundary
from pytest_nfp.records import SCHEMA, CaseRecord, Held, Question, Record, merge_case, summarise
from pytest_nfp.records.build import add_curve, add_map, add_prediction, case_record, result_of
from pytest_nfp.records.journal import Past
from pytest_nfp.run.inputs import Inputs, Stored
from pytest_nfp.verdict import NOTHING_KNOWN, Basis, Verdict


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Results:
    """The records of a run's cases, and the baselines that it changes."""

    inputs: Inputs
    updates: Updates
    cases: dict[str, CaseRecord] = field(default_factory=dict)
    """By id, in the order in which they came."""
    past: Past = field(default_factory=Past)
    """What an earlier run measured that this one goes on with."""
    is_partial: bool = False
    """Whether the run ended before its cases did."""
    started: str = field(default_factory=_now)
    _fresh: dict[str, None] = field(default_factory=dict)

    def add(self, record: CaseRecord) -> None:
        """Take over a case's record from a worker or an earlier run."""
        self.cases[record.id] = merge_case(self.cases.get(record.id), record)

    def add_fresh(self, record: CaseRecord) -> None:
        """Take over a record that is handed on: to the journal, and from a worker to the controller."""
        self.add(summarise(record))
        self._fresh[record.id] = None

    def note(
        self,
        case: Case,
        question: Question,
        verdict: Verdict,
        basis: Basis = NOTHING_KNOWN,
        curve: Curve | None = None,
        boundary: Boundary | None = None,
    ) -> Verdict:
        """Keep what a question of a case came to, with what it stood on."""
        record = case_record(case, question, verdict)
        record.baseline = held_baseline(case, self.inputs.baseline(case))
        if basis.predicted is not None:
            add_prediction(record, basis.predicted)
        if basis.granularity is not None:
            add_map(record, case, basis.granularity)
        if curve is not None:
            add_curve(record, curve, boundary)
        self.add_fresh(record)
        return verdict

    def note_interrupted(self, case: Case, basis: Basis, curve: Curve) -> None:
        """Keep a curve that Ctrl-C cut off."""
        self.is_partial = True
        verdict = Verdict("UNDECIDED", ("interrupted while it was measured",))
        curve = replace(curve, counts={**curve.counts, "interrupted": True})
        boundary = curve.boundary(self.inputs.settings.tolerance)
        self.note(case, "boundary", verdict, basis, curve, boundary)

    def replace_boundary(self, record: CaseRecord, verdict: Verdict) -> Verdict:
        """The verdict in the place of the one that the record has of its boundary."""
        record.tests["boundary"] = result_of(verdict)
        summarise(record)
        return verdict

    def resumed(self, case: Case) -> Verdict | None:
        """The verdict that an earlier run came to, if it measured this case to its end."""
        known = self.past.cases.get(case.id)
        if known is None or "boundary" not in known.tests or known.kind != "measured" or not known.curve:
            return None
        if known.counts.get("interrupted"):
            return None
        self.add(known)
        self._fresh[known.id] = None
        return Verdict(known.tests["boundary"].outcome, tuple(known.tests["boundary"].reasons))

    def is_update(self, *, is_stored: bool, verdict: Verdict) -> bool:
        """Whether --nfp-update asks for this case. is_stored: by a baseline of exactly this release."""
        return is_asked(self.inputs.settings.update, is_stored=is_stored, has_failed=verdict.outcome == "FAIL")

    def collected(self) -> dict[str, Any]:
        """What came in since this was last asked, as plain data: for the journal, and from a worker to the controller."""
        cases = [self.cases[i].model_dump(mode="json") for i in self._fresh]
        self._fresh.clear()
        return {
            "machines": self.inputs.machines,
            "cases": cases,
            "updates": self.updates.collected(),
            "partial": self.is_partial,
        }

    def absorb(self, collected: dict[str, Any]) -> None:
        """Take over what a worker collected."""
        self.inputs.machines |= collected["machines"]
        for case in collected["cases"]:
            self.add(CaseRecord.model_validate(case))
        self.updates.absorb(collected["updates"])
        self.is_partial = self.is_partial or collected["partial"]

    def records(self) -> list[Record]:
        """One record for each GPU of the run, its cases in the order they were met."""
        settings = self.inputs.settings
        records = []
        for gpu in dict.fromkeys(c.gpu for c in self.cases.values()):
            machine = self.inputs.machines.get(gpu, {})
            cases = [c for c in self.cases.values() if c.gpu == gpu]
            if gpu != "cpu" and not any(c.kind == "measured" for c in cases):
                machine = {"title": f"{catalog.gpu(gpu).title}: nothing was measured here"}
            records.append(
                Record(
                    schema=SCHEMA,
                    tool=f"pytest-nfp {__version__}",
                    gpu=gpu,
                    started=self.started,
                    partial=self.is_partial,
                    tolerance=settings.tolerance,
                    match_tolerance=settings.match_tolerance,
                    protocol=settings.protocol,
                    seed=settings.seed,
                    machine=machine,
                    cases=cases,
                )
            )
        return records


def held_baseline(case: Case, stored: Stored | None) -> Held | None:
    """What the baseline has of a case, for a report that shows both."""
    if stored is None:
        return None
    tiles, known = stored.file.granularity.get(case.map_key), stored.file.cases.get(case.key)
    if tiles is None and known is None:
        return None
    held = Held(name=stored.name, exact=stored.is_exact)
    if tiles is not None:
        held.kernel, held.tiles, held.choice = tiles.kernel, list(tiles.tiles), tiles.choice
    if known is not None and known.predicted is not None:
        held.predicted = known.predicted.as_dict()
    if known is not None and (m := known.measured) is not None:
        held.kind, held.n_max, held.n_max_interval, held.curve = m.kind, m.n_max, m.interval, list(m.curve)
        held.timer = m.timer
    return held
