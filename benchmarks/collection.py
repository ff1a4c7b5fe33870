"""What collecting 10,000 cases costs beside a plain parametrize of the same size: python benchmarks/collection.py [rounds].

Both sides run `pytest --collect-only` on one test function in a subprocess, in turn; the ratio is over whole processes.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CASES = 10_000
GENERATED = """
import pytest

@pytest.mark.nfp(module="moe", question="prediction")
def test_it(nfp, case):
    pass
"""
PLAIN = f"""
import pytest

@pytest.mark.parametrize("case", range({CASES}), ids=[f"h20-vllm==0.9.1-model-moe-bf16-b1-k{{i}}-balanced" for i in range({CASES})])
def test_it(case):
    pass
"""
# A catalog whose one model has a grid of 5,000 k, balanced and skewed: the cases are expanded as any others.
CATALOG = f"""
from pytest_nfp import catalog

model = catalog.model("moe-ffn-256x4096x1024").model_copy(update={{"top_k": tuple(range(1, {CASES // 2 + 1}))}})
catalog.models.cache_clear()
catalog.models = lambda: (model,)
"""


def seconds(folder: Path, *arguments: str) -> float:
    start = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-qq",
        "-p",
        "no:cacheprovider",
        *arguments,
        str(folder),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    elapsed = time.perf_counter() - start
    if done.returncode or str(CASES) not in done.stdout:
        raise SystemExit(done.stdout[-500:] + done.stderr[-500:])
    return elapsed


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as name:
        generated, plain = Path(name, "generated"), Path(name, "plain")
        for folder, text in ((generated, GENERATED), (plain, PLAIN)):
            folder.mkdir()
            (folder / "test_it.py").write_text(text, encoding="utf-8")
        (generated / "conftest.py").write_text(CATALOG, encoding="utf-8")
        options = ("--nfp-gpu=h20", "--nfp-backend=vllm==0.9.1", "--nfp-model=moe-ffn-256x4096x1024")
        pairs = [(seconds(generated, *options), seconds(plain)) for _ in range(rounds)]
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"collecting {CASES} cases, median of {rounds}: {ours:.2f} s, plain parametrize {theirs:.2f} s")
    print(f"ratio {ratio:.2f} (target: at most 2)")


if __name__ == "__main__":
    main()
