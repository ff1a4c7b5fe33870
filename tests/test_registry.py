"""Backends by entry points: those that ship, one of a package of your own, and those that can't be imported."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_nfp import backends, registry
from pytest_nfp.cases import Backend, Case, expand, frameworks_of, parse_backend
from pytest_nfp.catalog import Dense, Model

from .conftest import PROJECT

SMALL = Model(name="small", hidden=8, dense=Dense(width=8), source="t")
PAGE = (PROJECT / "docs" / "write-a-backend.md").read_text(encoding="utf-8")


def package(folder: Path, code: str, entry: str = '"my-kernels.dense" = "my_kernels"') -> None:
    """A package as an installer leaves it: its module and its metadata."""
    (folder / "my_kernels.py").write_text(code, encoding="utf-8")
    info = folder / "my_kernels-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-kernels\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[pytest_nfp.backends]\n" + entry.replace('"', "") + "\n")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.registered.cache_clear()
    yield tmp_path
    registry.registered.cache_clear()
    sys.modules.pop("my_kernels", None)


def test_the_projects_own_backends_are_registered() -> None:
    """torch for every module, vLLM for experts and attention; the CPU is offered what has a forward."""
    assert {("torch", "dense"), ("torch", "moe"), ("torch", "attention"), ("vllm", "moe")} <= set(registry.registered())
    assert {"torch", "vllm"} <= set(frameworks_of("moe", "cpu"))
    assert set(frameworks_of("moe", "h200")) == {"torch", "vllm", "sglang"}


def test_the_page_on_backends_is_true(tmp_path: Path) -> None:
    """Its file and its entry point, installed, are a backend of the dense suite, named by its own version."""
    code, entry = re.search(r"```python\n(.*?)```", PAGE, re.S), re.search(r'("my-kernels.*")\n', PAGE)
    assert code and entry
    package(tmp_path, code[1], entry[1])
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PROJECT / "suites" / "dense"), "--nfp-gpu=cpu", "--nfp-backend=my-kernels", "--co",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=PROJECT, env={"PYTHONPATH": str(tmp_path), "PATH": ""}, capture_output=True, text=True, check=False
    )
    assert "[cpu-my-kernels==1.2-dense-ffn-2048x6144-dense-fp32-b1]" in done.stdout, done.stdout + done.stderr


def test_a_backend_of_the_page_computes_what_it_says(installed: Path) -> None:
    """Its check finds nothing wrong; a forward that forgets half of the weights is found."""
    code = re.search(r"```python\n(.*?)```", PAGE, re.S)
    assert code
    package(installed, code[1])
    backend = parse_backend("my-kernels==1.2")
    (case,) = expand("cpu", backend, "dense", SMALL)
    prepared = backends.prepare(case, 0, 1000)
    assert prepared.check is not None
    assert prepared.check(3) == ""
    sys.modules.pop("my_kernels")
    (installed / "my_kernels.py").write_text(code[1].replace("return x @ w1.T @ w2.T", "return x @ w1.T @ w1"))
    wrong = backends.prepare(case, 0, 1000).check
    assert wrong is not None
    assert "off an FP64 reference" in wrong(3)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_framework", "my-kernels can't be imported here: No module named 'no_such_framework'"),
        (
            "from pytest_nfp.backends.places import device_of",
            "my-kernels's backend was written for an older pytest-nfp:"
            " pytest_nfp.backends.places is pytest_nfp.backends.tensors now: import that",
        ),
        (
            "from pytest_nfp.measure import Curve",
            "my-kernels's backend was written for an older pytest-nfp:"
            " pytest_nfp.measure.Curve is pytest_nfp.curves.Curve now: import that",
        ),
        ("1 / 0", "my-kernels breaks at import: ZeroDivisionError: division by zero"),
    ],
)
def test_what_breaks_at_import_is_a_reason_not_a_crash(installed: Path, code: str, reason: str) -> None:
    """The error's own line."""
    package(installed, code)
    case = Case("cpu", Backend("my-kernels", "1.2"), "dense", SMALL, "fp32")
    with pytest.raises(backends.Unsupported, match=re.escape(reason)):
        backends.prepare(case, 0, 1000)


def test_every_moved_name_is_gone_and_its_new_place_is_there() -> None:
    """Each old name fails to import, and the new one imports: the table holds no slip."""
    for old, new in registry.MOVED.items():
        module, _, name = new.rpartition(".")
        found = importlib.import_module(f"pytest_nfp.{module}" if module else "pytest_nfp")
        assert hasattr(found, name) or importlib.util.find_spec(f"pytest_nfp.{new}"), new
        parent, _, gone = old.rpartition(".")
        with pytest.raises(ImportError) as error:
            exec(f"from pytest_nfp{'.' if parent else ''}{parent} import {gone}", {})  # the statement that others have
        assert registry.moved(error.value) == f"pytest_nfp.{old} is pytest_nfp.{new} now: import that"


def test_another_name_is_no_backend(installed: Path) -> None:
    """An entry point without a module, or with one that there is not, is left alone."""
    package(installed, "", "mykernels = my_kernels\nmy-kernels.softmax = my_kernels")
    assert not {f for f, _ in registry.registered()} & {"mykernels", "my-kernels", ""}
