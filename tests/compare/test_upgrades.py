"""nfp granularity, diff, bisect and history on releases of our own, and on the changes that users felt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from pytest_nfp import catalog
from pytest_nfp.cases import Backend
from pytest_nfp.cli import main
from pytest_nfp.compare import upgrades
from pytest_nfp.granularity import artifacts
from tests.granularity import releases

OLD_RULE = releases.VLLM_RULE.replace("LIMITS = ((32, 16), (96, 32))", "LIMITS = ((256, 16),)")


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    """vLLM 98.1 with the old rule, 98.2 the same, 98.3 rewritten, 98.4 with a tuned file for the H20."""
    releases.vllm(tmp_path, "98.1", OLD_RULE)
    releases.vllm(tmp_path, "98.2", OLD_RULE)
    releases.vllm(tmp_path, "98.3")
    releases.vllm(tmp_path, "98.4", NVIDIA_H20=releases.tuned(m1=16, m512=16, m1024=64))
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out = capsys.readouterr()
    return code, out.out, out.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code, out, _ = run(capsys, *arguments, "--json")
    return code, json.loads(out)


def test_granularity_as_json_is_sorted_gap_free_and_merged(capsys: pytest.CaptureFixture[str], archives: Path) -> None:
    """The documented fields; ranges from 1 to the end, no two neighbours alike."""
    code, g = as_json(
        capsys, "granularity", "vllm==98.4", "--gpu", "h20", "--model", "llada-2.1-mini", "--artifacts", str(archives)
    )
    assert code == 0
    assert {
        "framework",
        "release",
        "module",
        "dtype",
        "device_name",
        "ranges",
        "kernel",
        "artifact",
        "warnings",
    } <= set(g)
    assert [(r["first"], r["last"], r["tile"], r["key"]) for r in g["ranges"]] == [
        (1, 256, 16, 1),
        (257, 768, 16, 512),
        (769, 4096, 64, 1024),
    ]
    assert g["artifact"]["file"] == "vllm-98.4.tar.gz"
    assert set(g["kernel"]) == {"name", "reason"}


def test_granularity_takes_a_shape_by_hand_and_a_driver_name(
    capsys: pytest.CaptureFixture[str], archives: Path
) -> None:
    """The same map as by catalog names, to the end that was asked for; the text names source and key."""
    shape = ["--experts", "256", "--expert-width", "512", "--hidden", "2048", "--top-k", "8"]
    code, out, _ = run(
        capsys,
        "granularity",
        "vllm==98.4",
        "--device-name",
        "NVIDIA H20",
        *shape,
        "--max-tokens",
        "300",
        "--artifacts",
        str(archives),
    )
    assert code == 0
    assert "257..300    16 rows  E=256,N=512,device_name=NVIDIA_H20.json, key 512" in out
    code, out, _ = run(
        capsys, "granularity", "vllm==98.4", "--device-name", "NVIDIA H20-3e", *shape, "--artifacts", str(archives)
    )
    assert "warning  default rule in force; a tuned file exists for NVIDIA_H20, not for NVIDIA_H20-3e" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vllm==97.0", "--gpu", "h20", "--model", "llada-2.1-mini"], "no archive of vllm 97.0"),
        (["vllm==98.1", "--gpu", "h21", "--model", "llada-2.1-mini"], "unknown GPU 'h21'"),
        (["vllm==98.1", "--gpu", "h20"], "the shape lacks experts, width, hidden, top_k"),
        (["vllm==98.1", "--gpu", "h20", "--model", "qwen3-8b"], "qwen3-8b has no experts"),
        (["torch==2.0", "--gpu", "h20", "--model", "qwen3-8b"], "torch has no granularity rule"),
        (["flash-attn-3", "--gpu", "h20", "--heads", "10", "--kv-heads", "4", "--head-dim", "128"], "no multiple of --kv-heads"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("offline")
def test_bad_input_exits_2_with_what_to_do(
    capsys: pytest.CaptureFixture[str], archives: Path, arguments: list[str], message: str
) -> None:
    """On standard error."""
    code, _, err = run(capsys, "granularity", *arguments, "--artifacts", str(archives))
    assert code == 2
    assert message in err


def test_diff_finds_the_change_its_effect_and_who_is_concerned(
    capsys: pytest.CaptureFixture[str], archives: Path
) -> None:
    """Exit 1; tiles before and after; both predictors; GPUs that share a change in one line."""
    code, out, _ = run(
        capsys,
        "diff",
        "vllm==98.2",
        "vllm==98.3",
        "--model",
        "llada-2.1-mini",
        "--gpu",
        "h20",
        "--gpu",
        "h20-3e",
        "--artifacts",
        str(archives),
    )
    assert code == 1
    assert "llada-2.1-mini on h20, h20-3e" in out
    assert "33..96 tokens: 16 to 32 rows" in out
    assert "N_max 256 to 32 by the principle" in out
    assert "by the tile roofline" in out


def test_diff_of_equal_rules_exits_0(capsys: pytest.CaptureFixture[str], archives: Path) -> None:
    """All models and GPUs of the catalog, none changed."""
    code, out, _ = run(capsys, "diff", "vllm==98.1", "vllm==98.2", "--artifacts", str(archives))
    assert code == 0
    assert "0 of " in out


def test_a_new_tuned_file_is_a_change_of_source_for_its_device_alone(
    capsys: pytest.CaptureFixture[str], archives: Path
) -> None:
    """Only H20 with E = 256 and N = 512 is concerned."""
    code, d = as_json(capsys, "diff", "vllm==98.3", "vllm==98.4", "--artifacts", str(archives))
    assert code == 1
    assert {(c["gpu"], c["model"]) for c in d["changes"]} == {("h20", "llada-2.1-mini"), ("h20", "ling-2.0-mini")}
    assert d["changes"][0]["source"] == ["default rule", "E=256,N=512,device_name=NVIDIA_H20.json"]


def test_markdown_is_a_table_for_a_pull_request(capsys: pytest.CaptureFixture[str], archives: Path) -> None:
    """A title, a table, arrows."""
    _, out, _ = run(
        capsys,
        "diff",
        "vllm==98.2",
        "vllm==98.3",
        "--gpu",
        "h20",
        "--model",
        "llada-2.1-mini",
        "--markdown",
        "--artifacts",
        str(archives),
    )
    assert out.startswith("### Granularity: vllm==98.2 to vllm==98.3")
    assert (
        "| llada-2.1-mini | h20 | 33..96: 16 → 32<br>97..256: 16 → 64 | triton | default rule | 256 → 32 | 256 → 96 |"
        in out
    )


UNREADABLE = """
def select_unquantized_moe_backend(moe_config):
    return elsewhere()
"""
ORACLE = f"{releases.VLLM_FOLDER}/oracle/unquantized.py"


def test_what_is_unknown_on_either_side_is_no_clean_bill(capsys: pytest.CaptureFixture[str], archives: Path) -> None:
    """A rule that can't be read, or a kernel that can't be told: exit 3, in words, in JSON and in Markdown, and no tile is compared."""
    releases.vllm(archives, "98.5", "x = 1\n")
    releases.vllm(archives, "98.6", more={ORACLE: UNREADABLE})
    arguments = ["--gpu", "h20", "--model", "llada-2.1-mini", "--artifacts", str(archives)]
    for before, after, said in (
        ("98.4", "98.5", "undecided, now: "),
        ("98.5", "98.5", "undecided, before: "),
        ("98.2", "98.6", "undecided, which kernel runs is unknown now (now: the rule could not be evaluated"),
    ):
        code, out, _ = run(capsys, "diff", f"vllm=={before}", f"vllm=={after}", *arguments)
        assert code == 3
        assert "0 of 1 cases changed, 1 can't be told" in out
        assert said in out
        code, d = as_json(capsys, "diff", f"vllm=={before}", f"vllm=={after}", *arguments)
        assert (code, d["changes"], len(d["warnings"])) == (3, [], 1)
        assert d["undecided"][0]["tiles"] == []
        _, out, _ = run(capsys, "diff", f"vllm=={before}", f"vllm=={after}", *arguments, "--markdown")
        assert "undecided: " in out


def test_the_same_code_is_the_same_choice(capsys: pytest.CaptureFixture[str], archives: Path) -> None:
    """Where a choice can't be evaluated on either side, its code is compared: equal is equal, and other code is named."""
    releases.vllm(archives, "98.6", more={ORACLE: UNREADABLE})
    releases.vllm(archives, "98.7", more={ORACLE: f"# A comment.\n{UNREADABLE}"})
    releases.vllm(archives, "98.8", more={ORACLE: UNREADABLE.replace("elsewhere()", "elsewhere(1)")})
    arguments = ["--gpu", "h20", "--model", "llada-2.1-mini", "--artifacts", str(archives)]
    code, out, _ = run(capsys, "diff", "vllm==98.6", "vllm==98.7", *arguments)
    assert code == 0
    assert "0 of 1 cases changed\n" in out
    code, out, _ = run(capsys, "diff", "vllm==98.7", "vllm==98.8", *arguments)
    assert code == 3
    assert "the code that chooses it differs in select_unquantized_moe_backend" in out


@pytest.mark.parametrize(
    "text",
    ["vllm==98.2.0", "vllm[audio]==98.2", "vllm==98.2  # pin", 'vllm==98.2 ; python_version > "3.9"', "vllm == 98.2+cu129", "vllm==v98.2"],
)  # fmt: skip
def test_releases_are_read_as_pip_writes_them(capsys: pytest.CaptureFixture[str], archives: Path, text: str) -> None:
    """Extras, comments, markers, local versions and missing zeros name the same release."""
    code, out, _ = run(
        capsys, "diff", "vllm==98.1", text, "--gpu", "h20", "--model", "llada-2.1-mini", "--artifacts", str(archives)
    )
    assert code == 0
    assert out.startswith("vllm==98.1 to vllm==98.2")


def test_what_an_answer_does_not_cover_is_said(capsys: pytest.CaptureFixture[str], archives: Path) -> None:
    """Beside "0 changed"."""
    _, out, _ = run(capsys, "diff", "vllm==98.1", "vllm==98.2", "--gpu", "h20", "--artifacts", str(archives))
    assert "experts alone were compared" in out


def test_other_tile_parameters_are_a_warning_not_a_change(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """BLOCK_SIZE_N 128 to 64 with the same BLOCK_SIZE_M: exit 0, and a word on what a faster T(N0) does to N_max."""
    releases.vllm(tmp_path, "98.6", releases.variant(16, BLOCK_SIZE_N=128, num_warps=4))
    releases.vllm(tmp_path, "98.7", releases.variant(16, BLOCK_SIZE_N=64, num_warps=4))
    arguments = [
        "vllm==98.6",
        "vllm==98.7",
        "--gpu",
        "h20-3e",
        "--model",
        "llada-2.1-mini",
        "--artifacts",
        str(tmp_path),
    ]
    code, out, _ = run(capsys, "diff", *arguments)
    assert code == 0
    assert "0 of 1 cases changed" in out
    assert "1..4096 tokens: same tile, BLOCK_SIZE_N=128 to BLOCK_SIZE_N=64" in out
    assert "a faster T(N0) alone can shrink N_max" in out
    code, d = as_json(capsys, "diff", *arguments)
    assert (code, d["changes"]) == (0, [])
    assert d["parameters"][0]["parameters"] == [
        {"first": 1, "last": 4096, "before": "BLOCK_SIZE_N=128", "after": "BLOCK_SIZE_N=64"}
    ]
    _, out, _ = run(capsys, "diff", *arguments, "--markdown")
    assert "other tile parameters changed" in out


def test_a_change_that_moves_no_boundary_need_not_fail(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--fail-on=boundary: tiles far past every predicted N_max are told and exit 0; an earlier switch exits 1."""
    rules = {"98.1": "((256, 16),)", "98.2": "((256, 16), (4000, 64), (4050, 128))", "98.3": "((32, 16), (96, 32))"}
    for version, limits in rules.items():
        releases.vllm(tmp_path, version, releases.VLLM_RULE.replace("((32, 16), (96, 32))", limits))
    case = ["--gpu", "h20", "--model", "llada-2.1-mini", "--artifacts", str(tmp_path)]
    far = run(capsys, "diff", "vllm==98.1", "vllm==98.2", *case)
    assert far[0] == 1
    assert "4001..4050 tokens: 64 to 128 rows" in far[1]
    assert "moves no predicted boundary and no kernel" in far[1]
    assert run(capsys, "diff", "vllm==98.1", "vllm==98.2", *case, "--fail-on=boundary")[0] == 0
    assert run(capsys, "diff", "vllm==98.1", "vllm==98.3", *case, "--fail-on=boundary")[0] == 1


def test_expert_parallelism_changes_what_a_rank_holds(capsys: pytest.CaptureFixture[str], archives: Path) -> None:
    """TP to EP is a change by itself: the rule sees the local experts and the whole width."""
    rule = OLD_RULE.replace("((256, 16),)", "((256, 16),)").replace(
        "for limit, tile in LIMITS:", "for limit, tile in ((E, 16),):"
    )
    releases.vllm(archives, "98.8", rule)
    arguments = ["vllm==98.8", "vllm==98.8", "--gpu", "h20", "--model", "llada-2.1-mini", "--artifacts", str(archives)]
    code, out, _ = run(capsys, "diff", *arguments, "--parallel", "tp8..ep8")
    assert code == 1
    assert "one rank holds 32 experts of 2048 x 512, before 256 experts of 2048 x 64" in out
    assert "33..256 tokens: 16 to 64 rows" in out
    assert run(capsys, "diff", *arguments, "--parallel", "ep8")[0] == 0
    code, _, err = run(capsys, "diff", *arguments, "--parallel", "pp8")
    assert code == 2
    assert "'pp8' is no parallelism" in err
    code, _, err = run(capsys, "diff", *arguments, "--parallel", "ep7")
    assert code == 2
    assert "can't be cut over 7 ranks" in err


def test_diff_of_two_frameworks_is_bad_input(capsys: pytest.CaptureFixture[str], archives: Path) -> None:
    """Exit 2."""
    code, _, err = run(capsys, "diff", "vllm==98.1", "sglang==98.1", "--artifacts", str(archives))
    assert code == 2
    assert "two frameworks" in err


def test_bisect_finds_every_change(archives: Path) -> None:
    """Each release that differs from the one before it, also where a change was taken back; a release that is unknown is named."""
    case = upgrades.default_cases(
        Backend("vllm", "98.1"), [catalog.gpu("a800")], [catalog.model("llada-2.1-mini")], "bf16"
    )[0]
    releases.vllm(archives, "98.5", OLD_RULE)

    def changed(*versions: str) -> list[tuple[str, str]]:
        found = upgrades.bisect(versions, case, archives)
        assert found.read == len(versions)
        return [(c.case.backend.release, c.after.granularity.release) for c in found.changes if c.after.granularity]

    assert changed("98.1", "98.2", "98.3", "98.4", "98.5") == [("98.2", "98.3"), ("98.4", "98.5")]
    assert changed("98.1", "98.2") == []
    assert changed("98.1", "97.0", "98.3") == [("98.1", "98.3")]
    unknown = upgrades.bisect(["98.1", "97.0"], case, archives).unknown
    assert [release for release, _ in unknown] == ["97.0"]
    assert "no archive of vllm 97.0" in unknown[0][1]


def test_bisect_and_history_on_the_command_line(
    capsys: pytest.CaptureFixture[str], archives: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 1 where something changed; history shows the releases at which it did."""
    monkeypatch.setattr(artifacts, "known_releases", lambda f: ["98.1", "98.2", "98.3", "98.4"])
    case = ["--gpu", "h20", "--model", "llada-2.1-mini", "--artifacts", str(archives)]
    code, out, _ = run(capsys, "bisect", "vllm", "98.1..98.3", *case)
    assert code == 1
    assert "vllm changed at 98.3 (98.1 to 98.3, 3 releases read)" in out
    assert "vllm==98.3, after 98.2" in out
    assert run(capsys, "bisect", "vllm", "98.1..98.2", *case)[0] == 0
    for wrong in ("98.2..98.1", "98.1", "a..b"):
        assert run(capsys, "bisect", "vllm", wrong, *case)[0] == 2
    code, out, _ = run(capsys, "history", "vllm", *case)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  98")] == ["98.1", "98.3", "98.4"]
    _, rows = as_json(capsys, "history", "vllm", *case, "--all")
    assert [r["n_max"]["principle"] for r in rows] == [256, 256, 32, 512]


def index_of(monkeypatch: pytest.MonkeyPatch, **uploaded: str | None) -> None:
    """An index whose files have these upload times."""
    files = tuple(
        (Version(release.replace("_", ".")), artifacts.IndexFile(f"{release}.whl", "https://index/x", "0" * 64, when))
        for release, when in uploaded.items()
    )
    monkeypatch.setattr(artifacts, "_index_files", lambda framework: files)
    monkeypatch.setattr(artifacts, "_until", None)


def test_the_index_is_read_as_it_stood_on_a_day(
    capsys: pytest.CaptureFixture[str], archives: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was uploaded after that day is not there, of a command that names no release; the day itself counts, in UTC."""
    days = {
        "98_1": "2026-01-01T00:00:00+00:00",
        "98_2": "2026-02-01T23:59:59+00:00",
        "98_3": "2026-02-02T00:00:00+00:00",
    }
    index_of(monkeypatch, **days)
    case = ["--gpu", "h20", "--model", "llada-2.1-mini", "--artifacts", str(archives)]
    assert "of 3 releases" in run(capsys, "history", "vllm", *case)[1]
    assert "1 of 2 releases" in run(capsys, "history", "vllm", *case, "--until", "2026-02-01")[1]
    assert "2 of 3 releases" in run(capsys, "history", "vllm", *case, "--until", "2026-02-02")[1]
    code, _, err = run(capsys, "history", "vllm", *case, "--until", "2025-12-31")
    assert code == 2
    assert "the package index had no vllm before 2026-01-01" in err
    code, _, err = run(capsys, "diff", "vllm==98.1", "vllm==98.9", "--until", "2026-02-01")
    assert code == 2
    assert "the nearest are 98.1, 98.2." in err


def test_an_index_without_upload_times_is_an_error(
    capsys: pytest.CaptureFixture[str], archives: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 2 and what to do; a date that is none is refused by the parser."""
    index_of(monkeypatch, **{"98_1": None})
    case = ["--gpu", "h20", "--model", "llada-2.1-mini", "--artifacts", str(archives)]
    code, _, err = run(capsys, "history", "vllm", *case, "--until", "2026-02-01")
    assert code == 2
    assert "does not tell when the files of vllm were uploaded: leave out --until" in err
    with pytest.raises(SystemExit):
        main(["history", "vllm", *case, "--until", "yesterday"])
    assert "must be a date such as 2026-11-30, got 'yesterday'" in capsys.readouterr().err


def test_the_canary_names_what_the_newest_release_can_no_longer_be_asked(
    capsys: pytest.CaptureFixture[str], archives: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest final release is asked, each reason once with its count, and the exit code is 1."""
    monkeypatch.setattr(artifacts, "known_releases", lambda f: ["98.3", "98.4", "98.5rc1"])
    answered = upgrades.answer
    monkeypatch.setattr(upgrades, "answer", lambda cases: answered(cases, archives))
    code, out, _ = run(capsys, "canary", "--framework", "vllm", "--gpu", "h20")
    assert "vllm==98.4 moe bf16" in out
    assert "98.5" not in out
    kernel = [line for line in out.splitlines() if "the kernel is unknown" in line]
    assert code == (1 if kernel or "times:" in out else 0)
    (archives / "vllm-98.4.tar.gz").unlink(missing_ok=True)
    for file in archives.glob("vllm-98.4*"):
        file.unlink()
    code, out, _ = run(capsys, "canary", "--framework", "vllm", "--gpu", "h20")
    assert code == 1
    assert "unknown" in out and "times: " in out


@pytest.mark.network
@pytest.mark.parametrize(
    ("before", "after", "gpu", "model", "principle"),
    [
        ("vllm==0.16.0", "vllm==0.17.1", "h20", "llada-2.1-mini", [256, 32]),
        ("vllm==0.9.2", "vllm==0.10.2", "h100", "llada-2.1-mini", None),
        ("vllm==0.27.1", "vllm==0.33.0", "h20", "ling-2.0-mini", [32, 512]),
    ],
)
def test_changes_that_users_felt_are_found_without_a_gpu(
    capsys: pytest.CaptureFixture[str], before: str, after: str, gpu: str, model: str, principle: list[int] | None
) -> None:
    """The rewrite of 0.17, the tuned files of 0.10.2 (H100) and 0.28 (H20)."""
    code, d = as_json(capsys, "diff", before, after, "--gpu", gpu, "--model", model)
    assert code == 1
    if principle is not None:
        assert d["changes"][0]["n_max"]["principle"] == principle
    else:
        assert d["changes"][0]["source"][0] != d["changes"][0]["source"][1]
