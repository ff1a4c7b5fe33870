"""pytest hooks, options and fixtures. No logic: a session object, made at the first use, does the work.

This module is loaded in every pytest run with the package installed, so it imports the settings alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nfp import settings

if TYPE_CHECKING:
    from pytest_nfp.cases import Case, Module
    from pytest_nfp.curves import Curve
    from pytest_nfp.devices import Device
    from pytest_nfp.interpreted import Executed
    from pytest_nfp.records import Record
    from pytest_nfp.records.journal import Journal
    from pytest_nfp.run.inputs import FindDevice
    from pytest_nfp.run.session import Session
    from pytest_nfp.verdict import Verdict

SESSION = pytest.StashKey["Session"]()
MARKER = (
    "nfp(module, question='boundary', models=None, routing=None): parametrize the argument `case` over the catalog's"
    " cases of a module, as --nfp-gpu, --nfp-backend and --nfp-model choose them"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare --nfp-* with their ini twins."""
    settings.add_options(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Give a worker its GPU, before any conftest can import a framework."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    given = early_config.known_args_namespace
    asked = getattr(given, "nfp_gpu", None) or os.environ.get("NFP_GPU") or early_config.getini("nfp_gpu")
    if not asked or asked == "cpu":
        return
    from pytest_nfp.devices import nvml, visible_devices

    visible_devices.assign(worker, os.environ, nvml.uuids())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Measurements last, otherwise in their order: a worker that waits for a device has nothing else left to do."""
    markers = {item: item.get_closest_marker("nfp") for item in items}
    if any(markers.values()):
        items.sort(key=lambda item: (m := markers[item]) is not None and _given(m)["question"] == "boundary")


class Hooks:
    """What a conftest.py may replace."""

    @pytest.hookspec(firstresult=True)
    def pytest_nfp_find_device(self, gpu: str, timer: str) -> Any:
        """The device to measure on, for a GPU's catalog name and a timer: (a Device, "") or (None, the reason).

        Return None for the device of this machine. For hardware that this package can't find, and for stand-ins.
        """


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hook."""
    pluginmanager.add_hookspecs(Hooks)


def pytest_configure(config: pytest.Config) -> None:
    """Check given names before anything runs; without any option nothing else is loaded."""
    config.addinivalue_line("markers", MARKER)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Controller(config), "nfp-controller")
    if settings.is_used(config):
        _session(config)


def _session(config: pytest.Config) -> Session:
    """The run's session, made when it is first needed. Raises UsageError for values that can't be used."""
    if SESSION not in config.stash:
        from pytest_nfp.run.session import FileError, Session, UnknownName

        try:
            session = Session(
                settings.read_settings(config), config.rootpath, _progress(config), _device_finder(config)
            )
            session.check_names()
            if session.settings.report is not None:
                _check_writable(config.rootpath / session.settings.report)
            if session.settings.resume is not None:
                session.resume(session.settings.resume)
        except (settings.SettingError, UnknownName, FileError) as error:
            raise pytest.UsageError(f"pytest-nfp: {error}") from error
        config.stash[SESSION] = session
    return config.stash[SESSION]


def _device_finder(config: pytest.Config) -> FindDevice:
    from pytest_nfp.run.inputs import device_here

    def find_device(gpu: str, timer: str) -> tuple[Device | None, str]:
        handed: tuple[Device | None, str] | None = config.hook.pytest_nfp_find_device(gpu=gpu, timer=timer)
        return device_here(gpu, timer) if handed is None else handed

    return find_device


def _check_writable(folder: Path) -> None:
    """Raise SettingError for a report that could not be written: before the run, not after hours of it."""
    from pytest_nfp.report.files import why_not_writable

    if why := why_not_writable(folder):
        raise settings.SettingError(f"--nfp-report={folder}: {why}; give another folder")


def _progress(config: pytest.Config) -> Callable[[str], None]:
    """Progress past pytest's capture: one line that is written over on a terminal, a line a case elsewhere."""
    last = ""

    def say(text: str) -> None:
        nonlocal last
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        capture = config.pluginmanager.get_plugin("capturemanager")
        if reporter is None or capture is None:
            return
        head = text.partition(": ")[0]
        with capture.global_and_fixture_disabled():
            if reporter.isatty:
                reporter.write(f"\r\x1b[K  {text[:100]}", flush=True)
            elif head != last:
                reporter.ensure_newline()
                reporter.write_line(f"  {text}", flush=True)
        last = head

    return say


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Turn a marker into cases."""
    marker = metafunc.definition.get_closest_marker("nfp")
    if marker is None or "case" not in metafunc.fixturenames:
        return
    from pytest_nfp.run.session import FileError, UnknownName

    try:
        session, asked = _session(metafunc.config), _marker_arguments(marker)
        cases = session.select(**asked)
    except (UnknownName, FileError) as error:
        raise pytest.UsageError(f"pytest-nfp: {error}") from error
    if not cases:
        nothing = pytest.mark.skip(reason=session.why_nothing(**asked))
        metafunc.parametrize("case", [pytest.param(None, id="none", marks=nothing)])
        return
    metafunc.parametrize("case", cases, ids=[c.id for c in cases])


NAMES = ("module", "question", "models", "routing")


def _given(marker: pytest.Mark) -> dict[str, Any]:
    """What a marker says, by name, with the question that it asks by default."""
    return {"question": "boundary", **marker.kwargs} | dict(zip(NAMES, marker.args, strict=False))


def _marker_arguments(marker: pytest.Mark) -> dict[str, Any]:
    given = _given(marker)
    if unknown := set(given) - set(NAMES):
        raise pytest.UsageError(
            f"pytest-nfp: @pytest.mark.nfp takes {', '.join(NAMES)}, not {', '.join(sorted(unknown))}"
        )
    for name, values in (
        ("module", ("dense", "moe", "attention", "model")),
        ("question", ("granularity", "prediction", "boundary")),
    ):
        if given.get(name) not in values:
            raise pytest.UsageError(
                f"pytest-nfp: @pytest.mark.nfp needs {name}= one of {', '.join(values)}, got {given.get(name)!r}"
            )
    return given


class Nfp:
    """The fixture: ask a case's questions, or measure and judge a forward of one's own."""

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._name = session, name

    def check_granularity(self, case: Case) -> None:
        """Fail if the release's tiles or kernel are not the baseline's."""
        self._ask(self._session.check_granularity, case)

    def check_prediction(self, case: Case) -> None:
        """Fail if the predicted N_max is not the baseline's."""
        self._ask(self._session.check_prediction, case)

    def check_boundary(self, case: Case) -> None:
        """Fail if the measured or recorded N_max is neither what is predicted nor what the baseline says."""
        self._ask(self._session.check_boundary, case)

    def sweep(
        self,
        make_forward: Callable[[int], Callable[[], object]],
        positions: Sequence[int] | None = None,
        baseline_positions: int = 1,
    ) -> Curve:
        """T(N) of a forward of one's own: make_forward(N) returns the callable that runs one forward.

        positions: the grid (default 1 to 128 with the usual tile edges). Skips where the device is not here.
        """
        try:
            return self._session.sweep_own(make_forward, positions, baseline_positions, self._name)
        except LookupError as absent:
            self._skip(str(absent))
            raise AssertionError from absent  # _skip always raises

    def check(self, curve: Curve, granularity: int | None = None) -> None:
        """Hold a curve to N_max = granularity (positions in one tile) and to the stored baseline of this test."""
        self._end(self._session.check_own(curve, granularity, self._name))

    def note_executed(self, found: Executed, predicted: Mapping[int, float], module: Module) -> None:
        """Keep what a kernel executed under Triton's interpreter (`pytest_nfp.interpreted`) in the record, beside what its map predicts."""
        self._session.note_executed(found, predicted, module, self._name)

    def _ask(self, question: Callable[[Case], Verdict], case: Case) -> None:
        from pytest_nfp.files import FileError

        try:
            verdict = question(case)
        except FileError as error:
            pytest.fail(str(error), pytrace=False)
        self._end(verdict)

    def _end(self, verdict: Verdict) -> None:
        reason = "; ".join(verdict.reasons)
        if verdict.outcome == "FAIL":
            pytest.fail(reason, pytrace=False)
        if verdict.outcome == "UNDECIDED":
            asked = self._session.settings.undecided
            if asked == "fail" or (asked is None and verdict.must_decide):
                why = (
                    "asked for by --nfp-undecided=fail"
                    if asked
                    else "the baseline knew it: --nfp-undecided=skip skips it"
                )
                pytest.fail(f"UNDECIDED: {reason} ({why})", pytrace=False)
        if verdict.outcome != "PASS":
            self._skip(f"{verdict.outcome}: {reason}" if verdict.outcome != "SKIPPED" else reason)

    def _skip(self, reason: str) -> None:
        if self._session.settings.require_device:
            pytest.fail(f"{reason} (an error by --nfp-require-device)", pytrace=False)
        pytest.skip(reason)


@pytest.fixture
def nfp(request: pytest.FixtureRequest) -> Nfp:
    """Near-free parallelism checks: nfp.check_boundary(case), or nfp.sweep(...) and nfp.check(...) for your own kernel."""
    return Nfp(_session(request.config), request.node.name)


# Only the controller writes: a worker hands over with every report what it collected, so that its end loses nothing.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put what a test collected into its report."""
    report = yield
    own = item.config.stash.get(SESSION, None)
    if own is not None:
        collected = own.results.collected()
        if collected["cases"] or collected["updates"]:
            report.nfp = collected  # type: ignore[attr-defined]  # reports carry further attributes over xdist
    return report


class Controller:
    """Takes over what reports carry, from workers or from this process, and keeps the journal."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._journal: Journal | None = None
        self._has_begun = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The journal is there before the first case, so that a run that is killed in it can be told from none."""
        if not session.config.option.collectonly and any(
            "nfp" in getattr(i, "fixturenames", ()) for i in session.items
        ):
            self._begin()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self) -> None:
        """The same where workers collect: what they run is not known here, whether an option was given is."""
        if settings.is_used(self._config):
            self._begin()

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        session = _session(self._config)
        folder = _journal_folder(self._config, session)
        if folder is None:
            return
        from pytest_nfp.records.journal import begin

        try:
            self._journal = begin(
                folder, session.run_settings() | session.made_by(), session.results.past, session.settings.resume
            )
            session.journal_path = self._journal.path
        except OSError as error:
            session.trouble.append(f"there is no journal, so a run that is killed loses what it measured: {error}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has ended, here or in a worker."""
        collected = getattr(report, "nfp", None)
        if collected is None:
            return
        session = _session(self._config)
        if hasattr(report, "node"):  # It comes from a worker.
            session.results.absorb(collected)
        self._begin()
        if self._journal is not None:
            try:
                self._journal.append(collected)
            except OSError as error:
                session.trouble.append(
                    f"the journal can't be written any more: {error}; --nfp-resume will lack what follows"
                )
                self._journal = None

    def pytest_unconfigure(self) -> None:
        """The run is over."""
        if self._journal is not None:
            self._journal.close()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over what a worker's reports did not carry (pytest-xdist)."""
    if collected := getattr(node, "workeroutput", {}).get("nfp"):
        _session(node.config).results.absorb(collected)


def _journal_folder(config: pytest.Config, session: Session) -> Path | None:
    """Beside the reports, else in pytest's cache; None where there is neither."""
    if session.settings.report is not None:
        folder: Path = config.rootpath / session.settings.report
        return folder
    cache = getattr(config, "cache", None)
    return None if cache is None else cache.mkdir("nfp")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write baselines, records and reports; a worker has handed over what it has."""
    own = session.config.stash.get(SESSION, None)
    if own is None:
        return
    own.results.is_partial = own.results.is_partial or exitstatus == pytest.ExitCode.INTERRUPTED
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["nfp"] = own.results.collected()  # a case that Ctrl-C cut off has no report
        return
    if not own.results.cases:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    changes = own.results.updates.changes()
    if changes and reporter is not None:
        from pytest_nfp.escaping import shown_line

        reporter.section("baselines")
        for line in changes:
            reporter.write_line(shown_line(line))
    try:
        own.written_baselines = own.results.updates.write()
    except OSError as error:
        own.trouble.append(f"the baselines can't be written: {error}")
    if own.settings.report is not None:
        _write_reports(own, session.config.rootpath / own.settings.report)
    if own.trouble and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _write_reports(own: Session, folder: Path) -> None:
    """The reports, or at least the records, where their folder has no room."""
    from pytest_nfp.report.files import rescue, write_reports

    runs: list[Record] = []
    try:
        runs = own.results.records()
        own.written_reports = write_reports(folder, runs)
    except Exception as error:  # Whatever a page can't be made of, what was measured must not go with it.
        try:
            own.trouble.append(f"the report can't be written: {error}; the records were saved in {rescue(runs)}")
        except OSError as again:
            own.trouble.append(f"the report can't be written: {error}; nor can the records be saved elsewhere: {again}")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A row a case, and where the reports are."""
    own = config.stash.get(SESSION, None)
    if own is None or not own.results.cases or hasattr(config, "workeroutput"):
        return
    from pytest_nfp.records.shown import shown
    from pytest_nfp.report.terminal import headline, summary_lines

    for record in own.results.records():
        terminalreporter.section(f"near-free parallelism: {record.gpu}")
        for line in [*headline(shown(record)), ""]:
            terminalreporter.write_line(line)
        for line in summary_lines(record, terminalreporter.verbosity):
            terminalreporter.write_line(line)
    for path in own.written_baselines:
        terminalreporter.write_line(f"baseline written: {path}")
    for path in own.written_reports:
        terminalreporter.write_line(f"report: {path}")
    for text in own.trouble:
        terminalreporter.write_line(f"ERROR: {text}", red=True)
    if own.results.is_partial and own.journal_path is not None:
        terminalreporter.write_line(f"go on where this run stopped: --nfp-resume={own.journal_path}")
