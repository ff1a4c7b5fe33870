"""The fused-MoE rule of a release, lifted from its source and evaluated, with its tuned files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_nfp import catalog
from pytest_nfp.cases import Backend, expand
from pytest_nfp.granularity import evaluator, fused_moe, query_of, shape_of
from pytest_nfp.granularity.maps import Granularity, RuleUnknown
from pytest_nfp.granularity.query import DeviceFacts, ExpertShape, Query

from . import releases

SHAPE = ExpertShape(256, 512, 2048, 8)


def read(
    folder: Path, version: str = "99.1", device: str = "NVIDIA H20", framework: str = "vllm", dtype: str = "bf16"
) -> Granularity:
    facts = DeviceFacts(device, (9, 0), 227 * 1024)
    return fused_moe.granularity(Query(framework, version, facts, SHAPE, dtype), folder)


def tile_warnings(g: Granularity) -> tuple[str, ...]:
    """Warnings about tiles: these small releases hold no order of kernels, which is a warning of its own."""
    return tuple(w for w in g.warnings if "which kernel runs is unknown" not in w)


def test_a_default_rule_becomes_a_map(tmp_path: Path) -> None:
    """Constants and helpers that the rule reaches are lifted with it."""
    releases.vllm(tmp_path, "99.1")
    g = read(tmp_path)
    assert g.tiles() == [[1, 32, 16], [33, 96, 32], [97, 4096, 64]]
    assert {r.source for r in g.ranges} == {"default rule"}
    assert (g.origin, g.artifact_file) == ("archive", "vllm-99.1.tar.gz")


def test_a_tuned_file_wins_with_its_nearest_key_at_any_count(tmp_path: Path) -> None:
    """Keys 96 and 1024 alone: 1..560 are served by key 96, the tie at 560 by the first key."""
    releases.vllm(tmp_path, "99.1", NVIDIA_H20=releases.tuned(m96=16, m1024=64))
    g = read(tmp_path)
    assert [(r.first, r.last, r.tile, r.key) for r in g.ranges] == [(1, 560, 16, 96), (561, 4096, 64, 1024)]
    assert tile_warnings(g) == ("M=1..560 served by key 96 of E=256,N=512,device_name=NVIDIA_H20.json",)
    assert {r.source for r in g.ranges} == {"E=256,N=512,device_name=NVIDIA_H20.json"}


def test_device_names_match_to_the_letter_and_near_misses_are_named(tmp_path: Path) -> None:
    """H20-3e finds no H20 file: the default rule is in force, and the near miss is said, never substituted."""
    releases.vllm(tmp_path, "99.1", NVIDIA_H20=releases.tuned(m1=128))
    g = read(tmp_path, device="NVIDIA H20-3e")
    assert g.tile(1) == 16
    assert tile_warnings(g) == (
        "default rule in force; a tuned file exists for NVIDIA_H20, not for NVIDIA_H20-3e: names match to the letter",
    )


def test_an_environment_variable_in_force_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_BATCH_INVARIANT makes the tile constant."""
    releases.vllm(tmp_path, "99.1")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    g = read(tmp_path)
    assert g.tiles() == [[1, 4096, 64]]
    assert tile_warnings(g) == ("VLLM_BATCH_INVARIANT=1 is in force",)


def test_sglang_takes_the_folder_of_its_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The triton that the pinned torch brings decides the folder; a missing one falls back to the newest."""
    monkeypatch.setattr(fused_moe, "pinned_requirement", lambda *a: "3.5.1")
    name = "E=256,N=512,device_name=NVIDIA_H20.json"
    files = {
        f"{releases.SGLANG_FOLDER}/fused_moe_triton_config.py": releases.SGLANG_RULE,
        f"{releases.SGLANG_FOLDER}/configs/triton_3_4_0/{name}": '{"1": {"BLOCK_SIZE_M": 32}}',
        f"{releases.SGLANG_FOLDER}/configs/triton_3_5_1/{name}": '{"1": {"BLOCK_SIZE_M": 16}}',
        "sglang-99.1.dist-info/METADATA": "Name: sglang\nRequires-Dist: torch==2.9.1\n",
    }
    releases.wheel(tmp_path, "sglang", "99.1", files)
    assert read(tmp_path, framework="sglang").tiles() == [[1, 4096, 16]]
    del files[f"{releases.SGLANG_FOLDER}/configs/triton_3_5_1/{name}"]
    releases.wheel(tmp_path, "sglang", "99.2", files)
    g = read(tmp_path, "99.2", framework="sglang")
    assert g.tiles() == [[1, 4096, 32]]
    assert "same shape, other source folder: triton_3_4_0 serves triton_3_5_1, which has no such file" in g.warnings


def test_another_dtype_is_unknown_not_guessed(tmp_path: Path) -> None:
    """What the rule has no parameter for is unknown, with the reason."""
    releases.vllm(tmp_path, "99.1")
    with pytest.raises(RuleUnknown, match="not for int4"):
        read(tmp_path, dtype="int4")


def test_a_triton_version_is_skipped_and_another_foreign_key_is_named(tmp_path: Path) -> None:
    """Newer tuned files carry a key that is no count; one of another kind is an error with file and key."""
    releases.vllm(tmp_path, "99.1", NVIDIA_H20='{"triton_version": "3.5.1", "1": {"BLOCK_SIZE_M": 16}}')
    assert read(tmp_path).tiles() == [[1, 4096, 16]]
    releases.vllm(tmp_path, "99.2", NVIDIA_H20='{"notes": "x", "1": {"BLOCK_SIZE_M": 16}}')
    with pytest.raises(RuleUnknown, match=r"NVIDIA_H20.json: key 'notes' is no token count"):
        read(tmp_path, "99.2")


def test_keys_from_96_on_serve_one_token_too(tmp_path: Path) -> None:
    """The requested counts and the key used are said."""
    releases.vllm(tmp_path, "99.1", NVIDIA_H20=releases.tuned(m96=16, m128=16, m1024=64))
    assert "M=1..112 served by key 96 of E=256,N=512,device_name=NVIDIA_H20.json" in read(tmp_path).warnings


def bad_rule(body: str) -> str:
    return f"def try_get_optimal_moe_config(w1_shape, w2_shape, top_k, dtype, M, block_shape=None):\n    {body}\n"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return {}.__class__", "__class__ is not allowed"),
        ("import socket\n    return socket.socket()", "no stub"),
        ("return open('/etc/passwd').read()", "FileNotFoundError"),
        ("return eval('1')", "calls eval, for which there is no stub"),
        ("return {'BLOCK_SIZE_N': 1}", "has no BLOCK_SIZE_M"),
        ("return helper_from_elsewhere(M)", "calls helper_from_elsewhere, for which there is no stub"),
        ("return try_get_optimal_moe_config(w1_shape, w2_shape, top_k, dtype, M)", "recurses without end"),
        ("return [0] * 10**10", "more memory than it may"),
        ("return '{0.__globals__}'.format_map", "format_map is not allowed"),
        ("from enum import Enum\n    Enum.shared = 1", "Enum of Python can't be changed by a rule"),
        ("from enum import Enum\n    return Enum('Tile', {'x': 1})", "TypeError"),
    ],
)
def test_a_rule_that_reaches_for_more_is_unknown(tmp_path: Path, body: str, reason: str) -> None:
    """Whatever the source asks for, the answer is a reason, and this process goes on."""
    releases.vllm(tmp_path, "99.1", bad_rule(body))
    with pytest.raises(RuleUnknown, match=reason):
        read(tmp_path)


def test_a_rule_that_loops_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of its processor time ends it."""
    monkeypatch.setattr(evaluator, "SECONDS_A_QUESTION", 1)
    releases.vllm(tmp_path, "99.1", bad_rule("while True: pass"))
    with pytest.raises(RuleUnknown, match="did not end within 1 s of processor time"):
        read(tmp_path)


def test_a_release_without_the_rule_says_so(tmp_path: Path) -> None:
    """Another layout is unknown, with what was looked for."""
    releases.vllm(tmp_path, "99.1", "x = 1\n")
    with pytest.raises(RuleUnknown, match="has no function try_get_optimal_moe_config"):
        read(tmp_path)


def test_models_that_share_a_tuned_file_keep_keys_of_their_own() -> None:
    """A file's name leaves K out: the same file serves two hidden widths, and the rule is asked about each."""
    case = next(expand("h20", Backend("vllm", "99.1"), "moe", catalog.model("llada-2.1-mini")))
    wider = replace(case, subject=case.subject.model_copy(update={"hidden": 2 * case.subject.hidden}))
    assert query_of(case) != query_of(wider)
    assert shape_of(query_of(case)) != shape_of(query_of(wider))


def test_what_a_configuration_sets_beside_the_tile_is_kept(tmp_path: Path) -> None:
    """In ranges of its own: the ranges of tiles stay merged."""
    rule = releases.VLLM_RULE.replace(
        'return {"BLOCK_SIZE_M": tile}', 'return {"BLOCK_SIZE_M": tile, "num_warps": 4 if M <= 8 else 8}'
    )
    releases.vllm(tmp_path, "99.1", rule)
    g = read(tmp_path)
    assert [(r.first, r.last, r.tile) for r in g.ranges][:2] == [(1, 32, 16), (33, 96, 32)]
    assert g.parameters[:2] == ((1, 8, "num_warps=4"), (9, 96, "num_warps=8"))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("'evil'", "BLOCK_SIZE_M 'evil', which is no tile"),
        ("[1]", "BLOCK_SIZE_M [1], which is no tile"),
        ("float('nan')", "BLOCK_SIZE_M nan, which is no tile"),
        ("True", "BLOCK_SIZE_M True, which is no tile"),
        ("0", "BLOCK_SIZE_M 0, which is no tile"),
        ("10**30", "which is no tile"),
        ("'\\x1b[2J' * 9", "\\x1b[2J"),
    ],
)
def test_an_answer_that_is_no_tile_is_unknown(tmp_path: Path, value: str, said: str) -> None:
    """Whole, positive and of a sane size; and no control character of a rule reaches the terminal."""
    config = f"    return {{'BLOCK_SIZE_M': {value}}}\n    for limit, tile in LIMITS:"
    releases.vllm(tmp_path, "99.1", releases.VLLM_RULE.replace("    for limit, tile in LIMITS:", config))
    with pytest.raises(RuleUnknown) as raised:
        fused_moe.granularity(
            Query("vllm", "99.1", DeviceFacts("NVIDIA H20", (9, 0)), ExpertShape(256, 512, 2048, 8)), tmp_path
        )
    assert said in str(raised.value)
    assert str(raised.value).isprintable()


def test_a_rules_own_words_are_shown_in_one_line(tmp_path: Path) -> None:
    """An exception's text is escaped and cut."""
    words = "    raise ValueError('\\x1b[31m' + 'x' * 5000)\n    for limit, tile in LIMITS:"
    releases.vllm(tmp_path, "99.1", releases.VLLM_RULE.replace("    for limit, tile in LIMITS:", words))
    with pytest.raises(RuleUnknown) as raised:
        fused_moe.granularity(
            Query("vllm", "99.1", DeviceFacts("NVIDIA H20", (9, 0)), ExpertShape(256, 512, 2048, 8)), tmp_path
        )
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 600
