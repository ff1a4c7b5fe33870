"""One record a framework: the project's own, and those that packages add by entry points."""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_nfp import frameworks, registry
from pytest_nfp.cases import frameworks_of
from pytest_nfp.cli import main
from pytest_nfp.granularity import release

from .conftest import PROJECT

PAGE = (PROJECT / "docs" / "write-a-backend.md").read_text(encoding="utf-8")
FORWARD = """
from pytest_nfp.backends import Prepared
from pytest_nfp.testing import staircase

def prepare(case, seed, cache_bytes):
    return Prepared(lambda n: lambda: staircase(32)(n), 1, 100, "tiles", 1)
"""


def wheel(folder: Path, version: str, rows: int) -> None:
    """A release of the page's framework."""
    with zipfile.ZipFile(folder / f"tile_kernels-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr("tile_kernels/config.py", f"QUERY_ROWS = {rows}\n")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's framework as an installer leaves it, and two of its releases as wheels."""
    after = PAGE[PAGE.index("## Add a framework") :]
    record, rule = re.findall(r"```python\n(.*?)```", after, re.S)
    (entries,) = re.findall(r"```toml\n(.*?)```", after, re.S)
    package = tmp_path / "site" / "tile_kernels_nfp"
    package.mkdir(parents=True)
    for name, text in (("__init__", record), ("tiles", rule), ("forward", FORWARD)):
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    info = tmp_path / "site" / "tile_kernels_nfp-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tile-kernels-nfp\nVersion: 1.0\n")
    groups = re.sub(r'\[project.entry-points."(.*)"\]', r"[\1]", entries)
    (info / "entry_points.txt").write_text(groups.replace('"', ""))
    archives = tmp_path / "archives"
    archives.mkdir()
    wheel(archives, "1.0", 32)
    wheel(archives, "2.0", 64)
    monkeypatch.syspath_prepend(str(package.parent))
    forget()
    yield archives
    forget()
    for name in [n for n in sys.modules if n.startswith("tile_kernels_nfp")]:
        del sys.modules[name]


def forget() -> None:
    frameworks.forget()
    registry.registered.cache_clear()
    release.forget()


def test_every_record_of_the_project_is_whole() -> None:
    """A rule has a reader that can be imported and files to read; names, aliases and modules are no one else's."""
    names = [n for f in frameworks.OURS for n in (f.name, *f.aliases)]
    assert len(names) == len(set(names))
    for f in frameworks.OURS:
        assert set(f.modules) <= set(registry.MODULES)
        assert bool(f.rule) == bool(f.rule_reader)
        assert not f.rule or f.rule in f.modules
        assert all(re.compile(pattern) for pattern in f.files)
        assert f.choice_files in ("", *f.files)


def test_the_extras_that_records_name_are_there() -> None:
    """What an install hint names can be installed."""
    import tomllib

    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {f.extra for f in frameworks.OURS if f.extra} <= set(extras)


def test_an_invented_framework_is_one_like_the_others(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page's record and granularity file give maps, differences, changes over releases, and refusals by its record."""
    assert "tile-kernels" in frameworks_of("attention", "h20")
    shape = ["--gpu", "h20", "--model", "qwen3-8b", "--artifacts", str(installed)]
    assert main(["granularity", "tile-kernels==2.0", *shape]) == 0
    assert "64 rows  QUERY_ROWS" in capsys.readouterr().out
    assert main(["diff", "tile-kernels==1.0", "tile-kernels==2.0", *shape]) == 1
    assert "32 to 64 rows" in capsys.readouterr().out
    assert main(["granularity", "tile-kernels==3.0", *shape]) == 2
    assert "tile-kernels" in capsys.readouterr().err


def test_the_suites_gate_an_invented_framework(installed: Path, pytester: pytest.Pytester) -> None:
    """A baseline of its older release, then the newer one: its tiles are found to have changed."""
    suite = [str(PROJECT / "suites" / "attention" / "test_attention.py")]
    common = [*suite, "-p", "no:cacheprovider", "--nfp-gpu=h20", "--nfp-model=qwen3-8b", f"--nfp-artifacts={installed}"]
    folder = f"--nfp-baselines={pytester.path / 'kept'}"
    first = pytester.runpytest_inprocess(*common, folder, "--nfp-backend=tile-kernels==1.0", "--nfp-update=missing")
    assert first.ret == 0, first.stdout.str()
    second = pytester.runpytest_inprocess(*common, folder, "--nfp-backend=tile-kernels==2.0")
    assert second.ret == 1
    assert "64 rows, was 32" in second.stdout.str() or "32 to 64" in second.stdout.str(), second.stdout.str()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("FRAMEWORK = 1", "must name a Framework of this name, not 1"),
        ("import no_such_module", "breaks at import: ModuleNotFoundError: No module named 'no_such_module'"),
        (
            'from pytest_nfp.frameworks import Framework\nFRAMEWORK = Framework("other", ())',
            "must name a Framework of this name, not Framework(name='other'",
        ),
    ],
)
def test_a_broken_record_costs_its_own_framework_alone(
    installed: Path, capsys: pytest.CaptureFixture[str], record: str, message: str
) -> None:
    """Asked for by name it is an error of one line, exit 2; the other frameworks stay."""
    (installed.parent / "site" / "tile_kernels_nfp" / "__init__.py").write_text(record)
    assert main(["granularity", "tile-kernels==1.0", "--gpu", "h20", "--model", "qwen3-8b"]) == 2
    said = capsys.readouterr().err
    assert "tile-kernels = tile_kernels_nfp:FRAMEWORK of pytest_nfp.frameworks " + message in said
    assert frameworks.with_module("attention") == [f.name for f in frameworks.OURS if "attention" in f.modules]
