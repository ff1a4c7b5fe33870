"""Kriging of what the roofline leaves over: exact where it is known, nothing far away, the same from its file."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp.files import FileError
from pytest_nfp.granularity import Granularity, Range
from pytest_nfp.predict import residuals
from pytest_nfp.predict.residuals import Place, coordinates, krige, setting_at

SETTING = (16, 64, 64, 1, 4, 3)
PLACES = [Place((128, 8, 2048, 768), m, SETTING) for m in (16, 64, 256, 1024)] + [
    Place((4096, 4096), m) for m in (1, 64, 65, 128)
]


def moe(rows: int, experts: int = 128, setting: tuple[int, ...] = SETTING) -> Place:
    return Place((experts, 8, 2048, 768), rows, setting)


def test_a_known_place_is_met_up_to_the_noise_and_a_far_one_is_left_alone() -> None:
    """Half of log 1.3 and more where it was measured; log r = 0 a thousand shapes away."""
    found = krige([moe(16)], [math.log(1.3)], 132)
    here, far = found.log_ratio([moe(16), Place((2, 1, 64, 10**9), 4000, (128, 256, 16, 64, 16, 9))])
    assert here == pytest.approx(math.log(1.3) / (1 + residuals.NOISE), rel=1e-3)
    assert abs(far) < 0.01 * here


def test_the_same_rows_in_another_configuration_are_another_place() -> None:
    """Two configurations of one shape with opposite residuals are told apart."""
    other = (64, 128, 64, 16, 8, 4)
    found = krige([moe(64), moe(64, setting=other)], [0.3, -0.3], 132)
    here, there = found.log_ratio([moe(64), moe(64, setting=other)])
    assert here > 0.2
    assert there < -0.2


def test_a_gemm_has_an_edge_where_a_tile_ends() -> None:
    """65 rows are farther from 64 than 63 are: 64 is the last row of 16, of 64 and of a wave."""
    below, at, above = (coordinates(Place((4096, 4096), m), 132) for m in (63, 64, 65))
    assert math.dist(at, above) > 10 * math.dist(below, at)


@given(st.lists(st.floats(-1, 1), min_size=4, max_size=4))
def test_a_file_gives_back_the_same_ratios(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    """Written and read, for experts and for GEMMs: the weights are whole multiples of their unit."""
    for places in (PLACES[:4], PLACES[4:]):
        made = krige(places, values, 132)
        path = tmp_path_factory.mktemp("r") / "r.json"
        path.write_text(residuals.text_of(places, made))
        assert residuals.read(path).log_ratio(places) == pytest.approx(made.log_ratio(places), abs=1e-9)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    """The file and the field."""
    path = tmp_path / "r.json"
    path.write_text('{"schema": 1, "processors": 1, "settings": [], "curves": [{"shape": [1]}]}')
    with pytest.raises(FileError, match=r"r.json: curves\.0\.rows: Field required"):
        residuals.read(path)


def test_a_setting_is_what_the_rule_says_and_a_kernel_without_tiles_has_rows_of_one() -> None:
    """Tile and BLOCK_SIZE_N at the row count; what the rule does not set has its default."""
    g = Granularity(
        "vllm", "9", "moe", "bf16", "NVIDIA H200", (Range(1, 32, 16), Range(33, 4096, 64)), "triton", "", "a", "b", "index",
        parameters=((1, 4096, "BLOCK_SIZE_N=256"),),
    )  # fmt: skip
    assert setting_at(g, 32) == (16, 256, 64, 1, 4, 3)
    assert setting_at(g, 33) == (64, 256, 64, 1, 4, 3)
    assert setting_at(None, 33) == (1, 64, 64, 1, 4, 3)
