"""Baseline files: stable bytes, nearest release, errors with line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nfp import baselines
from pytest_nfp.baselines import BaselineFile, CaseBaseline
from pytest_nfp.cases import Backend
from pytest_nfp.files import FileError

SHIPPED = Path(__file__).parents[2] / "baselines"
FILES = sorted(SHIPPED.glob("*/*/*.yaml"))


def file(backend: Backend, **changed: object) -> BaselineFile:
    return baselines.new_file("h20", backend, "m").model_copy(update=changed)


@pytest.mark.parametrize("path", FILES, ids=lambda p: "/".join(p.parts[-3:]))
def test_every_shipped_file_is_what_the_writer_writes(path: Path) -> None:
    """Read and written again, no byte changes; its place is what it says of itself; it is small."""
    from pytest_nfp.files import read_yaml

    stored = read_yaml(path, BaselineFile)
    assert baselines.dump(stored) == path.read_text(encoding="utf-8")
    framework, _, release = stored.backend.partition("==")
    assert baselines.path_of(SHIPPED, stored.gpu, Backend(framework, release), stored.subject) == path
    assert path.stat().st_size < 32_000


def test_the_gate_ships_what_it_says() -> None:
    """H20, A800, H800 x four releases, and the recorded GPUs."""
    for gpu in ("h20", "a800", "h800"):
        found = {str(b) for b in baselines.stored_backends(SHIPPED, gpu)}
        assert found == {"vllm==0.9.1", "sglang==0.5.9", "flash-attn==2.8.3", "flashinfer-python==0.5.3"}
    assert {"vllm==0.24.0", "sglang==0.5.14"} <= {str(b) for b in baselines.stored_backends(SHIPPED, "h200")}


def test_nothing_shipped_for_an_unmeasured_gpu_claims_a_measurement() -> None:
    """Predicted baselines hold no measured boundary; recorded ones name their source, and why they deviate."""
    from pytest_nfp.files import read_yaml

    for path in FILES:
        for case in read_yaml(path, BaselineFile).cases.values():
            if path.parts[-3] in ("h20", "a800", "h800"):
                assert case.measured is None
            elif case.measured is not None:
                assert case.measured.kind == "recorded"
                assert case.measured.source.startswith("aiconfigurator-core 0.12.0")
                assert (case.measured.prediction == "deviates") == bool(case.measured.because)


def test_the_nearest_release_before_stands_in(tmp_path: Path) -> None:
    """0.33 is held to 0.9.1 where nothing lies between; one before the oldest to the oldest; exact to itself."""
    old, new = Backend("vllm", "0.9.1"), Backend("vllm", "0.24.0")
    baselines.write(tmp_path, [(old, file(old)), (new, file(new))])
    for asked, found in (("0.33.0", "0.24.0"), ("0.10.0", "0.9.1"), ("0.6.6", "0.9.1"), ("0.24.0", "0.24.0")):
        result = baselines.load_nearest(tmp_path, "h20", Backend("vllm", asked), "m")
        assert result is not None
        assert result[1].release == found
    assert baselines.load_nearest(tmp_path, "h20", Backend("sglang", "1"), "m") is None


def test_writing_twice_changes_nothing(tmp_path: Path) -> None:
    """The second time no file is written; cases sort by number, not by letter."""
    b = Backend("vllm", "1")
    f = file(b, cases={k: CaseBaseline(baseline_positions=1) for k in ("b10", "b2", "b1")})
    assert len(baselines.write(tmp_path, [(b, f)])) == 1
    assert baselines.write(tmp_path, [(b, f)]) == []
    text = baselines.path_of(tmp_path, "h20", b, "m").read_text(encoding="utf-8")
    assert text.index("b1:") < text.index("b2:") < text.index("b10:")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("baseline_positions: 1", "baseline_positions: 0", r"m.yaml:\d+: cases.a.baseline_positions: .*greater than 0"),
        ("gpu: h20", "gup: h20", r"m.yaml:2: gup: Extra inputs"),
    ],
)
def test_a_broken_baseline_names_file_line_and_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    """What was wrong and where."""
    b = Backend("vllm", "1")
    baselines.write(tmp_path, [(b, file(b, cases={"a": CaseBaseline(baseline_positions=1)}))])
    path = baselines.path_of(tmp_path, "h20", b, "m")
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(FileError, match=message):
        baselines.load(tmp_path, "h20", b, "m")
