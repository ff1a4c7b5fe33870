"""Workers get GPUs out of the caller's own list, one each, and never measure side by side on one of them."""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp.devices.visible_devices import assign, visible_gpus
from tests.conftest import PYTEST

GPUS = [f"GPU-{letter * 8}" for letter in "abcd"]


@pytest.mark.parametrize(
    ("given_list", "seen"),
    [
        (None, GPUS),
        ("", []),
        ("1", GPUS[1:2]),
        ("2,0", [GPUS[2], GPUS[0]]),
        ("GPU-bbbbbbbb", GPUS[1:2]),
        ("GPU-bb, 3", [GPUS[1], GPUS[3]]),
        ("0,9,1", GPUS[:1]),
        ("-1", []),
        ("1,1", GPUS[1:2]),
        ("GPU-", []),
        ("MIG-1234,MIG-5678", ["MIG-1234", "MIG-5678"]),
    ],
)
def test_the_callers_list_is_read_as_cuda_reads_it(given_list: str | None, seen: list[str]) -> None:
    """Indices, UUIDs, beginnings of one, MIG instances; what names no GPU ends the list."""
    environment = {} if given_list is None else {"CUDA_VISIBLE_DEVICES": given_list}
    assert visible_gpus(environment, GPUS) == seen


def test_every_worker_stays_within_the_list() -> None:
    """CUDA_VISIBLE_DEVICES=1 with eight workers sends all of them to GPU 1, none to the excluded GPU 0."""
    for i in range(8):
        environment = {"CUDA_VISIBLE_DEVICES": "1"}
        assert assign(f"gw{i}", environment, GPUS) == GPUS[1]
        assert environment["CUDA_VISIBLE_DEVICES"] == GPUS[1]


@given(st.lists(st.integers(0, 3), unique=True), st.integers(0, 20))
def test_workers_take_turns(indices: list[int], worker: int) -> None:
    """As many GPUs are in use as there are, for any list."""
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, indices))}
    found = assign(f"gw{worker}", environment, GPUS)
    assert found == (GPUS[indices[worker % len(indices)]] if indices else None)


FAKE_NVML = """
NVMLError = RuntimeError
UUIDS = ["GPU-aaaaaaaa", "GPU-bbbbbbbb", "GPU-cccccccc"]
nvmlInit = lambda: None
nvmlDeviceGetCount = lambda: len(UUIDS)
nvmlDeviceGetHandleByIndex = lambda i: i
nvmlDeviceGetUUID = lambda handle: UUIDS[handle]
"""
CONFTEST = """
import os, time
import pytest

SEEN_BY_CONFTEST = os.environ.get("CUDA_VISIBLE_DEVICES")

from pytest_nfp.backends import Prepared
from pytest_nfp.testing import Simulated, staircase


uuid = SEEN_BY_CONFTEST
machine = Simulated(staircase())


def prepare(case, seed, cache_bytes):
    def forward(n):
        if n == case.baseline_positions:
            with open("use.log", "a") as log:
                log.write(f"{uuid} begin {time.monotonic()}\\n")
            time.sleep(0.3)
            with open("use.log", "a") as log:
                log.write(f"{uuid} end {time.monotonic()}\\n")
        return machine.forward(n)
    return Prepared(forward, 1, 100, "simulated", 1)


device = machine.device(gpu="h20", notes=dict(uuid=uuid), prepare=prepare)


def pytest_nfp_find_device(gpu, timer):
    return device, ""


@pytest.fixture(autouse=True)
def log_test(request):
    yield
    with open("order.log", "a") as log:
        log.write(f"{os.environ.get('PYTEST_XDIST_WORKER')} {request.node.name}\\n")
"""
SUITE = """
import pytest

@pytest.mark.nfp(module="dense", question="boundary")
def test_boundary(nfp, case):
    nfp.check_boundary(case)

@pytest.mark.nfp(module="dense", question="prediction")
def test_prediction(nfp, case):
    nfp.check_prediction(case)
"""


@pytest.mark.parametrize(
    ("workers", "listed", "dist"), [(2, "2,1", "load"), (4, "1", "worksteal"), (3, "GPU-bb,GPU-cc", "loadfile")]
)
def test_no_two_workers_measure_on_one_gpu(tmp_path: Path, workers: int, listed: str, dist: str) -> None:
    """With fake GPUs: each worker sees one of the caller's list before its conftest does, and measurements on one GPU never overlap."""
    for name, text in (("pynvml.py", FAKE_NVML), ("conftest.py", CONFTEST), ("test_suite.py", SUITE)):
        (tmp_path / name).write_text(text)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": listed, "PYTHONPATH": str(tmp_path)}
    command = [*PYTEST, "--nfp-gpu=h20", f"-n{workers}", f"--dist={dist}"]
    command += ["--nfp-protocol=quick", "--nfp-model=qwen3-8b", "--nfp-backend=vllm==0.24.0", "--nfp-report=out"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert (tmp_path / "use.log").exists(), done.stdout + done.stderr
    uses: dict[str, list[tuple[float, float]]] = defaultdict(list)
    begun: dict[str, float] = {}
    lines = [line.split() for line in (tmp_path / "use.log").read_text().splitlines()]
    for uuid, what, at in lines:
        if what == "begin":
            begun[uuid] = float(at)
        else:
            uses[uuid].append((begun[uuid], float(at)))
    allowed = visible_gpus({"CUDA_VISIBLE_DEVICES": listed}, ["GPU-aaaaaaaa", "GPU-bbbbbbbb", "GPU-cccccccc"])
    assert set(uses) <= set(allowed), done.stdout
    assert lines, done.stdout
    for spans in uses.values():
        assert all(a[1] <= b[0] for a, b in zip(sorted(spans), sorted(spans)[1:], strict=False))
    # Begin and end of one use stand side by side in the log, whoever wrote them, where only one GPU is used.
    if len(allowed) == 1:
        assert [what for _, what, _ in lines] == ["begin", "end"] * (len(lines) // 2)
    for worker in {line.split()[0] for line in (tmp_path / "order.log").read_text().splitlines()}:
        mine = [
            line.split()[1] for line in (tmp_path / "order.log").read_text().splitlines() if line.startswith(worker)
        ]
        kinds = [name.startswith("test_boundary") for name in mine]
        assert kinds == sorted(kinds), "static tests come before measurements, so that they never wait for a device"
