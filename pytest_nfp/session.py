"""One run: names are checked, cases asked their three questions, records and baselines collected. No pytest here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from packaging.version import Version

from pytest_nfp import __version__, backends, baselines, calibrated, catalog, journal, recordings, records, registry
from pytest_nfp.backends import REFUSALS
from pytest_nfp.baselines import BaselineFile, CaseBaseline
from pytest_nfp.cases import (
    NO_RULE,
    OURS,
    ROUTINGS,
    Backend,
    Case,
    Grid,
    Module,
    expand,
    frameworks,
    parse_backend,
    read_key,
    variants,
)
from pytest_nfp.catalog import Model, UnknownName
from pytest_nfp.devices import Device, Reading, as_it_is, detect, find_device
from pytest_nfp.devices.lock import TooLong, device_lock, time_limit
from pytest_nfp.executed import Executed
from pytest_nfp.files import FileError
from pytest_nfp.granularity import Granularity, RuleUnknown, artifacts, check_release, evaluator, granularity_of
from pytest_nfp.journal import Past
from pytest_nfp.measure import PROTOCOLS, Curve, composition, sweep, trust
from pytest_nfp.measure.sweep import Interrupted
from pytest_nfp.predict import Figures, Predicted, edge_positions, predict_case
from pytest_nfp.principle import Boundary, ClosedForm, active_experts, sensitivity
from pytest_nfp.principle.plateaus import plateaus
from pytest_nfp.principle.routing import Replay, Routing
from pytest_nfp.records import CaseRecord, Held, Question, Record, TestResult
from pytest_nfp.scale import tiny
from pytest_nfp.settings import Settings
from pytest_nfp.traces import parse_routing
from pytest_nfp.verdict import (
    Verdict,
    agreement,
    changes_in_words,
    confirmed,
    controlled,
    effect_in_words,
    explain,
    gate_by_boundary,
    held_to,
    interval_in_words,
    judge_boundary,
    judge_granularity,
    judge_prediction,
)

CPU_MODELS = ("qwen3-8b", "llada-2.1-mini")
"""What suites/models runs on a CPU unless it is told: a dense model and one with experts."""
GRAPH_TIMER = "cuda-graph"
"""The timer that captures each forward and times its replay."""
ENGINE_TIMER = "engine-forward"
"""The clock of an engine's own step: the forward inside it."""
GRID = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
"""The positions measured by default; the map's edges inside the range, edge and edge + 1, come on top."""
BASELINE_RUNS = 3
"""Runs behind a measured baseline: their spread tells a machine with several states."""
RESTING = 0.1
"""Share of the time that a device is kept busy where its clock fell under load."""
COOLING_S = 30.0
"""Longest rest before such a device is measured again."""
CHECKED = 64
"""A result is held to its reference at N0 and at the largest N of the grid up to here."""
LONG_CURVE = 192
"""Up to where an attention curve is measured on a CPU: past the first tile switch of its kernel."""


@dataclass
class Session:
    """State of one run. `say` gets a line of progress now and then."""

    settings: Settings
    root: Path
    say: Callable[[str], None] = lambda text: None
    cases: dict[str, CaseRecord] = field(default_factory=dict)
    updates: dict[tuple[str, Backend, str], BaselineFile] = field(default_factory=dict)
    machines: dict[str, dict[str, Any]] = field(default_factory=dict)
    past: Past = field(default_factory=Past)
    partial: bool = False
    journal_path: Path | None = None
    written_baselines: list[Path] = field(default_factory=list)
    written_reports: list[Path] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    _warned: bool = False
    _fresh: dict[str, None] = field(default_factory=dict)
    _fresh_updates: dict[tuple[str, Backend, str], None] = field(default_factory=dict)
    _granularity: dict[Case, Granularity | RuleUnknown] = field(default_factory=dict)
    _baselines: dict[tuple[str, Backend, str], tuple[BaselineFile, Backend] | None] = field(default_factory=dict)
    _devices: dict[str, tuple[Device | None, str]] = field(default_factory=dict)
    _predicted: dict[Case, tuple[Predicted, Granularity | None]] = field(default_factory=dict)
    _figures: dict[tuple[str, str], Figures] = field(default_factory=dict)

    # Names

    def gpus(self) -> list[str]:
        """The catalog names that are asked for. Raises UnknownName."""
        names = [detect() if n == "auto" else n for n in self.settings.gpu]
        return list(dict.fromkeys(n if n == "cpu" else catalog.gpu(n).name for n in names))

    def check_names(self) -> None:
        """Raise UnknownName or FileError for anything given that does not exist, before anything runs."""
        evaluator.trust_archives(self.settings.trust_artifacts)
        self.gpus()
        for name in self.settings.model:
            catalog.model(name)
        # Releases are called as the index writes them from here on: 0.24 is 0.24.0, the folder of whose baselines is named so.
        self.settings.backend = tuple(str(self._released(parse_backend(text))) for text in self.settings.backend)
        self.routings()

    def routings(self) -> list[Routing]:
        """--nfp-routing. Raises UnknownName for one that is none, FileError for a trace that can't be used."""
        try:
            return [parse_routing(text) for text in self.settings.routing]
        except ValueError as error:
            raise UnknownName(f"--nfp-routing: {error}") from None

    def _released(self, backend: Backend) -> Backend:
        """The backend with its release as a baseline or the index writes it. Raises UnknownName for one that neither has."""
        if not backend.release:
            return backend
        for gpu in catalog.gpus():
            for stored in baselines.stored_backends(self.baseline_folder, gpu.name):
                if stored.framework == backend.framework and Version(stored.release) == Version(backend.release):
                    return stored
        return Backend(backend.framework, check_release(backend.framework, backend.release, self.settings.artifacts))

    @property
    def baseline_folder(self) -> Path:
        """--nfp-baselines, else baselines/ of the project, else those shipped with the package."""
        if self.settings.baselines is not None:
            return self.settings.baselines
        own = self.root / "baselines"
        return own if own.is_dir() else Path(__file__).parent / "shipped" / "baselines"

    # Cases

    def backends_for(self, gpu: str, module: Module) -> list[Backend]:
        """What is tested: --nfp-backend, else the installed frameworks, else the releases that have baselines."""
        known = frameworks(module, gpu)
        if gpu == "cpu":
            return self._cpu_backends(known)
        stored = [b for b in baselines.stored_backends(self.baseline_folder, gpu) if b.framework in known]
        if self.settings.backend:
            chosen = []
            for text in self.settings.backend:
                backend = parse_backend(text)
                if backend.framework not in known or not self._is_asked(gpu, backend.framework, module):
                    continue
                if backend.release:
                    chosen.append(backend)
                else:
                    release = _installed(backend.framework)
                    chosen += (
                        [Backend(backend.framework, release)]
                        if release
                        else [b for b in stored if b.framework == backend.framework]
                    )
            return chosen
        chosen = []
        for framework in known:
            if not self._is_asked(gpu, framework, module):
                continue
            release = _installed(framework)
            if framework == "torch":
                # Its GEMMs on a GPU that is here; its experts and attention where they are asked for by name.
                device = self._measuring(gpu) if module == "dense" else None
                release = device.torch_release if device else None
            chosen += [Backend(framework, release)] if release else [b for b in stored if b.framework == framework]
        return chosen

    def _measuring(self, gpu: str) -> Device | None:
        """The device, if this run measures on it."""
        return self.device(gpu)[0] if self.settings.measure in ("auto", "device") else None

    def _is_asked(self, gpu: str, framework: str, module: Module) -> bool:
        """Kernels that publish no rule have nothing but a boundary, and no recording: a device must be here."""
        return (framework, module) not in NO_RULE or self._measuring(gpu) is not None

    def _cpu_backends(self, known: Sequence[str]) -> list[Backend]:
        """Torch, and every other framework that is installed here and has a forward; or those of them that are asked for."""
        asked = {b.framework for b in map(parse_backend, self.settings.backend)}
        found = []
        for framework in sorted(known, key=lambda f: (f != "torch", f)):
            if asked and framework not in asked:
                continue
            if framework == "torch":
                device, _ = self.device("cpu")
                found.append(Backend("torch", device.torch_release if device else "0"))
                continue
            release = _installed(framework)
            if release is not None:
                found.append(Backend(framework, release))
        return found

    def _scaled(self, gpu: str, model: Model) -> Model:
        """The model as --nfp-scale says; module shapes stay, and have no cases."""
        is_tiny = (self.settings.scale or ("tiny" if gpu == "cpu" else "full")) == "tiny"
        if not is_tiny or model.layers is None or model.attention is None:
            return model
        device = self.device(gpu)[0] if gpu == "cpu" else None
        return tiny(model, trust.COLD_TURNS * device.cache_bytes if device is not None else 0)

    def _grid(self, module: Module, model: Model, is_named: bool) -> Grid | None:
        """What the options put in place of a subject's grid; None where it has none of the k. Raises UnknownName for a k above the E
        of a model that was asked for by name.
        """
        asked = Grid(self.settings.batch, self.settings.context, self.settings.top_k)
        if model.moe is None or module not in ("moe", "model"):
            return asked
        fit = tuple(k for k in asked.top_k if k <= model.moe.experts)
        if fit == asked.top_k:
            return asked
        if is_named:
            raise UnknownName(f"--nfp-top-k={max(asked.top_k)}: {model.name} has {model.moe.experts} experts")
        return replace(asked, top_k=fit) if fit else None

    def subjects_for(self, gpu: str, backend: Backend, module: Module) -> list[Model]:
        """--nfp-model, else the subjects with baselines of this release, else those of the gate."""
        if self.settings.model:
            return [catalog.model(n) for n in self.settings.model]
        if module == "model":
            named = [m for m in catalog.models() if m.gate and m.layers is not None]
            return [m for m in named if m.name in CPU_MODELS] if gpu == "cpu" else named
        if gpu == "cpu":
            return [m for m in catalog.models() if m.device == "cpu"]
        nearest = [b for b in baselines.stored_backends(self.baseline_folder, gpu) if b.framework == backend.framework]
        chosen = backend if backend in nearest else (nearest[-1] if nearest else None)
        names = baselines.stored_subjects(self.baseline_folder, gpu, chosen) if chosen else []
        known = {m.name: m for m in catalog.models()}
        return [known[n] for n in names if n in known] or [m for m in catalog.models() if m.gate]

    def expand(
        self,
        question: Question,
        module: Module,
        models: Sequence[str] | None = None,
        routing: Sequence[str] | None = None,
    ) -> list[Case]:
        """The cases of a module to which a question applies.

        Granularity needs a tile rule; a CPU's prediction is calibrated on the machine, so its boundary alone is asked.
        """
        found: list[Case] = []
        left_out = False
        routings = self.routings()
        for gpu in self.gpus():
            if (gpu == "cpu" and question != "boundary") or (question == "granularity" and module == "dense"):
                continue
            for backend in self.backends_for(gpu, module):
                if gpu != "cpu" and question != "boundary" and (backend.framework, module) in NO_RULE:
                    continue
                subjects = [catalog.model(n) for n in models] if models else self.subjects_for(gpu, backend, module)
                if module == "model":
                    subjects = [self._scaled(gpu, m) for m in subjects]
                for subject in subjects:
                    grid = self._grid(module, subject, bool(models or self.settings.model))
                    if grid is None:
                        left_out = True
                        continue
                    for case in expand(gpu, backend, module, subject, routings, self.settings.dtype, grid):
                        _check_trace(case)
                        found += self._as_recorded(case)
                        if question == "boundary" and self._measuring(gpu) is not None:
                            found += variants(case)
        if not found and left_out:
            least = min(self.settings.top_k)
            raise UnknownName(f"--nfp-top-k={least}: no model that is asked for has so many experts")
        if not found and self.settings.require_device and (absent := self._absent(question, module)):
            raise UnknownName(f"--nfp-require-device: {absent}")
        keep = [c for c in dict.fromkeys(found) if routing is None or c.routing in routing]
        if question == "granularity":
            # The rule does not look at batch, context or routing: one case asks for each map.
            return list({(c.gpu, c.backend, c.subject.name, granularity_key(c)): c for c in reversed(keep)}.values())[
                ::-1
            ]
        return keep

    def _absent(self, question: Question, module: Module) -> str:
        """The engines of which nothing but a boundary is asked, and the device that is not here for it; empty where there are none."""
        asked = {parse_backend(text).framework for text in self.settings.backend}
        for gpu in self.gpus() if question == "boundary" else ():
            engines = [f for f in frameworks(module, gpu) if (f, module) in NO_RULE and (not asked or f in asked)]
            if gpu != "cpu" and engines and self._measuring(gpu) is None:
                reason = self.device(gpu)[1] or f"--nfp-measure={self.settings.measure}"
                return f"{module} by {', '.join(engines)} on {gpu} is measured alone: {reason}"
        return ""

    def why_nothing(
        self,
        question: Question,
        module: Module,
        models: Sequence[str] | None = None,
        routing: Sequence[str] | None = None,
    ) -> str:
        """Why `expand` found no case, for who reads a skipped test."""
        latent = [m.name for m in map(catalog.model, models or self.settings.model) if m.is_latent]
        if module == "model" and latent:
            return f"{', '.join(latent)}: no whole model with MLA is run or composed here; its modules have suites"
        if absent := self._absent(question, module):
            return absent
        words = ", ".join(f"{k}={v}" for k, v in {"models": models, "routing": routing}.items() if v)
        asked = f"module={module}, question={question}" + (f", {words}" if words else "")
        return f"no case for {asked} with the GPU, backend and model that were asked for"

    def _as_recorded(self, case: Case) -> list[Case]:
        """A dense FFN as its single GEMMs where recordings will answer: they hold GEMMs, not FFNs."""
        if case.module != "dense" or case.gpu == "cpu" or not self._recorded_answers(case):
            return [case]
        return [replace(case, gemm=shape) for shape in dict.fromkeys(case.gemms)]

    def _recorded_answers(self, case: Case) -> bool:
        if self.settings.measure not in ("auto", "recorded"):
            return False
        if self.settings.measure == "auto" and self.device(case.gpu)[0] is not None:
            return False
        return case.backend in recordings.recorded_releases(case.gpu, case.module)

    # What a case stands on

    def device(self, gpu: str) -> tuple[Device | None, str]:
        """The device, or None with the one reason."""
        if gpu not in self._devices:
            self._devices[gpu] = find_device(gpu, self.settings.timer)
            device, _ = self._devices[gpu]
            if device is not None:
                self.machines[gpu] = {"title": device.title, "identity": device.identity, "recorded": device.notes}
                self._check_past(gpu)
        return self._devices[gpu]

    def granularity(self, case: Case) -> Granularity:
        """The case's map, read once. Raises RuleUnknown."""
        same = replace(case, batch=1, context=None, routing=None, gemm=None)
        if same not in self._granularity:
            try:
                self._granularity[same] = granularity_of(case, self.settings.artifacts)
            except RuleUnknown as reason:
                self._granularity[same] = reason
            if not self._warned and (missing := evaluator.missing_walls()):
                self._warned = True
                self.say(f"warning: {missing}")
        found = self._granularity[same]
        if isinstance(found, RuleUnknown):
            raise found
        return found

    def figures(self, case: Case, granularity: Granularity | None) -> Figures:
        """Calibration or datasheet of a GPU; of the CPU, the calibration of the case's kernel, made at the first use."""
        if case.gpu != "cpu":
            return calibrated.figures_of(case, granularity)
        asked = (case.kernel or "", case.dtype)
        if asked not in self._figures:
            from pytest_nfp.measure import calibrate

            device, reason = self.device("cpu")
            if device is None:
                raise RuleUnknown(reason)
            folder = artifacts.cache_folder("calibrations")
            self._figures[asked] = calibrate.figures(device, *asked, folder, self.settings.seed, self.say)
        return calibrated.for_routing(self._figures[asked], case.routing)

    def predicted(self, case: Case) -> tuple[Predicted, Granularity | None]:
        """Both predictors. Raises RuleUnknown where the tile rule is needed and unknown."""
        if case not in self._predicted:
            granularity = None if case.module == "dense" else self.granularity(case)
            figures = self.figures(case, granularity)
            self._predicted[case] = predict_case(case, figures, granularity, self.settings.tolerance), granularity
        return self._predicted[case]

    def baseline(self, case: Case) -> tuple[BaselineFile, str, bool] | None:
        """The stored file to hold a case to, its name, and whether it is of exactly this release."""
        for gpu in self._baseline_gpus(case):
            key = (gpu, case.backend, case.subject.name)
            if key not in self._baselines:
                self._baselines[key] = baselines.load_nearest(self.baseline_folder, *key)
            if found := self._baselines[key]:
                file, backend = found
                return file, f"the baseline of {backend}", backend == case.backend
        return None

    def _baseline_gpus(self, case: Case) -> list[str]:
        if case.gpu != "cpu":
            return [case.gpu]
        device, _ = self.device("cpu")
        if device is None:
            return ["cpu"]
        from pytest_nfp.measure.calibrate import identity_slug

        return [f"cpu-{identity_slug(device.identity)}", "cpu"]

    # The three questions

    def check_granularity(self, case: Case) -> Verdict:
        """Does this release still map tokens to the same tiles, through the same kernel?"""
        stored = self.baseline(case)
        tiles = stored[0].granularity.get(granularity_key(case)) if stored else None
        try:
            predicted, granularity = self.predicted(case)
        except RuleUnknown as reason:
            unknown = Verdict("UNDECIDED", (f"the rule is unknown: {reason}",), must_decide=tiles is not None)
            return self._note(case, "granularity", unknown)
        assert granularity is not None
        effect = effect_in_words(predicted, stored[0].cases.get(case.key) if stored else None)
        verdict = judge_granularity(
            granularity, tiles, stored[1] if stored else "", effect, reach_of(stored, case, granularity)
        )
        if verdict.outcome == "FAIL" and self.settings.gate == "boundary" and stored is not None and tiles is not None:
            verdict = gate_by_boundary(verdict, granularity, tiles, predicted, stored[0].cases.get(case.key))
        verdict = self._require_baseline(verdict, tiles is not None)
        if self._is_update(stored, tiles is not None, verdict):
            file = self._update_file(case)
            file.granularity[granularity_key(case)] = baselines.tiles_of(granularity)
            file.provenance |= {"artifact": granularity.artifact_file, "sha256": granularity.artifact_sha256}
            verdict = Verdict("PASS", ("baseline written",))
        return self._note(case, "granularity", verdict, predicted, granularity)

    def check_prediction(self, case: Case) -> Verdict:
        """Is the predicted N_max what the baseline says?"""
        try:
            predicted, granularity = self.predicted(case)
        except RuleUnknown as reason:
            return self._note(case, "prediction", Verdict("UNDECIDED", (f"the rule is unknown: {reason}",)))
        stored = self.baseline(case)
        known = stored[0].cases.get(case.key) if stored else None
        changes = []
        if stored and granularity and (tiles := stored[0].granularity.get(granularity_key(case))):
            changes = changes_in_words(tiles, granularity)
        verdict = judge_prediction(predicted, known, stored[1] if stored else "", changes)
        has_baseline = known is not None and known.predicted is not None
        verdict = self._require_baseline(verdict, has_baseline)
        if self._is_update(stored, has_baseline, verdict):
            entry = self._update_case(case)
            entry.predicted = baselines.PredictedTerms.model_validate(predicted.as_dict())
            verdict = Verdict("PASS", ("baseline written",))
        return self._note(case, "prediction", verdict, predicted, granularity)

    def check_boundary(self, case: Case) -> Verdict:
        """Does the curve leave the tolerance where prediction and baseline say?"""
        predicted: Predicted | None = None
        granularity: Granularity | None = None
        unknown = ""
        try:
            if case.module != "model":
                predicted, granularity = self.predicted(case)
        except RuleUnknown as reason:
            unknown = f"the rule is unknown: {reason}"
            if self._measuring(case.gpu) is None:
                return self._note(case, "boundary", Verdict("UNDECIDED", (unknown,)))
        if resumed := self._resumed(case):
            return resumed
        try:
            with time_limit(self.settings.case_timeout):
                curve, why_not = self._curve(case, granularity)
        except Interrupted as interrupted:
            self._note_interrupted(case, predicted, granularity, interrupted)
            raise
        except TooLong as reason:
            return self._note(case, "boundary", Verdict("INVALID", (str(reason),)), predicted, granularity)
        finally:
            if (device := self._measuring(case.gpu)) is not None:
                device.clean()
        if curve is None:
            return self._note(case, "boundary", why_not, predicted, granularity)
        if case.module == "model":
            return self._judge_model(case, curve)
        figures = None if unknown else self.figures(case, granularity)
        verdict = self._judge(
            case, curve, predicted, figures, granularity, unknown, lambda: self._measured_again(case, granularity)
        )
        if curve.kind == "measured":
            found = self.cases[case.id]
            self.say(f"{case.key} has n_max {found.n_max}, interval {found.n_max_interval}: {verdict.outcome}")
        return verdict

    def _judge_model(self, case: Case, curve: Curve) -> Verdict:
        """A full model's boundary against its baseline, and against the sum of its modules, measured here one by one.

        Where they agree within one N of the grid, that is a PASS; where not, the model is more than its modules, and
        nothing else is known to hold it to.
        """
        verdict = self._judge(case, curve, None, None, None)
        record = self.cases[case.id]
        device = self._measuring(case.gpu)
        if curve.invalid or device is None or not curve.points:
            return verdict
        try:
            with device_lock(device), time_limit(self.settings.case_timeout):
                record.floor_us = self._floor_us(case)
                found = composition.measure(case, curve, device, self.settings.tolerance, self.settings.seed, self.say)
        except Interrupted:
            self.partial = True
            record.counts |= {"interrupted": True}
            raise
        except (composition.NotComposed, TooLong) as reason:
            record.composed = {"reason": str(reason)}
            verdict = replace(verdict, reasons=(*verdict.reasons, f"not composed of its modules: {reason}"))
            return self._note_verdict(record, verdict)
        finally:
            device.clean()
        record.composed = composed_record(found)
        self._add_predictions(case, curve, record)
        # Where noise leaves the measured boundary open, the modules can't be shown to add up to it.
        is_open = curve.boundary_is_open(self.settings.tolerance, [p.positions for p in found.points])
        agrees = found.steps <= 1 and not is_open
        said = (
            f"composed of its modules N_max {interval_in_words(found.boundary)}, {found.steps} steps from the measured one;"
            f" {found.limiting} grows most; T {found.error:.0%} off in the median"
        )
        outcome = verdict.outcome
        if outcome == "UNDECIDED" and agrees and not self._has_measured_baseline(case):
            outcome = "PASS"
        held = (*verdict.held_to, *(("the sum of its modules",) if agrees else ()))
        verdict = Verdict(outcome, (said, *verdict.reasons), held)
        return self._note_verdict(record, verdict)

    def _add_predictions(self, case: Case, curve: Curve, record: CaseRecord) -> None:
        """What both predictors say of the model, beside what was measured and composed: told, and held to nothing."""

        def figures_of(part: Case) -> tuple[Figures, Granularity | None]:
            granularity = None if part.module == "dense" else self.granularity(part)
            return self.figures(part, granularity), granularity

        assert record.composed is not None
        try:
            found = composition.predict(case, curve, self.settings.tolerance, figures_of)
        except (RuleUnknown, FileError, *REFUSALS) as reason:
            record.composed["predicted"] = {"reason": str(reason)}
            return
        record.predicted, record.basis = found.predicted.as_dict(), found.predicted.basis
        record.n_idle = records.finite(found.predicted.n_idle)
        record.n_idle_unbounded = found.predicted.n_idle is not None and record.n_idle is None
        record.composed["predicted"] = {"steps": found.steps, "error": round(found.error, 4)}

    def _note_verdict(self, record: CaseRecord, verdict: Verdict) -> Verdict:
        """The verdict in the place of the one that the record has of its boundary."""
        record.tests["boundary"] = _test_of(verdict)
        records.summarise(record)
        return verdict

    def _has_measured_baseline(self, case: Case) -> bool:
        stored = self.baseline(case)
        known = stored[0].cases.get(case.key) if stored and stored[2] else None
        return known is not None and known.measured is not None

    def _floor_us(self, case: Case) -> float | None:
        """Microseconds that reading the weights and the KV cache takes at the device's bandwidth; None where it is unknown."""
        try:
            at = self.figures(case, None).bandwidth if case.gpu == "cpu" else catalog.gpu(case.gpu).bandwidth
        except (RuleUnknown, *REFUSALS, backends.Unsupported) as error:
            self.say(f"{case.key}: the machine's bandwidth is not known: {error}")
            return None
        return case.bytes_read / at * 1e6

    def _note_interrupted(
        self, case: Case, predicted: Predicted | None, granularity: Granularity | None, interrupted: Interrupted
    ) -> None:
        self.partial = True
        verdict = Verdict("UNDECIDED", ("interrupted while it was measured",))
        curve = replace(interrupted.curve, counts={**interrupted.curve.counts, "interrupted": True})
        self._note(case, "boundary", verdict, predicted, granularity, curve, curve.boundary(self.settings.tolerance))

    def _judge(
        self,
        case: Case,
        curve: Curve,
        predicted: Predicted | None,
        figures: Figures | None,
        granularity: Granularity | None,
        unknown: str = "",
        again: Callable[[], Curve | None] | None = None,
    ) -> Verdict:
        """Hold a curve to what is known, note the verdict and store what --nfp-update asks for.

        unknown: why there is no prediction, said where nothing else could be held against the curve. again: a second curve of
        the case, by which a FAIL is confirmed.
        """
        boundary = curve.boundary(self.settings.tolerance)
        if boundary is None:
            verdict = Verdict("INVALID" if curve.invalid else "UNDECIDED", curve.invalid or ("no point was measured",))
            return self._note(case, "boundary", verdict, predicted, granularity, curve)
        stored = self.baseline(case)
        # A measured boundary is held to one of the same release alone: another release is what it may differ by.
        known = stored[0].cases.get(case.key) if stored and stored[2] else None
        judged = partial(
            judge_boundary,
            case,
            predicted=predicted,
            figures=figures,
            granularity=granularity,
            baseline=known,
            match_tolerance=self.settings.match_tolerance,
        )
        verdict = judged(curve, boundary)
        has_baseline = known is not None and known.measured is not None
        is_stored = has_baseline and self.settings.update == "all"
        if verdict.outcome == "FAIL" and curve.kind == "measured" and again is not None and not is_stored:
            try:
                self.say(f"{case.key}: FAIL; measured once more to confirm it")
                second = again()
                found = second.boundary(self.settings.tolerance) if second is not None else None
                if second is not None and found is not None:
                    verdict = confirmed(verdict, judged(second, found), found)
                if verdict.outcome == "FAIL" and case.gpu == "cpu" and figures is not None and figures.describes:
                    verdict = controlled(verdict, self._why_not_as_calibrated(case))
            except Interrupted:  # What the first measurement found is kept.
                self._note_interrupted(case, predicted, granularity, Interrupted(curve))
                raise
        verdict = self._require_baseline(verdict, has_baseline)
        exact = stored if stored and stored[2] else None
        is_sure = not curve.invalid and not boundary.undecided
        if self.settings.update and not is_sure and (not has_baseline or self.settings.update == "all"):
            refused = f"no baseline was written: {verdict.outcome}, a boundary must be sure before it is stored"
            verdict = replace(verdict, reasons=(*verdict.reasons, refused))
        elif is_sure and self._is_update(exact, has_baseline, verdict):
            agrees, because = True, ""
            if predicted is not None:
                expected = held_to(case, predicted, figures, curve)
                if expected is not None:
                    # An interval that decides nothing agrees with everything: what is kept is whether the prediction itself does.
                    n = expected.n_max
                    ends = (n, n) if expected.is_wide else (expected.low, expected.high)
                    agrees = agreement(case, curve, boundary, *ends, self.settings.match_tolerance) == "same"
                    cause = figures.cause if figures is not None else ""
                    because = cause or explain(case, curve, boundary, expected.n_max, granularity)
            runs = self._runs(case, granularity, curve, boundary)
            entry = self._update_case(case)
            entry.measured = baselines.measured_of(curve, boundary, agrees, because, runs)
            verdict = Verdict("PASS", ("baseline written" + ("" if agrees else f", prediction deviates: {because}"),))
        if unknown and verdict.outcome == "UNDECIDED":
            verdict = replace(verdict, reasons=(*verdict.reasons, unknown))
        return self._note(case, "boundary", verdict, predicted, granularity, curve, boundary)

    def _curve(self, case: Case, granularity: Granularity | None) -> tuple[Curve | None, Verdict]:
        """A curve from the device or a recording, or a verdict that says in one reason why there is none."""
        mode = self.settings.measure
        if mode == "none":
            return None, Verdict("SKIPPED", ("--nfp-measure=none",))
        device, absent = (None, "") if mode == "recorded" else self.device(case.gpu)
        if device is not None:
            try:
                prepared = backends.prepare(case, self.settings.seed, device.cache_bytes)
            except backends.Unsupported as reason:
                return None, Verdict("SKIPPED", (str(reason),))
            except backends.EngineDied as died:
                return replace(_nothing(case, device), invalid=(str(died),), log=died.log, died=True), Verdict("PASS")
            grid = positions_to_measure(case, granularity)
            protocol = PROTOCOLS[self.settings.protocol]

            clock = device
            if case.module == "model":
                # Of hundreds of operators no one is the model's kernel.
                clock = replace(device, kernels=None)
            if prepared.process is not None:
                clock = replace(clock, read=_with_engine(device, prepared.process))
            if prepared.own_timer:
                clock = replace(
                    clock, time_us=_own_time, timer=ENGINE_TIMER, known_length=None, launch_us=None, ready=as_it_is
                )

            def measured(duty: float = 1.0) -> Curve:
                return sweep(
                    prepared.forward,
                    grid,
                    clock,
                    protocol,
                    self.settings.tolerance,
                    case.baseline_positions,
                    self.settings.seed,
                    prepared.kernel,
                    lambda text: self.say(f"{case.key}: {text}"),
                    prepared.turns,
                    prepared.bytes_rotated,
                    duty=duty,
                    keep_samples=self.settings.samples,
                )

            curve: Curve | None = None
            try:
                with device_lock(device):
                    if wrong := _first_wrong(prepared, grid, case.baseline_positions):
                        return None, Verdict("INVALID", (wrong,))
                    curve = measured()
                    if curve.invalid and curve.points and not curve.died:
                        # Load and drift pass, and a clock that fell holds when the device rests: once more, then give up.
                        self.say(f"{case.key}: {curve.invalid[0]}; measured again")
                        hot = curve.trust.get("clock_moved", False)
                        if hot:
                            device.rest(min(COOLING_S, curve.counts["seconds"]))
                        curve = measured(RESTING if hot else 1.0)
                if not curve.died:  # An engine that died is asked nothing more.
                    curve = self._with_what_it_saw(case, curve, prepared, device)
            except backends.EngineDied as died:
                # Before it was measured, or when it was asked what it had seen.
                curve = curve or _nothing(case, device)
                curve = replace(curve, invalid=(str(died), *curve.invalid), log=died.log, died=True)
            finally:
                if prepared.close is not None:
                    prepared.close()
            return _claimed(case, curve), Verdict("PASS")
        if mode == "device":
            return None, Verdict("SKIPPED", (absent,))
        try:
            return recordings.recorded_curve(case), Verdict("PASS")
        except recordings.NoRecording as reason:
            return None, Verdict("SKIPPED", (f"{absent}; {reason}" if absent else str(reason),))

    def _measured_again(self, case: Case, granularity: Granularity | None) -> Curve | None:
        """A curve beside a case that failed, with fresh inputs and weights; None where there is none."""
        device = self._measuring(case.gpu)
        try:
            with time_limit(self.settings.case_timeout):
                return self._curve(case, granularity)[0]
        except TooLong as reason:
            self.say(f"{case.key}: not confirmed: {reason}")
            return None
        finally:
            if device is not None:
                device.clean()

    def _why_not_as_calibrated(self, case: Case) -> str:
        """Why this machine is not as it was calibrated, by shapes of its calibration that are measured now; "" where it is."""
        from pytest_nfp.measure import calibrate

        device = self._measuring(case.gpu)
        assert device is not None
        for control in calibrate.controls(device, case):
            self.say(f"{case.key}: FAIL; {control.subject.name}, a shape of the calibration, is measured beside it")
            predicted, granularity = self.predicted(control)
            curve = self._measured_again(control, granularity)
            boundary = curve.boundary(self.settings.tolerance) if curve is not None else None
            if curve is None or boundary is None:
                return f"{control.subject.name} could not be measured"
            figures = self.figures(control, granularity)
            within = self.settings.match_tolerance
            verdict = judge_boundary(control, curve, boundary, predicted, figures, granularity, None, within)
            if verdict.outcome != "PASS":
                return f"{control.subject.name} is {verdict.outcome} too: {verdict.reasons[0]}"
        return ""

    def _with_what_it_saw(self, case: Case, curve: Curve, prepared: backends.Prepared, device: Device) -> Curve:
        """The curve with what its forwards tell of themselves, before they are given up."""
        if prepared.active is not None:
            curve = replace(curve, active_experts={p.positions: prepared.active(p.positions) for p in curve.points})
        if prepared.setting is not None:
            try:
                settings = {p.positions: _setting(prepared.setting, p.positions) for p in curve.points}
                curve = replace(curve, settings=settings)
            except REFUSALS as error:
                self.say(f"{case.key}: the selector gives no configuration: {error}")
        return _proven(case, _with_modes(curve, prepared, device), prepared)

    def _runs(
        self, case: Case, granularity: Granularity | None, curve: Curve, boundary: Boundary
    ) -> list[tuple[int, float]]:
        """(N_max, T(N0)) of a measured curve that becomes a baseline, and of further runs with fresh inputs and weights.

        A recorded curve and a user's own forward stand alone.
        """
        if curve.kind != "measured" or case.module == "own":
            return []
        found = [(boundary.n_max, curve.baseline_us)]
        while len(found) < BASELINE_RUNS:
            again, _ = self._curve(case, granularity)
            seen = again.boundary(self.settings.tolerance) if again is not None and not again.invalid else None
            if again is None or seen is None:
                break
            found.append((seen.n_max, again.baseline_us))
        return found

    # A user's own kernel

    def sweep_own(
        self,
        make_forward: Callable[[int], Callable[[], object]],
        positions: Sequence[int] | None,
        baseline_positions: int,
        name: str,
    ) -> Curve:
        """Measure a user's own forward on the device of --nfp-gpu. Raises LookupError where it is not here."""
        gpu = self.gpus()[0]
        device, absent = self.device(gpu)
        if device is None:
            raise LookupError(absent)
        with device_lock(device):
            try:
                return sweep(
                    make_forward,
                    positions or [*GRID, 33, 65, 96, 128],
                    device,
                    PROTOCOLS[self.settings.protocol],
                    self.settings.tolerance,
                    baseline_positions,
                    self.settings.seed,
                    name,
                    lambda text: self.say(f"{name}: {text}"),
                )
            except Interrupted as interrupted:
                self._note_interrupted(own_case(gpu, name), None, None, interrupted)
                raise

    def check_own(self, curve: Curve, granularity: int | None, name: str) -> Verdict:
        """Hold a user's curve to its granularity (N_max = rows of a tile) and to its stored baseline."""
        case = own_case(self.gpus()[0], name)
        predicted = None
        if granularity is not None:
            rows = ClosedForm(None, None, None, None, granularity, "granularity")
            predicted = Predicted(None, rows, None, "the granularity that the test gives")
        return self._judge(case, curve, predicted, None, None)

    def note_executed(self, found: Executed, predicted: Mapping[int, float], module: Module, name: str) -> None:
        """Keep what a kernel executed under the interpreter beside what its map predicts, as a case of its own."""
        backend = Backend(found.framework, found.release)
        agrees = all(found.flops.get(n) == flops for n, flops in predicted.items())
        reasons = [] if agrees else ["the kernel executed other products than its map predicts"]
        verdict = TestResult(outcome="PASS" if agrees else "FAIL", reasons=reasons)
        gpu = self.gpus()[0]
        record = CaseRecord(
            id=f"{gpu}-{backend}-{module}-{found.kernel}-{name}",
            gpu=gpu,
            backend=str(backend),
            module=module,
            subject="executed work",
            workload=name,
            kind="executed",
            outcome=verdict.outcome,
            tests={"granularity": verdict},
            kernel=found.kernel,
            executed={n: (float(found.flops.get(n, 0)), float(flops)) for n, flops in predicted.items()},
            settings={n: " ".join(f"{k}={v}" for k, v in sorted(s.items())) for n, s in found.settings.items() if s},
        )
        self.add_case(records.summarise(record))
        self._fresh[record.id] = None

    # What went before, and what is handed on

    def run_settings(self) -> dict[str, Any]:
        """What the numbers of a run depend on: two runs that differ in it can't be joined."""
        s = self.settings
        return {
            "tolerance": s.tolerance,
            "match_tolerance": s.match_tolerance,
            "protocol": s.protocol,
            "timer": s.timer,
            "seed": s.seed,
        }

    def made_by(self) -> dict[str, Any]:
        """The tool and when the run began: told, and no reason not to join two runs."""
        return {"tool": f"pytest-nfp {__version__}", "started": self.started}

    def resume(self, path: Path) -> None:
        """Go on after an earlier run. Raises FileError for a file that is none, or for a run with other settings."""
        past = journal.read(path)
        mine = self.run_settings()
        for name, value in past.run.items():
            if name in mine and mine[name] != value:
                option = name.replace("_", "-")
                raise FileError(
                    f"{path}: that run had --nfp-{option}={value}, this one has {mine[name]}: they can't be joined"
                )
        self.past = past
        self.absorb_updates(past.updates)

    def _check_past(self, gpu: str) -> None:
        before = self.past.machines.get(gpu, {})
        # Through JSON and back, as the file has been.
        now = json.loads(json.dumps(self.machines[gpu]))
        if before.get("identity") and (moved := records.identity_changes(before, now)):
            raise FileError(
                f"--nfp-resume: that run was made on another machine ({'; '.join(f'{n} {was} to {is_now}' for n, was, is_now in moved)}): start anew"
            )

    def _resumed(self, case: Case) -> Verdict | None:
        """The verdict that an earlier run came to, if it measured this case to its end."""
        known = self.past.cases.get(case.id)
        if known is None or "boundary" not in known.tests or known.kind != "measured" or not known.curve:
            return None
        if known.counts.get("interrupted"):
            return None
        self.add_case(known)
        self._fresh[known.id] = None
        return Verdict(known.tests["boundary"].outcome, tuple(known.tests["boundary"].reasons))

    def collected(self) -> dict[str, Any]:
        """What came in since this was last asked, as plain data: for the journal, and from a worker to the controller."""
        cases = [self.cases[i].model_dump(mode="json") for i in self._fresh]
        updates = [self.updates[k].model_dump(mode="json", by_alias=True) for k in self._fresh_updates]
        self._fresh.clear()
        self._fresh_updates.clear()
        return {"machines": self.machines, "cases": cases, "updates": updates, "partial": self.partial}

    def absorb(self, collected: dict[str, Any]) -> None:
        """Take over what a worker collected."""
        self.machines |= collected["machines"]
        for case in collected["cases"]:
            self.add_case(CaseRecord.model_validate(case))
        self.absorb_updates(collected["updates"])
        self.partial = self.partial or collected["partial"]

    # Baselines and records

    def _require_baseline(self, verdict: Verdict, has_baseline: bool) -> Verdict:
        if self.settings.require_baseline and not has_baseline and not self.settings.update:
            return Verdict("FAIL", (*verdict.reasons, "no baseline, and --nfp-require-baseline asks for one"))
        return verdict

    def _is_update(self, stored: tuple[BaselineFile, str, bool] | None, has_entry: bool, verdict: Verdict) -> bool:
        exact = stored is not None and stored[2] and has_entry
        match self.settings.update:
            case "missing":
                return not exact
            case "changed":
                return exact and verdict.outcome == "FAIL"
            case "all":
                return True
            case None:
                return False

    def _update_file(self, case: Case) -> BaselineFile:
        gpu = self._baseline_gpus(case)[0]
        key = (gpu, case.backend, case.subject.name)
        if key not in self.updates:
            found = baselines.load(self.baseline_folder, gpu, case.backend, case.subject.name)
            self.updates[key] = found or baselines.new_file(gpu, case.backend, case.subject.name)
        self._fresh_updates[key] = None
        return self.updates[key]

    def _update_case(self, case: Case) -> CaseBaseline:
        file = self._update_file(case)
        return file.cases.setdefault(case.key, CaseBaseline(baseline_positions=case.baseline_positions))

    def write_baselines(self) -> list[Path]:
        """Write what --nfp-update collected; the paths whose text changed."""
        return baselines.write(self.baseline_folder, [(backend, f) for (_, backend, _), f in self.updates.items()])

    def baseline_changes(self) -> list[str]:
        """What --nfp-update is about to change, in meaning, by file."""
        lines = []
        for (gpu, backend, subject), file in self.updates.items():
            old = baselines.load(self.baseline_folder, gpu, backend, subject)
            if said := baselines.difference(old, file):
                lines += [
                    str(baselines.path_of(self.baseline_folder, gpu, backend, subject)),
                    *(f"  {s}" for s in said),
                ]
        return lines

    def absorb_updates(self, files: Sequence[dict[str, Any]]) -> None:
        """Take over what a worker collected: its entries are added to those already here."""
        for data in files:
            backend = parse_any_backend(data["backend"])
            file = BaselineFile.model_validate(data)
            mine = self.updates.setdefault((file.gpu, backend, file.subject), file)
            mine.granularity |= file.granularity
            mine.provenance |= file.provenance
            for key, entry in file.cases.items():
                known = mine.cases.setdefault(key, entry)
                known.predicted = entry.predicted or known.predicted
                known.measured = entry.measured or known.measured

    def add_case(self, record: CaseRecord) -> None:
        """Take over a case's record, from here, from a worker or from an earlier run."""
        self.cases[record.id] = records.merge_case(self.cases.get(record.id), record)

    def _note(
        self,
        case: Case,
        question: Question,
        verdict: Verdict,
        predicted: Predicted | None = None,
        granularity: Granularity | None = None,
        curve: Curve | None = None,
        boundary: Boundary | None = None,
    ) -> Verdict:
        record = CaseRecord(
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
            baseline=self._held(case),
            kind="predicted",
            outcome=verdict.outcome,
            tests={question: _test_of(verdict)},
            baseline_positions=case.baseline_positions,
        )
        if predicted is not None:
            record.n_idle = None if predicted.n_idle is None else records.finite(predicted.n_idle)
            record.n_idle_unbounded = predicted.n_idle is not None and record.n_idle is None
            record.predicted = predicted.as_dict()
            record.basis = predicted.basis
            n_max = predicted.principle or predicted.tile_roofline
            record.n_max = None if n_max is None else n_max.n_max
        if granularity is not None:
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
        if curve is not None:
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
        self.add_case(records.summarise(record))
        self._fresh[record.id] = None
        return verdict

    def _held(self, case: Case) -> Held | None:
        """What the baseline says of a case, for a report that shows both."""
        stored = self.baseline(case)
        if stored is None:
            return None
        file, name, is_exact = stored
        tiles, known = file.granularity.get(granularity_key(case)), file.cases.get(case.key)
        if tiles is None and known is None:
            return None
        held = Held(name=name, exact=is_exact)
        if tiles is not None:
            held.kernel, held.tiles, held.choice = tiles.kernel, list(tiles.tiles), tiles.choice
        if known is not None and known.predicted is not None:
            held.predicted = known.predicted.as_dict()
        if known is not None and (m := known.measured) is not None:
            held.kind, held.n_max, held.n_max_interval, held.curve = m.kind, m.n_max, m.interval, list(m.curve)
            held.timer = m.timer
        return held

    def records(self) -> list[Record]:
        """One record for each GPU of the run, its cases in the order they were met."""
        out = []
        for gpu in dict.fromkeys(c.gpu for c in self.cases.values()):
            machine = self.machines.get(gpu, {})
            cases = [c for c in self.cases.values() if c.gpu == gpu]
            if gpu != "cpu" and not any(c.kind == "measured" for c in cases):
                machine = {"title": f"{catalog.gpu(gpu).title}: nothing was measured here"}
            out.append(
                Record(
                    schema=records.SCHEMA,
                    tool=f"pytest-nfp {__version__}",
                    gpu=gpu,
                    started=self.started,
                    partial=self.partial,
                    tolerance=self.settings.tolerance,
                    match_tolerance=self.settings.match_tolerance,
                    protocol=self.settings.protocol,
                    seed=self.settings.seed,
                    machine=machine,
                    cases=cases,
                )
            )
        return out


def granularity_key(case: Case) -> str:
    """The name of a map inside a baseline file: moe-bf16, with k where the subject sweeps it, or where it is not the model's own."""
    moe = case.subject.moe
    sweeps_k = moe is not None and case.top_k is not None and (len(case.subject.top_k) > 1 or case.top_k != moe.top_k)
    return f"{case.module}-{case.dtype}" + (f"-k{case.top_k}" if sweeps_k else "")


def reach_of(stored: tuple[BaselineFile, str, bool] | None, case: Case, granularity: Granularity) -> int | None:
    """The row count of the map at which its last measured boundary was decided; None where one of its cases was never measured.

    Rows are b * N tokens of experts, and N of a request for attention, times the group where its heads are packed into them.
    """
    if stored is None:
        return None
    attention, found = case.subject.attention, []
    for key, c in stored[0].cases.items():
        said = read_key(key)
        if said is None or (said["module"], said["dtype"], said["top_k"]) != (case.module, case.dtype, case.top_k):
            continue
        if c.measured is None or c.measured.interval[1] is None:
            return None
        rows = c.measured.interval[1] + 1
        if case.module == "attention":
            found.append(rows * (attention.group if granularity.packed and attention is not None else 1))
        else:
            found.append(rows * said["batch"])
    return max(found, default=None)


def _installed(framework: str) -> str | None:
    """The installed release: of a framework that the project names, or of the package that registers another one."""
    if framework in OURS:
        return artifacts.installed_release(framework)
    return registry.release(framework)


def _check_trace(case: Case) -> None:
    """Raise UnknownName for a trace of another model than the case's."""
    if isinstance(case.routing, Replay) and case.subject.moe is not None and case.top_k is not None:
        try:
            case.routing.check(case.subject.moe.experts, case.top_k)
        except ValueError as error:
            raise UnknownName(f"--nfp-routing, for {case.subject.name}: {error}") from None


def _first_wrong(prepared: backends.Prepared, grid: Sequence[int], base: int) -> str:
    """What is wrong with a result, at N0 and at a few more positions; empty where they are right, or have no reference."""
    if prepared.check is None:
        return ""
    for n in dict.fromkeys((base, max(n for n in grid if n <= max(base, CHECKED)))):
        try:
            wrong = prepared.check(n)
        except (*REFUSALS, backends.Unsupported):
            continue  # The sweep meets the same refusal, and caps N_max there.
        if wrong:
            return f"N={n}: {prepared.kernel} computes something else: {wrong}"
    return ""


def _own_time(run: Callable[[], object]) -> float:
    """Microseconds that a run returns of itself."""
    found = run()
    assert isinstance(found, float)
    return found


def _test_of(verdict: Verdict) -> TestResult:
    return TestResult(outcome=verdict.outcome, reasons=list(verdict.reasons), held_to=list(verdict.held_to))


def _nothing(case: Case, device: Device) -> Curve:
    """A measured curve without a point."""
    return Curve((), case.baseline_positions, "measured", device.title, "", timer=device.timer)


def _with_engine(device: Device, process: Callable[[], tuple[int, float]]) -> Callable[[], Reading]:
    """The device's readings, in which the process of the engine is this run's own."""

    def read() -> Reading:
        reading, (pid, own_s) = device.read(), process()
        return replace(reading, own_s=reading.own_s + own_s, others=tuple(p for p in reading.others if p != pid))

    return read


def _with_modes(curve: Curve, prepared: backends.Prepared, device: Device) -> Curve:
    """The curve with the graph mode of every N: as an engine says of itself, if it does; of a kernel, as the GPU's timer makes it."""
    modes = prepared.modes() if prepared.modes is not None else {}
    if not modes and device.gpu != "cpu" and not prepared.own_timer:
        modes = {p.positions: "graph" if device.timer == GRAPH_TIMER else "eager" for p in curve.points}
    mixed = trust.graph_modes(modes)
    padded = prepared.padded() if prepared.padded is not None else {}
    return replace(curve, modes=modes, padded=padded, invalid=(*curve.invalid, mixed) if mixed else curve.invalid)


def _proven(case: Case, curve: Curve, prepared: backends.Prepared) -> Curve:
    """The curve of a full model with what its forwards were seen to process; invalid where that is not b*N over L tokens.

    So is one whose layers read other experts than the routing gives: dummy weights send every token to the same few.
    """
    if prepared.proof is None:
        return curve
    seen = prepared.proof()
    host = prepared.host() if prepared.host is not None else {}
    measured = [p.positions for p in curve.points]
    wrong = []
    for n in measured:
        wanted = (case.batch * n, case.batch * (case.context or 0))
        if seen.get(n) != wanted:
            had = f"{seen[n].tokens} over {seen[n].cached}" if n in seen else "nothing that was seen"
            wrong.append(f"N={n}: {had} cached tokens were processed, not {wanted[0]} over {wanted[1]}")
    moe, top_k = case.subject.moe, case.top_k
    if moe is not None and top_k is not None and (case.routing in ROUTINGS or isinstance(case.routing, Replay)):
        for n in measured:
            expected = active_experts(case.routing, case.batch * n, moe.experts, top_k)
            if curve.active_experts.get(n) != expected:
                read = curve.active_experts.get(n)
                wrong.append(
                    f"N={n}: {read} experts were read, {expected:g} in every layer are those of {case.routing} routing"
                )
    return replace(
        curve,
        invalid=(*curve.invalid, *wrong[:1]),
        proof={n: (seen[n].tokens, seen[n].cached) for n in measured if n in seen},
        # The step as its forward and what was taken beside it in the same runs: medians of both apart could cross.
        steps={p.positions: round(p.latency_us + host[p.positions], 1) for p in curve.points if p.positions in host},
    )


def _setting(setting: Callable[[int], dict[str, Any]], positions: int) -> str:
    """ "BLOCK_SIZE_M=16 BLOCK_SIZE_N=64", in the order of their names."""
    return " ".join(f"{name}={value}" for name, value in sorted(setting(positions).items()))


def positions_to_measure(case: Case, granularity: Granularity | None) -> list[int]:
    """N0, the default grid, and the map's edges (edge, edge + 1) in positions as far as the grid reaches."""
    base = case.baseline_positions
    grid = {base, *(n for n in GRID if n >= base), *(base * f for f in (2, 3, 4, 6, 8, 12, 16) if base > 1)}
    if case.module == "attention":
        grid |= {96, 128, LONG_CURVE - 1, LONG_CURVE}
    end = max(grid)
    if granularity is not None and granularity.has_tiles:
        for last in edge_positions(case, granularity):
            grid |= {n for n in (last, last + 1) if base <= n <= end}
        if case.module == "attention":
            # The end of the first tile: the next query row begins another one.
            group = case.subject.attention.group if granularity.packed and case.subject.attention else 1
            tile = granularity.tile(base * group) // group
            grid |= {n for n in (tile, tile + 1) if base <= n <= end}
    if isinstance(case.routing, Replay):
        grid = {n for n in grid if n * case.batch <= len(case.routing.tokens)} | {base}
    if base > 1:
        # Below N0 the curve shows how coverage grows; it takes no part in the boundary.
        grid |= {n for n in (1, 2, 4) if n < base}
    return sorted(grid)


def composed_record(found: composition.Composition) -> dict[str, Any]:
    """A composition as the record holds it: both boundaries, the part that limits, and each part's time at N0 and past it."""
    return {
        "n_max": found.boundary.n_max,
        "n_max_interval": list(found.boundary.n_max_interval),
        "error": round(found.error, 4),
        "steps": found.steps,
        "limiting": found.limiting,
        "rest_us": round(found.rest_us, 1),
        "curve": [[p.positions, round(p.latency_us, 1)] for p in found.points],
        "parts": {name: [[n, round(us, 1)] for n, us in sorted(times.items())] for name, times in found.parts.items()},
    }


def own_case(gpu: str, name: str) -> Case:
    """The case of a forward that a user's test brings, by the test's name."""
    return Case(gpu, Backend("own", ""), "own", Model(name=name, hidden=1, source="own kernel"), "any")


def parse_any_backend(text: str) -> Backend:
    """A backend as a baseline file names it, including `own`."""
    framework, _, release = text.partition("==")
    return Backend(framework, release)


def _claimed(case: Case, curve: Curve) -> Curve:
    """The curve, invalid where its kernel streams all experts whatever N is."""
    moe, top_k = case.subject.moe, case.top_k
    if case.module != "moe" or moe is None or top_k is None:
        return curve
    idle = 1 - min(1.0, case.batch * top_k / moe.experts)
    latencies = {p.positions: p.latency_us for p in curve.points}
    reason = trust.streams_all_experts(latencies, curve.baseline_positions, idle)
    return replace(curve, invalid=(*curve.invalid, reason)) if reason else curve


__all__ = ["FileError", "Session", "UnknownName", "granularity_key", "positions_to_measure"]
