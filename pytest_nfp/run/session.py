"""One run, as the plugin holds it: its settings, what its cases stand on, and what came out. No pytest here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_nfp import __version__
from pytest_nfp.baselines.updates import Updates
from pytest_nfp.cases import Case, Module
from pytest_nfp.catalog import UnknownName
from pytest_nfp.curves import Curve
from pytest_nfp.files import FileError
from pytest_nfp.interpreted import Executed
from pytest_nfp.records import Question, journal
from pytest_nfp.records.build import interpreted_record
from pytest_nfp.run import own_kernel, questions, selection
from pytest_nfp.run.inputs import FindDevice, Inputs, device_here
from pytest_nfp.run.results import Results
from pytest_nfp.settings import Settings
from pytest_nfp.verdict import Verdict

__all__ = ["FileError", "Session", "UnknownName"]


@dataclass
class Session:
    """A run. Names are checked first, then cases are selected and asked their questions."""

    settings: Settings
    root: Path
    """The project's folder."""
    say: Callable[[str], None] = lambda text: None
    """Gets a line of progress now and then."""
    find_device: FindDevice = device_here
    inputs: Inputs = field(init=False)
    results: Results = field(init=False)
    journal_path: Path | None = None
    written_baselines: list[Path] = field(default_factory=list)
    written_reports: list[Path] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    """What could not be written, and what that means."""

    def __post_init__(self) -> None:
        self.inputs = Inputs(self.settings, self.root, self.say, self.find_device)
        self.results = Results(self.inputs, Updates(self.inputs.baseline_folder))

    def check_names(self) -> None:
        """Raise UnknownName or FileError for anything given that does not exist, before anything runs."""
        selection.check_names(self.inputs)

    def select(
        self,
        question: Question,
        module: Module,
        models: Sequence[str] | None = None,
        routing: Sequence[str] | None = None,
    ) -> list[Case]:
        """The cases of a module to which a question applies. Raises UnknownName."""
        return selection.select(self.inputs, question, module, models, routing)

    def why_nothing(
        self,
        question: Question,
        module: Module,
        models: Sequence[str] | None = None,
        routing: Sequence[str] | None = None,
    ) -> str:
        """Why `select` found no case, for the reader of a skipped test."""
        return selection.why_nothing(self.inputs, question, module, models, routing)

    def check_granularity(self, case: Case) -> Verdict:
        """Does this release still map tokens to the same tiles, through the same kernel?"""
        return questions.check_granularity(self.results, case)

    def check_prediction(self, case: Case) -> Verdict:
        """Is the predicted N_max what the baseline says?"""
        return questions.check_prediction(self.results, case)

    def check_boundary(self, case: Case) -> Verdict:
        """Does the curve leave the tolerance where prediction and baseline say?"""
        return questions.check_boundary(self.results, case)

    def sweep_own(
        self,
        make_forward: Callable[[int], Callable[[], object]],
        positions: Sequence[int] | None,
        baseline_positions: int,
        name: str,
    ) -> Curve:
        """Measure a user's own forward on the device of --nfp-gpu. Raises LookupError where it is not here."""
        return own_kernel.sweep_own(self.results, self._own_case(name), make_forward, positions, baseline_positions)

    def check_own(self, curve: Curve, granularity: int | None, name: str) -> Verdict:
        """Hold a user's curve to its granularity (N_max = rows of a tile) and to its stored baseline."""
        return own_kernel.check_own(self.results, self._own_case(name), curve, granularity)

    def _own_case(self, name: str) -> Case:
        return own_kernel.own_case(selection.gpus(self.settings)[0], name)

    def note_executed(self, executed: Executed, predicted: Mapping[int, float], module: Module, name: str) -> None:
        """Keep what a kernel executed under the interpreter beside what its map predicts."""
        gpu = selection.gpus(self.settings)[0]
        self.results.add_fresh(interpreted_record(gpu, executed, predicted, module, name))

    def run_settings(self) -> dict[str, Any]:
        """What the numbers of a run depend on: two runs that differ in it can't be joined."""
        names = ("tolerance", "match_tolerance", "protocol", "timer", "seed")
        return {name: getattr(self.settings, name) for name in names}

    def made_by(self) -> dict[str, Any]:
        """The tool and when the run began: told, and no reason not to join two runs."""
        return {"tool": f"pytest-nfp {__version__}", "started": self.results.started}

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
        self.results.past = past
        self.inputs.machines_before = past.machines
        self.results.updates.absorb(past.updates)
