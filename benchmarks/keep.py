"""Run a benchmark and keep what it prints in docs/results/: python -m benchmarks.keep predictors [its options].

The page names the command that wrote it, and holds its output as it was printed. An output that ends with an error is not kept.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]
RESULTS = PROJECT / "docs" / "results"


def page(name: str, options: list[str], output: str) -> str:
    """A page of docs/results/: the benchmark's own first line, its command, and what it printed."""
    about = (importlib.import_module(f"benchmarks.{name}").__doc__ or "").strip()
    title = about.partition("\n")[0].partition(": python ")[0].rstrip(":.")
    command = " ".join(["python", "-m", "benchmarks.keep", name, *options])
    return f"# {title}\n\n`{command}` wrote this page.\n\n```\n{output.rstrip()}\n```\n"


def path_of(name: str, options: list[str]) -> Path:
    """The page of a benchmark with these options."""
    return RESULTS / f"{'-'.join([name, *(o.lstrip('-') for o in options)])}.md"


def main() -> int:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    name, options = sys.argv[1], sys.argv[2:]
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    lines = []
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if running.returncode:
        return running.returncode
    kept = path_of(name, options)
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(page(name, options, "".join(lines)), encoding="utf-8")
    print(f"wrote {kept.relative_to(PROJECT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
