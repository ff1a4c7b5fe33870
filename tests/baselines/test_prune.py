"""The life of baselines: what an update changes, in meaning; what nobody asks for, is stale or broken; two branches."""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, date, datetime
from pathlib import Path

import pytest

from pytest_nfp import baselines
from pytest_nfp.baselines import BaselineFile, CaseBaseline, Measured, PredictedTerms, Term, Tiles, prune
from pytest_nfp.cases import Backend
from pytest_nfp.cli import main
from pytest_nfp.files import read_yaml
from tests.conftest import PROJECT

TODAY = date(2026, 6, 1)
VLLM = Backend("vllm", "0.24.0")
FLASH = Backend("flash-attn", "2.8.3")
KEYS = ("moe-bf16-b1-k8-balanced", "moe-bf16-b1-k8-skewed")


def case(n_max: int, principle: int = 32) -> CaseBaseline:
    measured = Measured(
        kind="measured", n_max=n_max, interval=(n_max, n_max + 1), n_first_exit=n_max, prediction="agrees", source="s",
        kernel="k", curve=[(32, 10.0), (64, 11.0)],
    )  # fmt: skip
    terms = PredictedTerms(
        principle=Term(n_max=principle, limiting="branch"), tile_roofline=Term(n_max=512, limiting="moe")
    )
    return CaseBaseline(baseline_positions=32, predicted=terms, measured=measured)


def file(
    backend: Backend = VLLM, subject: str = "llada-2.1-mini", cases: dict[str, CaseBaseline] | None = None
) -> BaselineFile:
    tiles = Tiles(kernel="triton", source="default rule", tiles=[(1, 32, 16), (33, 512, 64)])
    found = cases or {KEYS[0]: case(256)}
    return baselines.new_file("h200", backend, subject).model_copy(
        update={"granularity": {"moe-bf16": tiles}, "cases": found}
    )


def test_a_difference_is_told_in_meaning() -> None:
    """N_max, tiles, kernel, predictions, what is new and what is gone; nothing where nothing changed."""
    old, new = file(), file(cases={KEYS[0]: case(32, 16), KEYS[1]: case(8)})
    new.granularity = {"moe-bf16": Tiles(kernel="marlin", source="default rule", tiles=[(1, 32, 16), (33, 512, 128)])}
    assert baselines.difference(old, new) == [
        "moe-bf16: kernel triton to marlin, tile 64 to 128 rows from M=33",
        "moe-bf16-b1-k8-balanced: n_max 256 to 32 (measured), interval (256, 257) to (32, 33), principle 32 to 16 branch",
        "moe-bf16-b1-k8-skewed: new, n_max 8 (measured), principle 32 branch, tile roofline 512 moe",
    ]
    assert baselines.difference(old, file()) == []
    assert baselines.difference(new, old)[-1] == "moe-bf16-b1-k8-skewed: removed"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_two_branches_that_touch_different_cases_merge(tmp_path: Path) -> None:
    """Neighbours in the file: git merges them without a conflict, and what comes out is what the writer writes."""
    cases = {key: case(256) for key in KEYS}
    base = file(cases=cases)
    ours, theirs = (
        base.model_copy(update={"cases": {**cases, key: case(n)}}) for key, n in zip(KEYS, (32, 64), strict=True)
    )
    both = base.model_copy(update={"cases": {KEYS[0]: case(32), KEYS[1]: case(64)}})
    for name, one in (("base", base), ("ours", ours), ("theirs", theirs)):
        (tmp_path / name).write_text(baselines.dump(one), encoding="utf-8")
    done = subprocess.run(
        ["git", "merge-file", "-p", "ours", "base", "theirs"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout == baselines.dump(both)


def test_what_nobody_asks_for_is_stale_or_broken_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By case, by release, by age, by schema, and by a place that says another thing than the file; a model that is not the
    catalog's may be a config.json of the user's.
    """
    releases = [Backend("vllm", r) for r in ("0.9.1", "0.10.0", "0.22.0", "0.24.0")]
    baselines.write(tmp_path, [(b, file(b)) for b in releases])
    gone = file(subject="no-such-model")
    odd = file(subject="mixtral-8x7b", cases={"moe-bf16-b1-k2-balanced": case(1), "moe-bf16-b1-k77-balanced": case(1)})
    odd.cases["moe-bf16-b1-k2-power-law-1.2"] = case(1)
    asked = {
        "moe-bf16-b4-k4-balanced": case(1),
        "attention-bf16-b1-L777": case(1),
        "attention-bf16-odd-b1-L256": case(1),
    }
    baselines.write(tmp_path, [(FLASH, file(FLASH, subject="mixtral-8x7b", cases=asked))])
    baselines.write(tmp_path, [(VLLM, gone), (VLLM, odd)])
    broken = tmp_path / "h200" / "vllm-0.24.0" / "qwen3-8b.yaml"
    broken.write_text("schema: 1\ngpu: 7\n", encoding="utf-8")
    elsewhere = tmp_path / "h100" / "vllm-0.24.0" / "llada-2.1-mini.yaml"
    elsewhere.parent.mkdir(parents=True)
    elsewhere.write_bytes((tmp_path / "h200/vllm-0.24.0/llada-2.1-mini.yaml").read_bytes())
    found = {f"{s.gpu}/{s.backend.release}/{s.subject}": s for s in prune.stored(tmp_path, TODAY)}
    assert found["h200/0.9.1/llada-2.1-mini"].stale.startswith("3 newer releases have baselines")
    assert found["h200/0.10.0/llada-2.1-mini"].is_fine
    assert found["h200/0.24.0/llada-2.1-mini"].is_fine
    own = found["h200/0.24.0/no-such-model"]
    assert ("no-such-model" in own.unknown, own.is_fine) == (True, True)
    assert found["h200/0.24.0/mixtral-8x7b"].unused == ["moe-bf16-b1-k77-balanced"]
    # Batch, context and k may be an option's; a module and a kernel that the framework does not have are nobody's.
    assert found["h200/2.8.3/mixtral-8x7b"].unused == ["attention-bf16-odd-b1-L256", "moe-bf16-b4-k4-balanced"]
    assert "qwen3-8b.yaml:2: gpu" in found["h200/0.24.0/qwen3-8b"].error
    assert "its place says h100" in found["h100/0.24.0/llada-2.1-mini"].error
    monkeypatch.setattr(prune, "committed", lambda path: date(2026, 1, 1) if "llada" in path.name else None)
    aged = {
        f"{s.backend.release}/{s.subject}": s
        for s in prune.stored(tmp_path, TODAY, keep=9, older_than=100)
        if s.gpu == "h200"
    }
    assert aged["0.24.0/llada-2.1-mini"].stale == "last changed on 2026-01-01, 151 days ago"
    assert aged["0.24.0/mixtral-8x7b"].stale == ""


def test_the_day_of_a_file_is_its_last_commits(tmp_path: Path) -> None:
    """As git has it; none outside a repository."""
    assert prune.committed(tmp_path / "x.yaml") is None
    day = prune.committed(PROJECT / "README.md")
    assert day is None or day <= datetime.now(UTC).date()


def test_the_shipped_files_are_all_asked_for() -> None:
    """`nfp baselines check` passes on what the project ships."""
    assert [str(s.path) for s in prune.stored(PROJECT / "baselines", TODAY) if not s.is_fine] == []


def test_pruning_removes_what_is_unused_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run says it and removes nothing; then the case goes; a model of the user's stays, and a broken file, and check fails until it is mended."""
    odd = file(cases={KEYS[0]: case(1), "moe-bf16-b1-k777-balanced": case(1)})
    baselines.write(tmp_path, [(VLLM, odd), (VLLM, file(subject="no-such-model"))])
    broken = tmp_path / "h200" / "vllm-0.24.0" / "qwen3-8b.yaml"
    broken.write_text("schema: 9\n", encoding="utf-8")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.yaml")}
    folder = ["--baselines", str(tmp_path)]
    assert main(["baselines", "prune", "--dry-run", *folder]) == 0
    assert "1 cases would be removed" in capsys.readouterr().out
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.yaml")} == before
    assert main(["baselines", "prune", *folder]) == 0
    assert (tmp_path / "h200/vllm-0.24.0/no-such-model.yaml").exists()
    kept = read_yaml(tmp_path / "h200/vllm-0.24.0/llada-2.1-mini.yaml", BaselineFile)
    assert list(kept.cases) == [KEYS[0]]
    assert broken.exists()
    assert main(["baselines", "check", *folder]) == 1
    broken.unlink()
    assert main(["baselines", "check", *folder]) == 0
    capsys.readouterr()
    assert main(["baselines", "list", *folder]) == 0
    assert "llada-2.1-mini.yaml: 1 cases, 1 measured" in capsys.readouterr().out
    assert main(["baselines", "show", "llada", *folder]) == 0
    assert "moe-bf16-b1-k8-balanced: n_max 1 (measured)" in capsys.readouterr().out
    assert main(["baselines", "show", "nothing", *folder]) == 2
    assert main(["baselines", "list", "--baselines", str(tmp_path / "none")]) == 2
