"""The plugin as a user meets it: options, errors, outcomes, records, workers, cost when unused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.pytester import Pytester, RunResult

from .conftest import PROJECT

pytestmark = pytest.mark.usefixtures("offline")

SUITE = """
import pytest

@pytest.mark.nfp(module="{module}", question="{question}")
def test_it(nfp, case):
    nfp.check_{question}(case)
"""

FAKE_DEVICE = """
from pytest_nfp.testing import Noise, Simulated, staircase

device = Simulated(staircase(), Noise(0.01)).device()

def pytest_nfp_find_device(gpu, timer):
    return device, ""
"""

OWN_KERNEL = """
from pytest_nfp.testing import staircase

def test_my_attention(nfp):
    curve = nfp.sweep(lambda positions: lambda: staircase(64)(positions))
    nfp.check(curve, granularity={granularity})
"""


def suite(pytester: Pytester, question: str, module: str = "moe") -> None:
    pytester.makepyfile(**{f"test_{module}_{question}": SUITE.format(module=module, question=question)})


def run(pytester: Pytester, *arguments: str) -> RunResult:
    return pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", f"--nfp-baselines={PROJECT / 'baselines'}", *arguments
    )


def record(pytester: Pytester, gpu: str = "h20") -> dict[str, Any]:
    data: dict[str, Any] = json.loads((pytester.path / "out" / gpu / "record.json").read_text(encoding="utf-8"))
    return data


@pytest.mark.parametrize("gpu", ["h20", "a800", "h800"])
@pytest.mark.parametrize(
    ("module", "question"), [("moe", "granularity"), ("moe", "prediction"), ("attention", "granularity")]
)
def test_the_gate_passes_against_the_shipped_baselines(
    pytester: Pytester, gpu: str, module: str, question: str
) -> None:
    """Without the GPU and without an index: the table answers, the baselines hold."""
    suite(pytester, question, module)
    result = run(pytester, f"--nfp-gpu={gpu}")
    outcomes = result.parseoutcomes()
    assert set(outcomes) == {"passed"}
    assert outcomes["passed"] > 5


def test_a_boundary_without_its_device_is_skipped_with_one_reason(pytester: Pytester) -> None:
    """Every skip says the same one thing."""
    suite(pytester, "boundary", "dense")
    result = run(pytester, "--nfp-gpu=h20", "-rs")
    assert set(result.parseoutcomes()) == {"skipped"}
    reasons = {line.split(": ", 1)[1] for line in result.outlines if line.startswith("SKIPPED")}
    assert len(reasons) == 1
    assert reasons.pop().startswith("no h20 here: ")


def test_require_device_turns_those_skips_into_errors(pytester: Pytester) -> None:
    """A gate can't pass by not running."""
    suite(pytester, "boundary", "dense")
    result = run(pytester, "--nfp-gpu=h20", "--nfp-require-device")
    assert set(result.parseoutcomes()) == {"failed"}
    result.stdout.fnmatch_lines(["*no h20 here: *(an error by --nfp-require-device)*"])


def test_an_upgrade_that_changed_tiles_fails_and_says_what(pytester: Pytester) -> None:
    """From a local archive: which tokens, from which tile to which, and what that does to N_max."""
    from .granularity import releases

    archives = pytester.mkdir("archives")
    releases.vllm(archives, "99.1")
    for question in ("granularity", "prediction"):
        suite(pytester, question)
    result = run(
        pytester,
        "--nfp-gpu=h20",
        "--nfp-backend=vllm==99.1",
        f"--nfp-artifacts={archives}",
        "--nfp-model=llada-2.1-mini",
    )
    result.assert_outcomes(failed=2, passed=1)  # the skewed prediction stays: one tile of 16 rows
    result.stdout.fnmatch_lines(
        [
            "granularity changed against the baseline of vllm==0.9.1: 33..96 tokens: 16 to 32 rows; 97..256 tokens: 16 to 64 rows;"
            " N_max 256 to 32 by the principle (branch limits)*",
            "prediction changed against the baseline of vllm==0.9.1: N_max 256 to 32 by the principle*because of 33..96 tokens*",
        ]
    )


UNKNOWN_RULE = (
    "--nfp-gpu=h20",
    "--nfp-backend=vllm==0.32.0",
    "--nfp-backend=sglang==0.5.9",
    "--nfp-model=llada-2.1-mini",
    "-rs",
)


def test_an_unknown_rule_is_undecided_and_the_other_cases_go_on(pytester: Pytester) -> None:
    """Not installed, no index, not in the table: the gate fails, as the baseline knew it, and says how to skip it; SGLang's cases run."""
    suite(pytester, "granularity")
    result = run(pytester, *UNKNOWN_RULE)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "UNDECIDED: the rule is unknown: vllm is not installed*no-index*(the baseline knew it: --nfp-undecided=skip skips it)"
        ]
    )


def test_an_undecided_test_is_what_the_run_asks_for(pytester: Pytester) -> None:
    """Skipped by --nfp-undecided=skip; by fail, each undecided test fails, also one that no baseline knew."""
    suite(pytester, "granularity")
    run(pytester, *UNKNOWN_RULE, "--nfp-undecided=skip").assert_outcomes(passed=1, skipped=1)
    empty = pytester.mkdir("empty")
    nothing_known = (*UNKNOWN_RULE, f"--nfp-baselines={empty}")
    run(pytester, *nothing_known).assert_outcomes(passed=1, skipped=1)
    result = run(pytester, *nothing_known, "--nfp-undecided=fail")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["UNDECIDED: the rule is unknown*(asked for by --nfp-undecided=fail)"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nfp-gpu=h21"], "unknown GPU 'h21'; did you mean"),
        (["--nfp-gpu=h20", "--nfp-model=lada"], "unknown model 'lada'; did you mean llada-2.1-mini"),
        (["--nfp-backend=vlm==1"], "unknown backend 'vlm==1'; did you mean vllm"),
        (["--nfp-backend=vllm==new"], "unknown release 'new' of vllm: not a version"),
        (["--nfp-measure=maybe"], "--nfp-measure=maybe (from the command line): must be one of auto"),
        (["--nfp-tolerance=-1"], "must be a share between 0 and 10"),
        (["--nfp-batch=1,0"], "must be whole numbers of at least 1"),
        (["--nfp-context=4k"], "must be whole numbers of at least 1"),
        (["--nfp-top-k="], "must be whole numbers of at least 1"),
        (["--nfp-seed=x"], "--nfp-seed=x"),
    ],
)
def test_bad_values_end_the_run_before_anything_runs(pytester: Pytester, arguments: list[str], message: str) -> None:
    """Exit 4, the value, its near matches."""
    suite(pytester, "prediction")
    result = run(pytester, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in "\n".join(result.errlines)


def test_a_broken_baseline_fails_with_file_line_and_field(pytester: Pytester) -> None:
    """What was wrong, where."""
    suite(pytester, "prediction")
    path = pytester.path / "b" / "h20" / "vllm-0.9.1" / "llada-2.1-mini.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(
        "schema: 1\ngpu: h20\nbackend: vllm==0.9.1\nsubject: llada-2.1-mini\ncases:\n  a: {baseline_positions: -1}\n"
    )
    result = run(pytester, "--nfp-gpu=h20", f"--nfp-baselines={pytester.path / 'b'}", "--nfp-model=llada-2.1-mini")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*llada-2.1-mini.yaml:6: cases.a.baseline_positions: *greater than 0*"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_options_come_from_environment_and_ini_in_that_order(
    pytester: Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Command line, then environment, then ini."""
    suite(pytester, "prediction", "dense")
    pytester.makeini("[pytest]\nnfp_gpu = h800\n")
    assert "near-free parallelism: h800" in run(pytester).stdout.str()
    monkeypatch.setenv("NFP_GPU", "a800")
    assert "near-free parallelism: a800" in run(pytester).stdout.str()
    assert "near-free parallelism: h20" in run(pytester, "--nfp-gpu=h20").stdout.str()


def test_updates_write_what_is_missing_and_then_nothing(pytester: Pytester) -> None:
    """missing fills a folder; a second run, of any verb, changes no byte; changed mends what failed."""
    suite(pytester, "prediction")
    suite(pytester, "granularity")
    pytester.mkdir("b")
    arguments = [
        "--nfp-gpu=h20",
        "--nfp-baselines=b",
        "--nfp-backend=vllm==0.9.1",
        "--nfp-model=llada-2.1-mini",
    ]

    def update(verb: str) -> tuple[str, RunResult]:
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments, f"--nfp-update={verb}")
        return (pytester.path / "b/h20/vllm-0.9.1/llada-2.1-mini.yaml").read_text(encoding="utf-8"), result

    first, result = update("missing")
    result.stdout.fnmatch_lines(["baseline written: *llada-2.1-mini.yaml"])
    shipped = (PROJECT / "baselines/h20/vllm-0.9.1/llada-2.1-mini.yaml").read_text(encoding="utf-8")
    assert first == shipped
    for verb in ("missing", "changed", "all"):
        text, result = update(verb)
        assert text == first
        result.stdout.no_fnmatch_line("baseline written*")
    path = pytester.path / "b/h20/vllm-0.9.1/llada-2.1-mini.yaml"
    path.write_text(first.replace("[1, 256, 16]", "[1, 256, 32]"), encoding="utf-8")
    assert pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments).ret == pytest.ExitCode.TESTS_FAILED
    assert update("changed")[0] == first


def test_a_missing_baseline_says_so_and_fails_on_request(pytester: Pytester) -> None:
    """No failure by itself."""
    suite(pytester, "prediction")
    pytester.mkdir("b")
    arguments = ["--nfp-gpu=h20", "--nfp-baselines=b", "--nfp-backend=vllm==0.9.1", "--nfp-model=llada-2.1-mini"]
    run_here = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments, "-v")
    run_here.assert_outcomes(passed=2)
    run_here.stdout.fnmatch_lines(["*no baseline for this case: nothing is held to it*"])
    pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments, "--nfp-require-baseline").assert_outcomes(
        failed=2
    )


def test_recorded_curves_are_judged_and_named(pytester: Pytester) -> None:
    """H200 without an H200: kind recorded, source, release and kernel, the interval of the grid."""
    suite(pytester, "boundary")
    result = run(
        pytester, "--nfp-gpu=h200", "--nfp-measure=recorded", "--nfp-model=llada-2.1-mini", "--nfp-report=out",
        "--nfp-backend=vllm==0.24.0", "--nfp-backend=sglang==0.5.14",
    )  # fmt: skip
    result.assert_outcomes(passed=2, skipped=2)
    cases = {c["id"]: c for c in record(pytester, "h200")["cases"]}
    vllm = cases["h200-vllm==0.24.0-llada-2.1-mini-moe-bf16-b1-k8-balanced"]
    assert (vllm["kind"], vllm["n_max"], vllm["n_max_interval"], vllm["outcome"]) == (
        "recorded",
        512,
        [512, 767],
        "PASS",
    )
    assert vllm["source"].startswith("aiconfigurator-core 0.12.0")
    assert vllm["kernel"] == "vllm_unquantizedfusedmoe_triton_tritonexperts"
    assert "deviates, as the baseline says" in vllm["reasons"][0]
    assert vllm["predicted"]["principle"] == {"n_max": 32, "limiting": "branch"}
    skewed = cases["h200-vllm==0.24.0-llada-2.1-mini-moe-bf16-b1-k8-skewed"]
    assert (skewed["kind"], skewed["curve"]) == ("predicted", [])


def test_a_kernel_of_ones_own_gets_a_curve_and_a_verdict(pytester: Pytester) -> None:
    """The fixture alone: sweep, check, PASS at the right granularity, FAIL at a wrong one."""
    pytester.makeconftest(FAKE_DEVICE)
    for granularity, expected in ((64, {"passed": 1}), (16, {"failed": 1})):
        pytester.makepyfile(test_own=OWN_KERNEL.format(granularity=granularity))
        result = run(pytester, "--nfp-gpu=cpu", "--nfp-report=out")
        result.assert_outcomes(**expected)
    found = record(pytester, "cpu")["cases"][0]
    assert (found["kind"], found["n_max"], found["n_max_interval"]) == ("measured", 64, [64, 64])
    assert "measured N_max 64, principle 16: they differ" in found["reasons"][0]


def test_a_kernel_of_ones_own_is_held_to_its_stored_baseline(pytester: Pytester) -> None:
    """Without a granularity the stored boundary is what it is held to."""
    pytester.makeconftest(FAKE_DEVICE)
    pytester.mkdir("b")
    pytester.makepyfile(test_own=OWN_KERNEL.format(granularity=None))
    arguments = ["--nfp-gpu=cpu", "-p", "no:cacheprovider", "--nfp-baselines=b"]
    pytester.runpytest_inprocess(*arguments).assert_outcomes(skipped=1)
    pytester.runpytest_inprocess(*arguments, "--nfp-update=missing").assert_outcomes(passed=1)
    pytester.runpytest_inprocess(*arguments).assert_outcomes(passed=1)
    pytester.makepyfile(test_own=OWN_KERNEL.format(granularity=None).replace("staircase(64)", "staircase(16)"))
    result = pytester.runpytest_inprocess(*arguments)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*N_max shrank against the baseline: 64 to 16*"])


def test_ctrl_c_keeps_what_was_measured_in_a_partial_record(pytester: Pytester) -> None:
    """One test done, the next interrupted inside its sweep: both are in the record, which says it is partial."""
    pytester.makeconftest(FAKE_DEVICE)
    pytester.makepyfile(
        """
        from pytest_nfp.testing import staircase

        def test_one(nfp):
            nfp.check(nfp.sweep(lambda n: lambda: staircase(64)(n)), granularity=64)

        def test_two(nfp):
            calls = iter(range(10**9))

            def forward():
                if next(calls) > 150:
                    raise KeyboardInterrupt
                return 100.0

            nfp.sweep(lambda n: forward)
        """
    )
    result = pytester.runpytest_subprocess(
        "-p", "no:cacheprovider", "--nfp-gpu=cpu", "--nfp-report=out", f"--rootdir={pytester.path}"
    )
    assert result.ret == pytest.ExitCode.INTERRUPTED
    data = record(pytester, "cpu")
    assert data["partial"]
    outcomes = {c["subject"]: (c["outcome"], len(c["curve"]) > 2) for c in data["cases"]}
    assert outcomes == {"test_one": ("PASS", True), "test_two": ("UNDECIDED", True)}
    assert "Partial, the run was interrupted" in (pytester.path / "out/cpu/index.html").read_text(encoding="utf-8")


def test_under_xdist_the_controller_writes_one_record_and_the_baselines(pytester: Pytester) -> None:
    """Two workers, the same record as one process, and each baseline written once."""
    for question in ("granularity", "prediction"):
        suite(pytester, question)
    pytester.mkdir("b")
    arguments = [
        "--nfp-gpu=h20",
        "--nfp-report=out",
        "--nfp-baselines=b",
        "--nfp-backend=vllm==0.9.1",
        "--nfp-update=missing",
    ]
    pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)
    alone, files = record(pytester), sorted((pytester.path / "b").rglob("*.yaml"))
    texts = [f.read_text(encoding="utf-8") for f in files]
    for f in files:
        f.unlink()
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments, "-n", "2")
    assert result.ret == 0
    together = record(pytester)
    assert sorted(c["id"] for c in together["cases"]) == sorted(c["id"] for c in alone["cases"])
    assert {c["id"]: c["predicted"] for c in together["cases"]} == {c["id"]: c["predicted"] for c in alone["cases"]}
    assert [f.read_text(encoding="utf-8") for f in files] == texts


def test_a_marker_that_means_nothing_is_a_usage_error(pytester: Pytester) -> None:
    """The wrong word, and the words that there are."""
    suite(pytester, "prediction", "moe")
    pytester.makepyfile(test_bad=SUITE.format(module="mole", question="prediction"))
    result = run(pytester, "--nfp-gpu=h20")
    assert "needs module= one of dense, moe, attention, model, got 'mole'" in result.stdout.str() + result.stderr.str()


UNUSED = """
import sys, pytest
code = pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1]])
heavy = ("torch", "numpy", "yaml", "jinja2", "pydantic", "scipy", "packaging.version")
ours = [m for m in sys.modules if m.startswith("pytest_nfp") and m not in ("pytest_nfp", "pytest_nfp.plugin", "pytest_nfp.settings")]
print("LOADED", code, [m for m in heavy[:-1] if m in sys.modules] + ours)
"""


def test_unused_it_loads_nothing_and_prints_nothing(tmp_path: Path) -> None:
    """A bare pytest run imports no torch, numpy, yaml, jinja2 or pydantic for us, and no report appears."""
    (tmp_path / "test_a.py").write_text("def test_a(): pass\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", UNUSED, str(tmp_path)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "LOADED 0 []" in done.stdout.replace("ExitCode.OK", "0")
    assert "near-free" not in done.stdout


def test_help_teaches_every_option(pytester: Pytester) -> None:
    """Each option with its meaning."""
    text = pytester.runpytest_inprocess("--help").stdout.str()
    from pytest_nfp.settings import OPTIONS

    for option in OPTIONS:
        assert f"--nfp-{option.name}" in text
        assert option.help
