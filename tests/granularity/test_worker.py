"""Whatever a worker does instead of answering is a reason, and the next question is asked of a fresh one."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_nfp.cli import main
from pytest_nfp.granularity import evaluator, worker
from pytest_nfp.granularity.evaluator import Answer
from pytest_nfp.granularity.maps import RuleUnknown

from . import releases

RUNS = '"runs": [[1, [16, null, null, ""]]]'
START = (
    'import json, os, sys, time\ngiven = json.loads(sys.stdin.read())\nprint(json.dumps({"walls": {}}), flush=True)\n'
)


@pytest.fixture(autouse=True)
def an_empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, count: int = 1) -> list[Any]:
    """What is made of a worker with this code, and how often it was started."""
    script = tmp_path / "worker.py"
    script.write_text(START + code)
    monkeypatch.setattr(worker, "SANDBOX", script)
    monkeypatch.setattr(worker, "SILENT_S", 0.6)
    evaluator._sandbox_digest.cache_clear()
    try:
        return list(evaluator.evaluate([{"origin": "index", "number": i, "code": code} for i in range(count)]))
    finally:
        evaluator._sandbox_digest.cache_clear()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("time.sleep(60)", "it wrote nothing for 0.6 s"),
        ("os._exit(3)", "it ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", "it was ended by signal 9"),
        ("sys.exit('the rule raised open')", "the rule raised open"),
        ("print('x' * (2 << 20))", "it wrote more than an answer can have"),
        ("while True: os.write(1, b'x' * 65536)", "it wrote more than an answer can have"),
        ("while True: os.write(2, b'x' * 65536)", "it wrote more than an answer can have"),
        ("print('not json')", "the rule's answer is none"),
        ("print('[1]')", "the rule's answer is none"),
        ("print('{\"number\": 0}')", "an answer is of one kind"),
        ('print(\'{"number": 1, "unknown": "x"}\')', "it answered another question than the one that was asked"),
        ('print(\'{"number": 0, "runs": [[1, ["evil", null, null, ""]]]}\')', "Input should be a valid integer"),
        ('print(\'{"number": 0, "runs": [[1, [NaN, null, null, ""]]]}\')', "the rule's answer is none"),
        ('print(\'{"number": 0, "runs": [[1, [true, null, null, ""]]]}\')', "Input should be a valid integer"),
        ('print(\'{"number": 0, "runs": [[1, [70000, null, null, ""]]]}\')', "less than or equal to 65536"),
        ('print(\'{"number": 0, "runs": []}\')', "at least 1 item"),
        ('print(\'{"number": 0, "kernel": "triton"}\')', "its answer is of another kind than the question"),
        ('print(\'{"number": 0, "unknown": "x", "more": 1}\')', "more: Extra inputs are not permitted"),
        ("print('half a line', end='', flush=True); os._exit(0)", "it left without an answer"),
        ("print(json.dumps({'number': 0, 'unknown': 'a\\x1b[31mred'}))", "a\\u001b[31mred"),
    ],
)
def test_what_is_no_answer_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, reason: str) -> None:
    """One that hangs, dies, floods a pipe, answers nonsense, another question, or of another kind."""
    (found,) = asked(monkeypatch, tmp_path, code)
    assert isinstance(found, RuleUnknown)
    assert reason in str(found)
    assert len(str(found)) < 600 and "\x1b" not in str(found)


def test_one_that_answers_twice_is_not_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which of two answers to one question the rule gave, and which something else wrote, can't be told."""
    line = f"print('{{\"number\": 0, {RUNS}}}', flush=True)\n"
    (found,) = asked(monkeypatch, tmp_path, line * 2)
    assert isinstance(found, RuleUnknown)


def test_more_lines_than_questions_end_the_reading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process can't go on by writing a line now and then."""
    (found,) = asked(monkeypatch, tmp_path, "while True: os.write(1, b'\\n'); time.sleep(0.01)")
    assert isinstance(found, RuleUnknown)


def test_a_rule_that_ends_its_process_costs_its_own_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second of three: the third is asked of a fresh process, which answers."""
    code = f"""
for number, question in enumerate(given["questions"]):
    if question["number"] == 1:
        os._exit(4)
    print('{{"number": ' + str(number) + ', {RUNS}}}', flush=True)
"""
    first, second, third = asked(monkeypatch, tmp_path, code, 3)
    assert first == third == [(1, (16, None, None, ""))]
    assert isinstance(second, RuleUnknown)


def test_a_batch_whose_rules_end_their_process_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two that end it are enough: a release whose rule loops would take its time for each question."""
    found = asked(monkeypatch, tmp_path, "os._exit(4)", 20)
    assert [str(f).count("not asked") for f in found] == [0, 0, *[1] * 18]


def test_what_ended_a_process_is_not_kept_and_an_answer_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Time may suffice on a quieter machine; a rule gives one answer."""
    counted = f"with open({str(tmp_path / 'starts')!r}, 'a') as f: f.write('x')\n"
    for code, starts in ((f"{counted}os._exit(4)", 2), (f"{counted}print('{{\"number\": 0, {RUNS}}}')", 1)):
        (tmp_path / "starts").write_text("")
        asked(monkeypatch, tmp_path, code)
        asked(monkeypatch, tmp_path, code)
        assert len((tmp_path / "starts").read_text()) == starts


def test_its_folder_is_its_own_and_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It starts in an empty folder with an empty environment, and leaves nothing behind."""
    code = "here = [os.getcwd(), os.listdir('.'), {k: v for k, v in os.environ.items() if k != 'LC_CTYPE'}]\n"
    code += "open('left', 'w').close()\nprint(json.dumps({'number': 0, 'unknown': json.dumps(here)}))"
    (found,) = asked(monkeypatch, tmp_path, code)
    folder, files, environment = json.loads(str(found).partition("evaluated: ")[2])
    assert (files, environment) == ([], {})
    assert folder != str(Path.cwd()) and not Path(folder).exists()


def test_a_damaged_kept_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever stands in the cache is checked as an answer is."""
    code = f"print('{{\"number\": 0, {RUNS}}}')"
    (found,) = asked(monkeypatch, tmp_path, code)
    for kept in (tmp_path / "cache").rglob("maps/*"):
        kept.write_text('{"runs": [[1, ["evil", null, null, ""]]]}')
    assert asked(monkeypatch, tmp_path, code) == [found]


def test_code_of_a_folder_needs_all_walls_or_trust(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Refused with the wall that is missing and what to do; run when it is trusted; never refused from the index."""
    code = (
        """
for number, question in enumerate(given["questions"]):
    if question["origin"] in given["trusted"]:
        print('{"number": ' + str(number) + ', """
        + RUNS
        + """}')
    else:
        print('{"number": ' + str(number) + ', "refused": "landlock: the kernel has none"}')
"""
    )
    script = tmp_path / "worker.py"
    script.write_text(START.replace('{"walls": {}}', '{"walls": {"landlock": "the kernel has none"}}') + code)
    monkeypatch.setattr(worker, "SANDBOX", script)
    monkeypatch.setattr(evaluator, "_walls", {})
    questions = [{"origin": origin} for origin in ("archive", "index", "installed")]
    archive, index, installed = (evaluator.evaluate([q])[0] for q in questions)
    assert isinstance(archive, RuleUnknown)
    assert "can't confine code from a folder (landlock: the kernel has none)" in str(archive)
    assert "--nfp-trust-artifacts" in str(archive)
    assert index == installed == [(1, (16, None, None, ""))]
    assert evaluator.walls() == {"landlock": "the kernel has none"}
    assert evaluator.missing_walls() == "rules were evaluated without landlock (the kernel has none)"


def test_json_says_which_walls_stood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the answer of a rule in a folder, when it is evaluated and when it is kept."""
    releases.vllm(tmp_path, "99.1")
    for _ in range(2):
        command = [
            "granularity",
            "vllm==99.1",
            "--gpu",
            "h20",
            "--model",
            "llada-2.1-mini",
            "--artifacts",
            str(tmp_path),
            "--json",
        ]
        assert main(command) == 0
        assert set(json.loads(capsys.readouterr().out)["walls"]) == {
            "namespaces",
            "landlock",
            "limits",
            "seccomp",
            "audit",
        }


def test_trust_is_given_and_taken_back() -> None:
    """A setting of the process: an archive is trusted only while it is given."""
    evaluator.trust_archives(True)
    assert "archive" in evaluator._trusted
    evaluator.trust_archives(False)
    assert "archive" not in evaluator._trusted


@settings(max_examples=300)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(("runs", "kernel", "number", "unknown", "x")), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_no_line_is_a_traceback(data: object) -> None:
    """Any JSON is an answer with whole positive tiles of a sane size, or refused as none."""
    try:
        found = Answer.model_validate_json(json.dumps(data))
    except ValueError:
        return
    for count, (tile, _, _, _) in found.runs or ():
        assert 1 <= tile <= evaluator.LARGEST_TILE and count >= 1


def test_a_rule_that_counts_to_a_huge_power_is_given_up_in_time() -> None:
    """9**9**9 ends at the processor time of a question, well before ten seconds."""
    question = {
        "origin": "index", "source": "def rule(M):\n    return {'BLOCK_SIZE_M': 9**9**9}\n", "file": "rule.py", "entry": "rule",
        "texts": {}, "device_name": "x", "compute_capability": [9, 0], "shared_memory_optin": 1, "triton_version": "", "environment": {},
        "arguments": {}, "counter": "M", "max_count": 1, "result": ["BLOCK_SIZE_M"],
    }  # fmt: skip
    start = time.process_time()
    (found,) = evaluator.evaluate([question])
    assert time.process_time() - start < 10
    assert isinstance(found, RuleUnknown)
    assert "did not end within 4 s of processor time" in str(found)
