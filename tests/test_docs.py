"""Commands in the documentation print what it says; `...` stands for anything."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import PROJECT, PYTEST

PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = [
    pytest.param(page, *block.partition("\n")[::2], id=f"{page.name}-{i}")
    for page in PAGES
    for i, block in enumerate(CONSOLE.findall(page.read_text(encoding="utf-8")))
]


def pattern(expected: str) -> re.Pattern[str]:
    """The expected lines, `...` for anything; runs of blanks are one."""
    parts = (re.escape(re.sub(r" +", " ", part.strip("\n"))) for part in expected.split("..."))
    return re.compile(".*".join(parts), re.DOTALL)


@pytest.mark.network
@pytest.mark.parametrize(("page", "command", "expected"), COMMANDS)
def test_a_command_prints_what_the_page_says(page: Path, command: str, expected: str, tmp_path: Path) -> None:
    """Run in the project's folder, as a reader would."""
    assert command.startswith("$ "), page
    words = shlex.split(command[2:])
    words = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    environment = os.environ | {"NFP_REPORT": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, cwd=PROJECT, env=environment, check=False)
    assert pattern(expected).search(re.sub(r" +", " ", done.stdout)), done.stdout + done.stderr


def test_there_are_commands_to_run() -> None:
    """The parser of these pages finds them."""
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_examples_are_tests_that_pass(page: Path, tmp_path: Path) -> None:
    """Each example of a page, in a file of its own, with the quick protocol on the CPU."""
    examples = PYTHON.findall(page.read_text(encoding="utf-8"))
    if not examples or page.name == "write-a-backend.md":
        pytest.skip("the page has no Python example that is a test")
    for i, text in enumerate(examples):
        (tmp_path / f"test_example_{i}.py").write_text(text, encoding="utf-8")
    for gpu in ("cpu", "h20"):
        chosen = [
            f for f in tmp_path.glob("test_*.py") if ("make_forward" in f.read_text(encoding="utf-8")) == (gpu == "cpu")
        ]
        if chosen:
            command = [
                *PYTEST, f"--nfp-gpu={gpu}", "--nfp-protocol=quick",
                f"--nfp-baselines={PROJECT / 'baselines'}", f"--rootdir={tmp_path}", *map(str, chosen),
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
            assert done.returncode == 0, done.stdout + done.stderr


def test_links_between_pages_lead_somewhere() -> None:
    """Every relative link names a file."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
