"""Readers under hostile input for a time each: python -m tests.fuzz [--seconds 600] [reader ...].

Each runs in a process of its own with a gigabyte more than it starts with. What makes it fail is kept in tests/fuzz/seeds, which the
tests read again. Exit code 1 where anything is open.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from .readers import READERS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="for each reader (default 600)")
    parser.add_argument("readers", nargs="*", choices=[[], *READERS], default=[], help="default: all")
    given = parser.parse_args()
    still_open = 0
    for name in given.readers or READERS:
        done = subprocess.run([sys.executable, "-m", "tests.fuzz.run", name, str(given.seconds)], check=False)
        still_open += done.returncode != 0
    print(f"{still_open} readers with something open, of {len(given.readers or READERS)}")
    return int(still_open > 0)


sys.exit(main())
