"""`nfp predict`: published lookups as JSON, text that teaches, errors that help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_nfp.cli import main
from pytest_nfp.recordings import tables

from .granularity import releases
from .granularity.test_attention import NEW, flashinfer

pytestmark = pytest.mark.usefixtures("offline")


def predict(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["predict", *arguments, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_dense_lookup_on_a800(capsys: pytest.CaptureFixture[str]) -> None:
    """153 of idle compute, 64 of the tile: attention limits, idle compute over-predicts 2.4x."""
    a = predict(capsys, "--gpu", "a800", "--model", "wedlm-8b", "--attention", "flash-attn==2.8.3")
    assert a["n_idle"] == pytest.approx(153, abs=0.1)
    assert a["terms"] == {"dense": 153, "moe": None, "attention": 64, "branch": None}
    assert (a["n_max"], a["limiting"]) == (64, "attention")
    assert set(a["tile_roofline"]) >= {"n_max", "limiting"}


def test_moe_lookup_on_h20(capsys: pytest.CaptureFixture[str]) -> None:
    """1445 of idle compute against 64: 23x."""
    a = predict(
        capsys, "--gpu", "h20", "--model", "llada-2.1-mini", "--backend", "vllm==0.9.1", "--attention", "flash-attn==2.8.3"
    )  # fmt: skip
    assert a["n_idle"] == pytest.approx(1445, abs=0.5)
    assert a["terms"] == {"dense": None, "moe": 512, "attention": 64, "branch": 256}
    assert (a["n_max"], a["limiting"], a["baseline_positions"]) == (64, "attention", 32)


def test_skewed_routing_is_one_tile(capsys: pytest.CaptureFixture[str]) -> None:
    """N_idle 45 on H20 whatever k; N_max 16."""
    a = predict(
        capsys, "--gpu", "h20", "--model", "llada-2.1-mini", "--backend", "vllm==0.9.1", "--attention", "flash-attn==2.8.3",
        "--routing", "skewed",
    )  # fmt: skip
    assert a["n_idle"] == pytest.approx(45.2, abs=0.05)
    assert (a["n_max"], a["limiting"]) == (16, "moe")


def test_an_unbounded_n_idle_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has no infinity: null, and the word in the text."""
    arguments = [
        "--gpu", "h800", "--model", "llada-2.1-mini", "--backend", "vllm==0.9.1", "--attention", "flash-attn==2.8.3",
        "--routing", "skewed",
    ]  # fmt: skip
    assert predict(capsys, *arguments)["n_idle"] is None
    assert main(["predict", *arguments]) == 0
    assert "N_idle unbounded" in capsys.readouterr().out


def test_flashinfer_packs_gqa_heads_into_its_tile(capsys: pytest.CaptureFixture[str]) -> None:
    """At N0 = 32 and GQA 4 the tile has 128 packed rows: 32 positions."""
    a = predict(
        capsys, "--gpu", "h20", "--model", "llada-2.1-mini", "--backend", "sglang==0.5.9", "--attention", "flashinfer==0.5.3"
    )  # fmt: skip
    assert a["terms"]["attention"] == 32
    assert a["terms"]["branch"] == 768


def test_mla_is_predicted_with_the_framework_that_has_it_and_said_to_be_missing_without(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """DeepSeek-V3 on eight ranks: 16 heads, 8 positions fill a tile of 128 rows; without FlashInfer nothing is claimed."""
    releases.vllm(tmp_path, "98.2")
    flashinfer(tmp_path, NEW)
    model = ["--gpu", "h200", "--model", "deepseek-v3", "--backend", "vllm==98.2", "--parallel", "tp8"]
    model += ["--artifacts", str(tmp_path)]
    found = predict(capsys, *model, "--attention", "flashinfer==99.1")
    assert (found["terms"]["attention"], found["not_described"]) == (8, ["attention projections"])
    found = predict(capsys, *model)
    assert (found["terms"]["attention"], found["not_described"]) == (None, ["attention", "attention projections"])
    assert main(["predict", *model, "--attention", "flash-attn==2.8.3"]) == 2
    said = "flash-attn's MLA is not described: of deepseek-v3@tp8 flashinfer-python is"
    assert said in capsys.readouterr().err


def test_a_config_json_is_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Any dense Hugging Face config by path, with the batch."""
    path = tmp_path / "config.json"
    config = {"hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32, "intermediate_size": 11008}
    path.write_text(json.dumps(config), encoding="utf-8")
    a = predict(capsys, "--gpu", "h20", "--model", str(path), "--attention", "flash-attn==2.8.3", "--batch", "2")
    assert (a["terms"]["dense"], a["limiting"]) == (18, "dense")


def test_the_text_says_every_term_and_where_the_tiles_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    """For people."""
    main(
        [
            "predict",
            "--gpu",
            "h20",
            "--model",
            "llada-2.1-mini",
            "--backend",
            "vllm==0.9.1",
            "--attention",
            "flash-attn==2.8.3",
        ]
    )
    text = capsys.readouterr().out
    for part in (
        "N_max 64, limited by attention",
        "branch         256",
        "tile roofline",
        "1..256: 16, 257..4096: 64 rows",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h21", "--model", "qwen3-8b"], "unknown GPU 'h21'"),
        (["--gpu", "h20", "--model", "qwen3-9b"], "did you mean qwen3-8b"),
        (["--gpu", "h20", "--model", "llada-2.1-mini"], "give their framework with --backend"),
        (["--gpu", "h20", "--model", "qwen3-8b"], "give --attention FRAMEWORK==RELEASE"),
        (["--gpu", "h20", "--model", "qwen3-8b", "--attention", "flash-attn"], "not installed, so give a release"),
        (
            ["--gpu", "h20", "--model", "llada-2.1-mini", "--backend", "vllm==0.9.1", "--attention", "flash-attn==2.8.3", "--top-k", "999"],
            "llada-2.1-mini has 256 experts",
        ),
        (["--gpu", "h20", "--model", "qwen3-8b", "--attention", "flash-attn==2.0.0"], "the shipped table holds no map"),
    ],
)  # fmt: skip
def test_bad_input_is_named_and_exits_2(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    """On standard error, with what to do."""
    assert main(["predict", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "--gpu", "h20", "--model", "qwen3-8b", "--top-k", "2"], "--top-k: no use for qwen3-8b, which has no experts"),
        (["predict", "--gpu", "h20", "--model", "qwen3-8b", "--experts", "8"], "--experts: no use without --curve"),
        (["predict", "--gpu", "h20", "--model", "llada-2.1-flash", "--attention", "flash-attn==2.8.3"], "no attention that is described"),
        (["predict", "--gpu", "h20", "--curve", "--attention", "flash-attn==2.8.3"], "no use with --curve"),
        (["predict", "--gpu", "h20", "--curve", "--gemm-n", "8", "--gemm-k", "8", "--top-k", "2"], "--top-k: no use for a GEMM"),
        (["predict", "--gpu", "h20", "--curve", "--model", "llada-2.1-mini", "--experts", "8"], "--experts: no use beside --model"),
        (["granularity", "flash-attn==2.8.3", "--gpu", "h20", "--experts", "8", "--heads", "8", "--head-dim", "128"], "--experts: no use for attention"),
        (["granularity", "vllm==0.9.1", "--gpu", "h20", "--model", "llada-2.1-mini", "--head-dim", "128"], "--head-dim: no use for experts"),
        (["table", "--top-k", "2", "--routing", "skewed"], "--top-k, --routing: no use without --model"),
        (["table", "--dtype", "fp8"], "--dtype: no use without --model"),
        (["table", "--future", "--gpu", "h20"], "--gpu: no use beside --future"),
        (["table", "--methods", "--future"], "--future: no use beside --methods"),
        (["table", "--gpu", "h20", "--model", "qwen3-8b", "--future"], "--future: no use beside --model"),
    ],
)  # fmt: skip
def test_an_option_without_use_is_an_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Never silence."""
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_number_that_means_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """By argparse, with the option's name."""
    with pytest.raises(SystemExit) as raised:
        main(["predict", "--gpu", "h20", "--model", "qwen3-8b", "--batch", "0"])
    assert raised.value.code == 2
    assert "--batch" in capsys.readouterr().err


RELEASE = ("--gpu", "h200", "--backend", "vllm==0.24.0")


def curve(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["predict", "--curve", *arguments, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_a_gemms_curve_by_hand_has_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """Points with their interval, N_max inside its own, and what the calibration is."""
    a = curve(capsys, "--gpu", "h200", "--gemm-n", "12288", "--gemm-k", "4096", "--end", "512")
    assert {"points", "n_max", "n_max_interval", "calibration"} <= set(a)
    assert [p[0] for p in a["points"]][:3] == [1, 2, 3]
    assert a["points"][-1][0] == 512
    assert all(low <= t <= high for _, t, low, high in a["points"])
    low, high = a["n_max_interval"]
    assert low <= a["n_max"] <= (high or 512)
    assert a["calibration"].startswith("calibrated on ")


def test_a_stand_in_is_named_and_a_gpu_without_a_calibration_has_no_interval(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """H800 by H100; H20 by H200's, carried over; FP16 by the datasheet."""
    shape = ["--gemm-n", "12288", "--gemm-k", "4096"]
    assert "h100 stands in for h800" in curve(capsys, "--gpu", "h800", *shape)["calibration"]
    h20 = curve(capsys, "--gpu", "h20", *shape)
    assert "carried over to h20" in h20["calibration"]
    fp16 = curve(capsys, "--gpu", "h20", "--dtype", "fp16", *shape)
    assert "datasheet peaks: no calibration" in fp16["calibration"]
    assert fp16["points"][0][2:] == [None, None]


def test_an_experts_curve_by_hand_is_that_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """LLaDA-2.1-mini by name and by its dimensions; past vLLM's early tile switches it stays within 20%."""
    release = ["--gpu", "h200", "--backend", "vllm==0.24.0"]
    by_hand = ["--experts", "256", "--expert-width", "512", "--hidden", "2048", "--top-k", "8"]
    a, b = curve(capsys, *release, "--model", "llada-2.1-mini"), curve(capsys, *release, *by_hand)
    assert a == b
    assert a["baseline_positions"] == 32
    # The recorded boundary is 512 [512, 767]; the closed form ends at 32.
    assert a["n_max_interval"][0] <= 512 <= (a["n_max_interval"][1] or 4096)
    assert main(["predict", "--curve", *release, "--model", "llada-2.1-mini"]) == 0
    assert "T/T(N0)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h200", "--gemm-n", "64"], "a GEMM needs both --gemm-n and --gemm-k"),
        (["--gpu", "h200", "--model", "llada-2.1-mini"], "give --backend FRAMEWORK==RELEASE"),
        (["--gpu", "h200", "--backend", "vllm==0.24.0", "--experts", "8"], "the shape is incomplete"),
        (["--gpu", "h200", "--backend", "vllm==0.24.0", "--model", "qwen3-8b"], "qwen3-8b has no experts"),
        (["--gpu", "h200", "--backend", "flash-attn==2.8.3", "--model", "llada-2.1-mini"], "is no MoE backend"),
        ([*RELEASE, "--model", "llada-2.1-mini", "--routing", "random"], "--routing unknown routing 'random'"),
        ([*RELEASE, "--model", "llada-2.1-mini", "--routing", "trace:nowhere.csv"], "nowhere.csv: can't be read"),
        ([*RELEASE, "--model", "llada-2.1-mini", "--kernel", "gemm"], "gemm is the kernel of --gemm-n and --gemm-k"),
        (["--gpu", "h200", "--gemm-n", "64", "--gemm-k", "64", "--kernel", "triton"], "--kernel triton: gemm is the"),
        ([*RELEASE, "--model", "llada-2.1-mini", "--kernel", "magic"], "unknown kernel 'magic': calibrated are"),
        ([*RELEASE, "--model", "llada-2.1-mini", "--parallel", "tp3"], "can't be cut over 3 ranks"),
    ],
)
def test_a_curve_that_is_not_described_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Exit 2."""
    assert main(["predict", "--curve", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "instead"),
    [(["--tp", "2"], "give --parallel tpN"), (["--release", "vllm==98.2"], "give the release with --backend")],
)
def test_an_option_of_before_names_the_one_in_its_place(
    capsys: pytest.CaptureFixture[str], option: list[str], instead: str
) -> None:
    """Exit 2, in one line, and the help shows the new one alone."""
    with pytest.raises(SystemExit) as end:
        main(["predict", "--gpu", "h20", *option])
    assert end.value.code == 2
    assert f"{option[0]} is gone: {instead}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["predict", "--help"])
    assert f"{option[0]} " not in capsys.readouterr().out


def test_tensor_parallelism_cuts_the_experts_of_a_curve(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Width 512 over two ranks, and width 256 whole are one shape; a kernel by name has its own calibration."""
    releases.vllm(tmp_path, "98.2")
    release = ["--gpu", "h200", "--backend", "vllm==98.2", "--artifacts", str(tmp_path)]
    by_hand = ["--experts", "256", "--hidden", "2048", "--top-k", "8"]
    cut = curve(capsys, *release, *by_hand, "--expert-width", "512", "--parallel", "tp2")
    assert cut == curve(capsys, *release, *by_hand, "--expert-width", "256")
    assert cut["kernel"] == "triton"
    other = curve(
        capsys, *release, *by_hand, "--expert-width", "256", "--dtype", "fp8", "--kernel", "flashinfer-cutlass"
    )
    assert other["kernel"] == "flashinfer-cutlass"
    assert other["points"] != cut["points"]


def test_a_replayed_trace_is_a_curve_as_far_as_it_has_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Tokens that all take the same experts are skewed routing; the curve ends with the trace."""
    trace = tmp_path / "t.csv"
    trace.write_text("".join(f"{i},0,1,2,3,4,5,6,7\n" for i in range(64)))
    model = [*RELEASE, "--model", "llada-2.1-mini"]
    replayed = curve(capsys, *model, "--routing", f"trace:{trace}")
    skewed = curve(capsys, *model, "--routing", "skewed", "--end", "64")
    assert [p[:2] for p in replayed["points"]] == [p[:2] for p in skewed["points"]]
    uniform = curve(capsys, *model, "--routing", "uniform", "--end", "64")
    assert uniform["n_max"] < skewed["n_max"]


def test_a_kernel_and_a_routing_may_be_named_as_recordings_do(capsys: pytest.CaptureFixture[str]) -> None:
    """The table's kernel_source, and power_law_1.2 with underscores."""
    model = ["--gpu", "h200", "--model", "llada-2.1-mini", "--end", "64"]
    mine = curve(capsys, *model, "--backend", "vllm==0.24.0", "--kernel", "triton", "--routing", "power-law-1.2")
    theirs = curve(
        capsys, *model, "--backend", "vllm==0.24.0", "--routing", "power_law_1.2",
        "--kernel", "vllm_unquantizedfusedmoe_triton_tritonexperts",
    )  # fmt: skip
    assert mine == theirs
    assert mine["kernel"] == "triton"


def test_int4_experts_run_on_marlin(capsys: pytest.CaptureFixture[str]) -> None:
    """No tile rule is asked: the calibration has none."""
    found = curve(
        capsys, "--gpu", "h100", "--backend", "sglang==0.5.14", "--model", "llada-2.1-mini", "--dtype", "int4"
    )
    assert found["kernel"] == "marlin"
    assert found["calibration"].startswith("calibrated on ")


def test_a_trace_of_another_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Fewer experts a token than k, and an expert that the model has not."""
    trace = tmp_path / "t.csv"
    trace.write_text("0,1,2\n")
    arguments = ["predict", "--curve", *RELEASE, "--model", "llada-2.1-mini", "--routing", f"trace:{trace}"]
    assert main(arguments) == 2
    assert "the trace has 2 experts a token, the model takes 8" in capsys.readouterr().err
    trace.write_text("0,300\n")
    assert main([*arguments, "--top-k", "1"]) == 2
    assert "the trace routes to expert 300: the model has 256" in capsys.readouterr().err


def test_drawn_routing_has_no_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    """`nfp predict` says so, and gives the tile roofline alone."""
    asked = [
        "--gpu",
        "h20",
        "--backend",
        "vllm==0.9.1",
        "--model",
        "llada-2.1-mini",
        "--attention",
        "flash-attn==2.8.3",
    ]
    asked += ["--routing", "uniform"]
    assert main(["predict", *asked]) == 0
    assert "none: the closed form knows balanced and skewed routing, not uniform" in capsys.readouterr().out
    assert main(["predict", *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["terms"], found["n_max"]) == (None, None)
    assert found["tile_roofline"]["n_max"] >= 1


def test_calibrate_without_recordings_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And writes nothing."""
    monkeypatch.setattr(tables, "_data", lambda: None)
    assert main(["calibrate", "--gpu", "h200", "--output", str(tmp_path / "c.yaml")]) == 2
    assert "pip install 'pytest-nfp[recorded]'" in capsys.readouterr().err
    assert not (tmp_path / "c.yaml").exists()
