"""The journal: what was finished is there after a kill, and a run that goes on measures nothing twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp import records
from pytest_nfp.files import FileError
from pytest_nfp.records import CaseRecord, journal
from pytest_nfp.records.journal import Journal, Past
from tests.conftest import PYTEST
from tests.report import made

PROJECT = Path(__file__).parents[2]

CONFTEST = """
import os, time
import pytest
from pytest_nfp.run.inputs import Inputs
from pytest_nfp.backends import Prepared
from pytest_nfp.testing import Noise, Simulated, staircase

machine = Simulated(staircase(), Noise(0.01))


def prepare(case, seed, cache_bytes):
    with open("measured.log", "a") as log:
        log.write(case.key + "\\n")
    if os.environ.get("STOP") == case.kernel + str(case.batch):
        {stop}
    return Prepared(machine.forward, 1, 100, "simulated", 1)


# Before anything is collected: this process is the test's own.
from dataclasses import replace
from pytest_nfp.predict import datasheet
figures = replace(datasheet(1e12, 1e11), describes=False, cause="simulated")
def pytest_nfp_find_device(gpu, timer):
    return machine.device(notes=dict(uuid="journal-test"), prepare=prepare), ""


Inputs.figures = lambda self, case, granularity: figures
"""
SUITE = """
import pytest

@pytest.mark.nfp(module="dense", question="boundary")
def test_it(nfp, case):
    nfp.check_boundary(case)
"""
HANG = "import time; open('hangs', 'w').close(); time.sleep(600)"
CRASH = "os.kill(os.getpid(), 9)"


def test_two_runs_in_one_folder_have_a_journal_each(tmp_path: Path) -> None:
    """The second begins beside the first, and the next run after both takes the first name again."""
    first = journal.begin(tmp_path, {"seed": 1}, Past(), None)
    second = journal.begin(tmp_path, {"seed": 2}, Past(), None)
    assert (first.path.name, second.path.name) == ("journal.jsonl", "journal-2.jsonl")
    first.close()
    second.close()
    assert [journal.read(j.path).run["seed"] for j in (first, second)] == [1, 2]
    third = journal.begin(tmp_path, {"seed": 3}, Past(), None)
    third.close()
    assert third.path == first.path


def test_the_journal_of_a_run_that_nobody_went_on_with_is_kept(tmp_path: Path) -> None:
    """Under another name; one that is gone on with is written anew where it stands, with what it held."""
    journal.begin(tmp_path, {"seed": 1}, Past(), None).close()
    path = tmp_path / "journal.jsonl"
    journal.begin(tmp_path, {"seed": 2}, Past(), None).close()
    assert journal.read(tmp_path / "journal.before.jsonl").run == {"seed": 1}
    journal.begin(tmp_path, {"seed": 2}, journal.read(path), path).close()
    assert journal.read(path).run == {"seed": 2}
    assert journal.read(tmp_path / "journal.before.jsonl").run == {"seed": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_dense.py").write_text(SUITE)
    return tmp_path


def arguments(*more: str) -> list[str]:
    return [*PYTEST, "--nfp-gpu=cpu", "--nfp-report=out", "--nfp-protocol=quick", *more]


def run(folder: Path, *more: str, stop: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"STOP": stop}
    return subprocess.run(
        arguments(*more), cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def measured(folder: Path) -> list[str]:
    return (folder / "measured.log").read_text().split()


def record(folder: Path) -> dict[str, dict[str, object]]:
    cases = json.loads((folder / "out/cpu/record.json").read_text())["cases"]
    return {c["workload"]: c for c in cases}


def test_a_run_that_is_killed_goes_on_and_measures_nothing_twice(folder: Path) -> None:
    """kill -9 in the middle of the fourth of six: three are in the journal, the second run measures the other three."""
    (folder / "conftest.py").write_text(CONFTEST.format(stop=HANG))
    process = subprocess.Popen(
        arguments(), cwd=folder, env=os.environ | {"STOP": "onednn-packed1"}, stdout=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + 60
        while not (folder / "hangs").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    first = measured(folder)
    assert len(first) == 4
    past = journal.read(folder / "out/journal.jsonl")
    assert [c.workload for c in past.cases.values()] == first[:3]
    done = run(folder, "--nfp-resume=out/journal.jsonl")
    assert "error" not in done.stdout.lower(), done.stdout
    assert measured(folder)[4:] == [first[3], *(k for k in record(folder) if k not in first)]
    assert len(record(folder)) == 6
    assert all(c["curve"] for c in record(folder).values())
    # And once more from its journal, which holds both runs: nothing is left to measure.
    again = len(measured(folder))
    run(folder, "--nfp-resume=out/journal.jsonl")
    assert len(measured(folder)) == again
    assert len(record(folder)) == 6


def test_a_worker_that_is_killed_costs_its_case_alone(folder: Path) -> None:
    """Under pytest-xdist: the other five are in the record, whichever worker they ran on."""
    (folder / "conftest.py").write_text(CONFTEST.format(stop=CRASH))
    done = run(folder, "-n", "2", stop="matmul2")
    assert "crashed while running" in done.stdout, done.stdout
    assert len(record(folder)) == 5
    assert sorted(measured(folder)) == sorted([*record(folder), "dense-fp32-matmul-b2"])


def test_a_worker_that_hangs_costs_its_case_alone(folder: Path) -> None:
    """The time limit gives it up, with the reason in the record."""
    (folder / "conftest.py").write_text(CONFTEST.format(stop="time.sleep(600)"))
    done = run(folder, "-n", "2", "--nfp-case-timeout=2", stop="matmul2")
    assert len(record(folder)) == 6, done.stdout
    hung = record(folder)["dense-fp32-matmul-b2"]
    assert hung["outcome"] == "INVALID"
    assert hung["reasons"] == ["the measurement took longer than 2 s (--nfp-case-timeout) and was given up"]


def test_a_hang_that_no_signal_reaches_ends_the_worker(folder: Path) -> None:
    """A library that blocks signals: the worker ends itself, and the others go on."""
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(600)"
    (folder / "conftest.py").write_text(CONFTEST.format(stop=block))
    done = run(folder, "-n", "2", "--nfp-case-timeout=1", stop="matmul2")
    assert "crashed while running" in done.stdout, done.stdout
    assert len(record(folder)) == 5


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--nfp-tolerance=0.1", "that run had --nfp-tolerance=0.2, this one has 0.1: they can't be joined"),
        ("--nfp-resume=nowhere.jsonl", "nowhere.jsonl: can't be read"),
    ],
)
def test_what_can_not_be_joined_is_said_before_anything_runs(folder: Path, option: str, message: str) -> None:
    """Other settings, no file."""
    (folder / "conftest.py").write_text(CONFTEST.format(stop="pass"))
    run(folder)
    before = measured(folder)
    done = run(folder, "--nfp-resume=out/journal.jsonl", option)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr + done.stdout
    assert measured(folder) == before


def test_another_machine_can_not_be_joined(folder: Path) -> None:
    """By its identity, not by what jitters."""
    (folder / "conftest.py").write_text(CONFTEST.format(stop="pass"))
    run(folder)
    path = folder / "out/journal.jsonl"
    path.write_text(path.read_text().replace('"cores": 2', '"cores": 3'))
    done = run(folder, "--nfp-resume=out/journal.jsonl")
    assert "that run was made on another machine (cores 3 to 2): start anew" in done.stdout + done.stderr


CASE = CaseRecord(
    id="i", gpu="cpu", backend="b", module="dense", subject="s", workload="w", kind="measured", outcome="PASS"
)


@given(cut=st.integers(0, 400))
def test_a_line_that_the_kill_cut_off_is_left_out(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """Whatever byte it ends at, what was whole before it is read."""
    path = tmp_path_factory.mktemp("j") / "journal.jsonl"
    writer = Journal(path, {"seed": 0}, Past())
    data = CASE.model_dump(mode="json")
    writer.append({"machines": {"cpu": {"title": "t"}}, "cases": [data, data | {"id": "j"}], "updates": []})
    writer.close()
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:-1]) + whole[-1][: min(cut, len(whole[-1]) - 1)])
    past = journal.read(path)
    assert set(past.cases) - {"j"} == {"i"}
    assert past.run == {"seed": 0}


@pytest.mark.parametrize(
    "line", ["{}", "[1]", '{"planet": {}}', '{"case": {"id": 1}}', "not json", '{"run": {}, "case": {}}']
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    """With its number; it is not the last one, so no kill explains it."""
    path = tmp_path / "journal.jsonl"
    path.write_text('{"run": {}}\n' + line + '\n{"run": {}}\n')
    with pytest.raises(FileError, match=r"journal.jsonl:2: not a line of a journal"):
        journal.read(path)


def test_what_is_resumed_is_as_old_as_it_is(tmp_path: Path) -> None:
    """A case of a time when cases did not say when they were measured has the start of its run, of a record and of a journal; one
    that says keeps it.
    """
    old, dated = measured_case("a"), measured_case("b", measured_at="2026-05-05T00:00:00+00:00")
    records.write(tmp_path / "record.json", made.record(old, dated, started="2025-01-01T00:00:00+00:00"))
    found = journal.read(tmp_path / "record.json").cases
    assert [c.measured_at for c in found.values()] == ["2025-01-01T00:00:00+00:00", "2026-05-05T00:00:00+00:00"]
    past = Past({}, {}, {c.id: c for c in (old, dated)})
    Journal(tmp_path / "journal.jsonl", {"started": "2024-01-01T00:00:00+00:00"}, past).close()
    found = journal.read(tmp_path / "journal.jsonl").cases
    assert [c.measured_at for c in found.values()] == ["2024-01-01T00:00:00+00:00", "2026-05-05T00:00:00+00:00"]


def measured_case(name: str, **changed: object) -> CaseRecord:
    return made.case(name, **{"kind": "measured", **changed})
