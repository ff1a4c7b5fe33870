"""What the installed but unused plugin adds to a bare pytest start: python benchmarks/startup.py [rounds].

Fresh interpreters, each timing one thing in CPU milliseconds: importing the plugin, registering it (which declares its
options) and its hook of pytest_configure, after pytest itself is loaded. The whole start is printed beside it.
"""

import statistics
import subprocess
import sys

ADDED = """
import time
import pytest
from _pytest.config import get_config

config = get_config()
begin = time.process_time()
import pytest_nfp.plugin

config.pluginmanager.register(pytest_nfp.plugin, "nfp")
loaded = time.process_time()
config.parse(["-p", "no:cacheprovider"])
parsed = time.process_time()
pytest_nfp.plugin.pytest_configure(config)
print((loaded - begin + time.process_time() - parsed) * 1e3)
"""
START = """
import time, sys, os
import pytest
with open(os.devnull, "w") as sys.stdout:
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:nfp", "--co", os.devnull])
sys.stdout = sys.__stdout__
print(time.process_time() * 1e3)
"""


def milliseconds(script: str) -> float:
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    pairs = [(milliseconds(ADDED), milliseconds(START)) for _ in range(rounds)]
    added, start = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(
        f"median of {rounds}: the unused plugin adds {added:.1f} ms (target: under 10 ms) to a bare start of {start:.0f} ms"
    )


if __name__ == "__main__":
    main()
