"""pytest hooks, options and fixtures. No logic: a session object, made at the first use, does the work.

This module is loaded in every pytest run with the package installed, so it imports the settings alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nfp import settings

if TYPE_CHECKING:
    from pytest_nfp.cases import Case
    from pytest_nfp.measure import Curve
    from pytest_nfp.session import Session
    from pytest_nfp.verdict import Verdict

SESSION = pytest.StashKey["Session"]()
MARKER = (
    "nfp(module, question='boundary', models=None, routing=None): parametrize the argument `case` over the catalog's"
    " cases of a module, as --nfp-gpu, --nfp-backend and --nfp-model choose them"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare --nfp-* with their ini twins."""
    settings.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Check given names before anything runs; without any option nothing else is loaded."""
    config.addinivalue_line("markers", MARKER)
    if settings.is_used(config):
        _session(config)


def _session(config: pytest.Config) -> Session:
    """The run's session, made when it is first needed. Raises UsageError for values that can't be used."""
    if SESSION not in config.stash:
        from pytest_nfp.session import FileError, Session, UnknownName

        try:
            session = Session(settings.read_settings(config), config.rootpath, _progress(config))
            session.check_names()
        except (settings.SettingError, UnknownName, FileError) as error:
            raise pytest.UsageError(f"pytest-nfp: {error}") from error
        config.stash[SESSION] = session
    return config.stash[SESSION]


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
    from pytest_nfp.session import FileError, UnknownName

    try:
        cases = _session(metafunc.config).expand(**_marker_arguments(marker))
    except (UnknownName, FileError) as error:
        raise pytest.UsageError(f"pytest-nfp: {error}") from error
    if not cases:
        nothing = pytest.mark.skip(reason=f"no case for {_words(marker)} with the GPU and backend that were asked for")
        metafunc.parametrize("case", [pytest.param(None, id="none", marks=nothing)])
        return
    metafunc.parametrize("case", cases, ids=[c.id for c in cases])


def _marker_arguments(marker: pytest.Mark) -> dict[str, Any]:
    given = {"question": "boundary", **marker.kwargs}
    names = ("module", "question", "models", "routing")
    given |= dict(zip(names, marker.args, strict=False))
    if unknown := set(given) - set(names):
        raise pytest.UsageError(
            f"pytest-nfp: @pytest.mark.nfp takes {', '.join(names)}, not {', '.join(sorted(unknown))}"
        )
    for name, values in (
        ("module", ("dense", "moe", "attention")),
        ("question", ("granularity", "prediction", "boundary")),
    ):
        if given.get(name) not in values:
            raise pytest.UsageError(
                f"pytest-nfp: @pytest.mark.nfp needs {name}= one of {', '.join(values)}, got {given.get(name)!r}"
            )
    return given


def _words(marker: pytest.Mark) -> str:
    return ", ".join([*map(str, marker.args), *(f"{k}={v}" for k, v in marker.kwargs.items())])


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


# Only the controller writes: workers hand over what they collected.


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over a worker's records (pytest-xdist)."""
    collected = getattr(node, "workeroutput", {}).get("nfp")
    if collected:
        session = _session(node.config)
        from pytest_nfp.records import CaseRecord

        for case in collected["cases"]:
            session.add_case(CaseRecord.model_validate(case))
        session.absorb_updates(collected["updates"])
        session.partial = session.partial or collected["partial"]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write baselines, records and reports, or hand them to the controller."""
    own = session.config.stash.get(SESSION, None)
    if own is None:
        return
    own.partial = own.partial or exitstatus == pytest.ExitCode.INTERRUPTED
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["nfp"] = {
            "cases": [c.model_dump(mode="json") for c in own.cases.values()],
            "updates": [f.model_dump(mode="json", by_alias=True) for f in own.updates.values()],
            "partial": own.partial,
        }
        return
    if not own.cases:
        return
    from pytest_nfp.report import write_reports

    own.written_baselines = own.write_baselines()
    if own.settings.report is not None:
        own.written_reports = write_reports(session.config.rootpath / own.settings.report, own.records())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """A row a case, and where the reports are."""
    own = config.stash.get(SESSION, None)
    if own is None or not own.cases or hasattr(config, "workeroutput"):
        return
    from pytest_nfp.report.terminal import summary_lines

    for record in own.records():
        terminalreporter.section(f"near-free parallelism: {record.gpu}")
        for line in summary_lines(record, terminalreporter.verbosity):
            terminalreporter.write_line(line)
    for path in own.written_baselines:
        terminalreporter.write_line(f"baseline written: {path}")
    for path in own.written_reports:
        terminalreporter.write_line(f"report: {path}")
