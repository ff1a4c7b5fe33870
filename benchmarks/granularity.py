"""Speed of granularity commands on cached artifacts: python benchmarks/granularity.py [rounds].

Whole processes. The first call of each fetches what is missing and is not counted. Targets: one release and shape under
1 s, a diff over the catalog under 5 s, all vLLM releases from 0.6.6 under 30 s.
"""

import statistics
import subprocess
import sys
import time

COMMANDS = (
    ("one release, one shape", 1, "granularity vllm==0.33.0 --gpu h20 --model llada-2.1-mini"),
    ("diff, all models and GPUs", 5, "diff vllm==0.16.0 vllm==0.17.1"),
    ("history of vLLM from 0.6.6", 30, "history vllm --gpu h20 --model llada-2.1-mini --since 0.6.6"),
)


def seconds(command: str) -> float:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "pytest_nfp.cli", *command.split()], capture_output=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr.decode())
    return time.perf_counter() - start


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for name, target, command in COMMANDS:
        seconds(command)
        times = [seconds(command) for _ in range(rounds)]
        print(f"{name}: median {statistics.median(times):.2f} s of {rounds} (target: under {target} s)")


if __name__ == "__main__":
    main()
