"""What the installed but unused plugin adds to a bare pytest start: python benchmarks/startup.py [rounds].

Two subprocesses in turn, with the plugin and with it blocked (-p no:nfp), over an empty test file; medians and their
difference are printed, in CPU seconds of the whole process, which other processes disturb less than wall time.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def seconds(folder: str, *arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, folder]
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_empty.py").write_text("def test_a(): pass\n", encoding="utf-8")
        seconds(folder)
        pairs = [(seconds(folder), seconds(folder, "-p", "no:nfp")) for _ in range(rounds)]
    on, off = (statistics.median(side) for side in zip(*pairs, strict=True))
    added = statistics.median(a - b for a, b in pairs)
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"pytest start, median of {rounds}: {on * 1e3:.0f} ms of CPU with the plugin, {off * 1e3:.0f} ms without")
    print(f"added: {added * 1e3:.1f} ms, ratio {ratio:.3f} (target: under 10 ms)")


if __name__ == "__main__":
    main()
