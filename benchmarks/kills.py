"""What a run loses when it is killed, its disk is full, or its folder is shared: python benchmarks/kills.py [rounds] [kind].

Rounds on the simulated device, of each kind: kill -9, SIGTERM and SIGINT of a run and of a worker of pytest-xdist at a random moment, a
disk that is full after a random number of bytes, a folder that can't be written to, two runs in one folder. After each the same command
goes on with --nfp-resume. Printed: finished cases lost, half-written files, stuck locks, orphans, cases measured twice; and told:
cases that had no room anywhere, as their run said.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import yaml

from pytest_nfp.files import FileError
from pytest_nfp.records import journal

ROUNDS = 50
CASE_S = 0.15
LONGEST_S = 60
CASES = 6
MARK = "NFP_KILLS_ROUND"
SUITE = """
import pytest

@pytest.mark.nfp(module="dense", question="boundary")
def test_it(nfp, case):
    nfp.check_boundary(case)
"""
CONFTEST = f"""
import os, time
from dataclasses import replace
import pytest
from pytest_nfp.backends import Prepared
from pytest_nfp.predict import datasheet
from pytest_nfp.run.inputs import Inputs
from pytest_nfp.testing import Noise, Simulated, staircase

machine = Simulated(staircase(), Noise(0.01))


def log(name, text):
    handle = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, (text + "\\n").encode())
    os.close(handle)


def prepare(case, seed, cache_bytes):
    log(os.environ["NFP_KILLS_LOGS"] + "/begun", case.id)
    time.sleep({CASE_S})
    return Prepared(machine.forward, 1, 100, "simulated", 1)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    # After the plugin's own: what is finished now must not be lost. A controller hears of its workers' tests here too.
    if report.when == "call" and "PYTEST_XDIST_WORKER" not in os.environ:
        for case in getattr(report, "nfp", {{}}).get("cases", ()):
            log(os.environ["NFP_KILLS_LOGS"] + "/finished", case["id"])


def pytest_nfp_find_device(gpu, timer):
    return machine.device(notes=dict(uuid="kills"), prepare=prepare), ""


# Nothing that a boundary could fail against: it would be measured once more.
figures = replace(datasheet(1e12, 1e11), describes=False, cause="simulated")
Inputs.figures = lambda self, case, granularity: figures
"""


class Round:
    """One folder with a suite; what is logged of it lies elsewhere, where the disk is never full."""

    def __init__(self, root: Path, number: int) -> None:
        self.folder, self.logs = root / f"round-{number}", root / f"logs-{number}"
        self.mark = f"{os.getpid()}-{number}"
        for folder in (self.folder, self.logs):
            folder.mkdir()
        (self.folder / "test_dense.py").write_text(SUITE)
        (self.folder / "conftest.py").write_text(CONFTEST)

    def start(self, *more: str, before: Callable[[], None] | None = None) -> subprocess.Popen[bytes]:
        """A run of the suite. before: what its process does before it starts."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nfp-gpu=cpu", "--nfp-report=out"]
        environment = os.environ | {MARK: self.mark, "NFP_KILLS_LOGS": str(self.logs), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.Popen(
            [*command, "--nfp-protocol=quick", *more],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=before,  # noqa: PLW1509  # no threads here
            start_new_session=True,
        )

    def logged(self, name: str) -> list[str]:
        """The ids that were begun, or finished."""
        path = self.logs / name
        return path.read_text().split() if path.exists() else []

    def processes(self) -> list[int]:
        """Those of this round that are alive, by the mark in their environment."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def journals(self) -> list[Path]:
        """Of all runs in the folder."""
        return sorted((self.folder / "out").glob("journal*.jsonl"))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    # Started in the background, this process may ignore SIGINT, and those that it starts would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kinds: dict[str, Callable[[Round, random.Random], list[str]]] = {
        **{f"{name} of the run": stopped(sig, False) for name, sig in SIGNALS.items()},
        **{f"{name} of a worker": stopped(sig, True) for name, sig in SIGNALS.items()},
        "full disk": full_disk,
        "read-only folder": read_only,
        "two runs in one folder": two_runs,
    }
    print(
        f"{'':<24} {'rounds':>6} {'hit':>4} {'finished':>8} {'lost':>5} {'half-written':>12} {'stuck':>5} {'orphans':>7} {'twice':>5} {'told':>5}"
    )
    bad = 0
    for kind, harm in kinds.items():
        if wanted not in kind:
            continue
        total: Counter[str] = Counter()
        with tempfile.TemporaryDirectory(prefix="nfp-kills-") as root:
            for number in range(rounds):
                one = Round(Path(root), number)
                draw = random.Random(f"{kind} {number}")  # a moment, not a secret
                total += Counter(count(one, harm(one, draw)))
                shutil.rmtree(one.folder, ignore_errors=True)
        print(
            f"{kind:<24} {rounds:>6} {total['hit']:>4} {total['finished']:>8} {total['lost']:>5} {total['half-written']:>12}"
            f" {total['stuck']:>5} {total['orphans']:>7} {total['twice']:>5} {total['told']:>5}",
            flush=True,
        )
        bad += sum(total[name] for name in ("lost", "half-written", "stuck", "orphans", "twice"))
    sys.exit(bool(bad))


SIGNALS = {"kill -9": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}


def stopped(sig: signal.Signals, is_worker: bool) -> Callable[[Round, random.Random], list[str]]:
    """A signal at a random moment between the first case and the last."""

    def harm(one: Round, draw: random.Random) -> list[str]:
        process = one.start(*(["-n", "2"] if is_worker else []))
        wait_for(lambda: bool(one.logged("begun")) or process.poll() is not None)
        time.sleep(draw.uniform(0, 6 * CASE_S / (2 if is_worker else 1)))
        targets = [p for p in one.processes() if p != process.pid] if is_worker else [process.pid]
        for target in draw.sample(targets, min(1, len(targets))):
            os.kill(target, sig)
        return [finish(process)]

    return harm


def full_disk(one: Round, draw: random.Random) -> list[str]:
    """No file may have more than some bytes: every write past them fails, as on a disk without room."""
    most = draw.randrange(0, 60_000)
    process = one.start(before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)))
    return [finish(process)]


def read_only(one: Round, draw: random.Random) -> list[str]:
    """The report's folder loses its write permission at a random moment. Root keeps to it without the capability to pass it over."""
    process = one.start(before=respect_modes)
    wait_for(lambda: bool(one.logged("begun")) or process.poll() is not None)
    time.sleep(draw.uniform(0, 6 * CASE_S))
    out = one.folder / "out"
    out.mkdir(exist_ok=True)
    out.chmod(0o555)
    said = finish(process)
    out.chmod(0o755)
    return [said]


def respect_modes() -> None:
    """Without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, bits 1 and 2."""
    libc = ctypes.CDLL(None)
    header, kept = struct.pack("II", 0x20080522, 0), (1 << 32) - 1 - 0b110
    if os.getuid() == 0:
        libc.capset(header, struct.pack("IIIIII", kept, kept, 0, 0xFFFF, 0xFFFF, 0))


def two_runs(one: Round, draw: random.Random) -> list[str]:
    """Both at once, of all cases; one is killed in half of the rounds."""
    first, second = one.start(), one.start()
    if draw.random() < 0.5:
        wait_for(lambda: bool(one.logged("begun")) or first.poll() is not None)
        time.sleep(draw.uniform(0, 6 * CASE_S))
        first.kill()
    return [finish(first), finish(second)]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LONGEST_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def finish(process: subprocess.Popen[bytes]) -> str:
    """What it wrote until it ended."""
    try:
        output, _ = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return f"STUCK {output.decode(errors='replace')}"
    return output.decode(errors="replace")


NO_ROOM = ("nor can the records be saved elsewhere", "--nfp-resume will lack what follows", "there is no journal")
"""What a run says that has no room for what it measured."""


def count(one: Round, said: list[str]) -> dict[str, int]:
    """What the round cost, and what going on after it measures again."""
    end = time.monotonic() + 3
    wait_for(lambda: not one.processes() or time.monotonic() > end)
    found = {"orphans": len(one.processes()), "half-written": half_written(one.folder)}
    found["stuck"] = sum(text.startswith("STUCK") or "INTERNALERROR" in text for text in said)
    finished = set(one.logged("finished"))
    found["finished"], found["hit"] = len(finished), int(0 < len(finished) < CASES)
    in_journal: dict[str, set[str]] = {}
    for path in one.journals():
        try:
            in_journal[path.name] = set(journal.read(path).cases)
        except FileError:
            found["half-written"] += 1
    kept = set().union(*in_journal.values())
    saved = [*(one.folder / "out").rglob("record.json"), *(p for text in said for p in rescued(text))]
    for path in saved:
        kept |= {c["id"] for c in json.loads(path.read_text())["cases"] if c["curve"]}
    is_told = any(words in text for text in said for words in NO_ROOM)
    found["told" if is_told else "lost"] = len(finished - kept)
    before = len(one.logged("begun"))
    options = [f"--nfp-resume=out/{journal.NAME}"] if journal.NAME in in_journal else []
    again = finish(one.start(*options))
    found["stuck"] += again.startswith("STUCK") or "INTERNALERROR" in again
    begun = one.logged("begun")[before:]
    found["twice"] = len(begun) - len(set(begun)) + len(set(begun) & in_journal.get(journal.NAME, set()))
    return found


def rescued(text: str) -> list[Path]:
    """Where a run says that it saved its records."""
    words = [Path(word.strip("',;")) for word in text.split()]
    return [
        p
        for w in words
        if w.is_absolute() and w.exists()
        for p in ([w] if w.suffix == ".json" else w.rglob("record*.json"))
    ]


def half_written(folder: Path) -> int:
    """Files that a reader would stumble over: broken JSON and YAML, and temporary files that nobody removes."""
    found = 0
    for path in folder.rglob("*"):
        if path.suffix == ".json" and path.is_file():
            try:
                json.loads(path.read_text())
            except ValueError:
                found += 1
        elif path.suffix in (".yaml", ".yml") and path.is_file():
            try:
                yaml.safe_load(path.read_text())
            except yaml.YAMLError:
                found += 1
    return found


if __name__ == "__main__":
    main()
