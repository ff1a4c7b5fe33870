"""nfp check, cost-table and table: answers, exit codes, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_nfp import catalog
from pytest_nfp.cli import main

H200 = ("--gpu", "h200", "--backend", "vllm==0.24.0", "--attention", "flash-attn==2.8.3")
pytestmark = pytest.mark.network


def answer(capsys: pytest.CaptureFixture[str], code: int, command: str, *arguments: str) -> dict[str, Any]:
    assert main([command, *H200, *arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_dense_model_verifies_eight_positions_nearly_for_free(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 0, T(8) within a few percent of T(1), headroom to N_max, and the share of each module."""
    a = answer(capsys, 0, "check", "--model", "qwen3-8b", "--positions", "8", "--accepted", "3.1")
    assert (a["outcome"], a["kind"], a["positions"]) == ("near-free", "predicted", 8)
    assert 1 <= a["ratio_to_one"] < 1.05
    assert a["headroom"] == a["n_max"] - 8
    assert a["speedup"] == pytest.approx(3.1 / a["ratio_to_one"], rel=0.01)
    assert a["utilisation"] == pytest.approx(3.1 / a["n_max"], abs=0.001)
    assert sum(a["shares"].values()) == pytest.approx(1.0, abs=0.01)


def test_far_past_the_bound_is_not_near_free_and_in_its_interval_nothing_is_decided(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit 1, and 3 where the interval of the prediction holds N."""
    far = answer(capsys, 1, "check", "--model", "qwen3-8b", "--positions", "1024")
    assert far["outcome"] == "not near-free"
    assert far["headroom"] < 0
    between = str(far["n_max"])
    assert answer(capsys, 3, "check", "--model", "qwen3-8b", "--positions", between)["outcome"] == "undecided"


def test_expected_experts_make_the_second_position_dear_and_the_cause_is_their_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """D14: 8 of 256 experts, each token its own. The second position reads 1.97 times the experts, and more would read more:
    N_max is 1 or 2, limited by the experts.
    """
    a = answer(capsys, 1, "check", "--model", "llada-2.1-mini", "--routing", "uniform", "--positions", "8")
    assert a["baseline_positions"] == 1
    assert a["n_max"] <= 2
    assert (a["limiting"], a["coverage"]) == ("experts", "growing")
    two = answer(capsys, 3, "check", "--model", "llada-2.1-mini", "--routing", "uniform", "--positions", "2")
    assert two["active_experts"] / 8 == pytest.approx(1.97, abs=0.01)


def test_a_block_that_commits_too_little_does_not_pay(capsys: pytest.CaptureFixture[str]) -> None:
    """D16's kind: T(N) grows by more than the tokens that a step commits, so the advice is none of it."""
    assert (
        main(
            [
                "check",
                *H200,
                "--model",
                "llada-2.1-mini",
                "--routing",
                "uniform",
                "--positions",
                "32",
                "--accepted",
                "2",
            ]
        )
        == 1
    )
    said = capsys.readouterr().out
    assert "it does not pay" in said
    assert "experts read: 163.3, growing" in said


def test_a_method_has_the_positions_that_its_source_states(capsys: pytest.CaptureFixture[str]) -> None:
    """LLaDA2's block of 32; a method with accepted tokens alone is refused, and so is a name that is not known."""
    a = answer(capsys, 0, "check", "--model", "llada-2.1-mini", "--method", "llada2")
    assert (a["positions"], a["coverage"]) == (32, "saturated")
    assert main(["check", *H200, "--model", "llada-2.1-mini", "--method", "lopa"]) == 2
    assert "states no positions (10.1 tokens committed a forward): give --positions" in capsys.readouterr().err
    assert main(["check", *H200, "--model", "llada-2.1-mini", "--method", "lada2"]) == 2
    assert "llada2" in capsys.readouterr().err
    assert main(["table", "--methods"]) == 0
    assert "lopa" in capsys.readouterr().out


def test_below_n0_a_forward_is_held_to_one_position(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight positions under balanced routing read 64 experts, one reads 8: no tile is filled, and it is not near-free."""
    a = answer(capsys, 1, "check", "--model", "llada-2.1-mini", "--method", "eagle-3")
    assert (a["positions"], a["baseline_positions"], a["coverage"]) == (8, 32, "growing")
    assert a["ratio_to_one"] > 1.2


@pytest.mark.parametrize("accepted", ["0", "9", "-1"])
def test_accepted_tokens_are_never_more_than_positions(capsys: pytest.CaptureFixture[str], accepted: str) -> None:
    """A step of 8 commits 8 at most: what is more was something else."""
    assert main(["check", *H200, "--model", "qwen3-8b", "--positions", "8", "--accepted", accepted]) == 2
    assert "a step of 8 positions commits more than 0 and at most 8 tokens" in capsys.readouterr().err


def test_every_method_states_a_source_and_positions_or_none() -> None:
    """No accepted tokens as positions."""
    for m in catalog.methods():
        assert m.source
        assert m.positions is None or "committed" not in m.stated


def test_a_cost_table_grows_with_batch_and_positions(capsys: pytest.CaptureFixture[str]) -> None:
    """T(N, b) with its interval, and what it is."""
    a = answer(
        capsys, 0, "cost-table", "--model", "qwen3-8b",
        *("--batch", "1", "--batch", "8", "--positions", "1", "--positions", "64"),
    )  # fmt: skip
    t = {(p["batch"], p["positions"]): p for p in a["points"]}
    assert t[1, 1]["latency_us"] < t[8, 1]["latency_us"] < t[8, 64]["latency_us"]
    assert all(p["low"] < p["latency_us"] < p["high"] for p in a["points"])
    assert (a["kind"], a["schema"], a["missing"]) == ("predicted", 1, [])


def test_a_grid_shrinks_with_the_batch_and_names_what_limits(capsys: pytest.CaptureFixture[str]) -> None:
    """Experts at short contexts, attention at long ones."""
    a = answer(capsys, 0, "table", "--model", "llada-2.1-mini", "--batch", "1", "--batch", "4")
    cells = {(c["context"], c["batch"]): c for c in a["cells"]}
    assert cells[256, 1]["n_max"] > cells[256, 4]["n_max"]
    assert (cells[256, 1]["limiting"], cells[32768, 1]["limiting"]) == ("experts", "attention")


def test_recorded_modules_are_said_to_be_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """Composed, never a measurement; a release without a table is refused by name."""
    a = answer(capsys, 0, "check", "--model", "qwen3-30b-a3b", "--positions", "16", "--recorded")
    assert a["kind"] == "composed of recorded and predicted modules"
    assert a["basis"]["experts"].startswith("recorded (aiconfigurator-core")
    assert (
        main(
            [
                "check",
                "--gpu",
                "h20",
                "--backend",
                "vllm==0.9.1",
                "--model",
                "qwen3-8b",
                "--positions",
                "8",
                "--recorded",
            ]
        )
        == 2
    )
    assert "no recording for h20" in capsys.readouterr().err


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200", "l40s"])
@pytest.mark.parametrize(
    ("model", "part"), [("qwen3-8b", "ffn down"), ("llada-2.1-mini", "experts"), ("mixtral-8x7b", "experts")]
)
def test_a_recorded_grid_says_of_each_cell_what_was_recorded(
    capsys: pytest.CaptureFixture[str], gpu: str, model: str, part: str
) -> None:
    """On every GPU with tables of one vLLM release: a part whose shape has a table is recorded, and the cell's kind says composed."""
    asked = ["--gpu", gpu, "--backend", "vllm==0.24.0", "--model", model, "--batch", "1", "--context", "512"]
    assert main(["table", *asked, "--recorded", "--json"]) == 0
    a = json.loads(capsys.readouterr().out)
    (cell,) = a["cells"]
    assert a["kind"] == cell["kind"] == "composed of recorded and predicted modules"
    assert cell["basis"][part].startswith("recorded (aiconfigurator-core")
    assert cell["n_max_interval"][0] <= cell["n_max"] <= cell["n_max_interval"][1]


def test_the_tables_are_printed_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """The lookup, and the view over generations."""
    assert main(["table", "--gpu", "a800"]) == 0
    assert "dense, b=1" in capsys.readouterr().out
    assert main(["table", "--future"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == [
        "gpu",
        "balance",
        "n",
        "idle",
        "attention",
        "n",
        "max",
        "limiting",
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["check", *H200, "--model", "llada-2.1-mini", "--top-k", "300", "--positions", "2"], "has 256 experts"),
        (["table", "--model", "qwen3-8b"], "a grid of qwen3-8b needs --gpu"),
        (["table", "--batch", "2"], "they belong to the grid of a model"),
        (
            ["check", *H200, "--model", "dense-ffn-4096x9216", "--positions", "2"],
            "--attention: no use for dense-ffn-4096x9216",
        ),
    ],
)
def test_what_can_not_be_answered_is_said(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    """Exit 2."""
    assert main(arguments) == 2
    assert reason in capsys.readouterr().err
