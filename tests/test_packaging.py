"""The base install is enough for the static gate, from a wheel, without the project around it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import PROJECT


@pytest.mark.network
def test_the_base_install_runs_the_gate_and_nothing_else_is_needed(tmp_path: Path) -> None:
    """A new environment with the wheel's own dependencies: shipped baselines and table answer, boundaries are skipped."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", str(PROJECT)], check=True, capture_output=True)
    installed = subprocess.run([python, "-m", "pip", "list"], check=True, capture_output=True, text=True).stdout.lower()
    for heavy in ("torch", "requests", "scipy", "pyarrow"):
        assert f"\n{heavy} " not in installed
    shutil.copytree(PROJECT / "suites", tmp_path / "suites")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [python, "-m", "pytest", "-q", "-rs", "--nfp-gpu=h20,a800,h800", "--rootdir=.", "suites"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " failed" not in done.stdout
    assert "UNDECIDED" not in done.stdout
    assert "torch is not installed, so nothing can be measured" in done.stdout
    predict = [
        str(tmp_path / "venv" / "bin" / "nfp"), "predict", "--gpu", "h20", "--model", "qwen3-8b",
        "--attention", "flash-attn==2.8.3",
    ]  # fmt: skip
    assert "limited by dense" in subprocess.run(predict, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("path", sorted((PROJECT / "requirements").glob("*.txt")), ids=lambda p: p.name)
def test_every_file_that_make_installs_has_a_hash(path: Path) -> None:
    """Each requirement is pinned, and names the sha256 of what may be installed for it."""
    text = re.sub(r"\\\n\s*", "", path.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._\[\]-]+==\S+ ?(;[^\\]*?)?( ?--hash=sha256:[0-9a-f]{64})+", line.strip()), (
            line[:80]
        )


def test_make_installs_nothing_without_a_hash() -> None:
    """Every call of pip in the Makefile asks for hashes, or installs the project alone."""
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    calls = re.findall(r"pip (install.*|\$\(\w+\).*)", makefile)
    assert len(calls) >= 5
    assert all(call.startswith(("$(HASHED)", "$(ITSELF)")) for call in calls)
    assert "HASHED := install --quiet --require-hashes" in makefile
