"""Piecewise maps: gap-free, merged, and what differs between two of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp.granularity.maps import Granularity, Range, changed_ranges, from_points


def granularity(*tiles: int, **changed: object) -> Granularity:
    fields = {"framework": "vllm", "release": "1", "module": "moe", "dtype": "bf16", "device_name": "NVIDIA H20"}
    rest = {"kernel": "triton", "kernel_reason": "", "artifact_file": "", "artifact_sha256": "", "origin": "archive"}
    ranges = from_points([(t, "default rule", None) for t in tiles])
    return Granularity(**(fields | rest | {"ranges": ranges} | changed))  # type: ignore[arg-type]


@given(st.lists(st.sampled_from([16, 32, 64]), min_size=1, max_size=60))
def test_a_map_gives_back_its_points(tiles: list[int]) -> None:
    """Merging loses nothing; tau is the last count of the tile in force."""
    g = granularity(*tiles)
    assert [g.tile(i) for i in range(1, len(tiles) + 1)] == tiles
    assert g.tile(len(tiles) + 1000) == tiles[-1]
    limit = g.branch_limit(1)
    assert (limit is None and len(set(tiles)) == 1) or (limit is not None and len(set(tiles[:limit])) == 1)


def test_merging_keeps_sources_and_tiles_apart() -> None:
    """Equal tiles from different keys are two ranges, and one where tiles alone count."""
    ranges = from_points([(16, "a.json", 1), (16, "a.json", 2), (32, "default rule", None)])
    g = granularity(1, ranges=ranges)
    assert len(g.ranges) == 3
    assert g.tiles() == [[1, 2, 16], [3, 3, 32]]
    assert g.edges() == [2]
    assert g.branch_limit(1) == 2


@pytest.mark.parametrize(
    "ranges", [(), (Range(2, 3, 16),), (Range(1, 3, 16), Range(5, 6, 16)), (Range(1, 0, 16),), (Range(1, 2, 0),)]
)
def test_a_map_with_a_gap_is_refused(ranges: tuple[Range, ...]) -> None:
    """Sorted, gap-free, from 1 on."""
    with pytest.raises(ValueError, match=r"map|range"):
        granularity(1, ranges=ranges)


@given(st.lists(st.sampled_from([16, 32]), min_size=1, max_size=40), st.lists(st.sampled_from([16, 32]), min_size=1))
def test_changed_ranges_are_exactly_where_tiles_differ(before: list[int], after: list[int]) -> None:
    """Every count that differs is in one range, no other is."""
    found = changed_ranges(granularity(*before).tiles(), granularity(*after).tiles())
    differ = {i for i, (a, b) in enumerate(zip(before, after, strict=False), 1) if a != b}
    assert {n for first, last, _, _ in found for n in range(first, last + 1)} == differ
    assert all(old == before[first - 1] and new == after[first - 1] for first, _, old, new in found)


def test_changes_read_as_a_range_and_two_tiles() -> None:
    """vLLM's rewrite: 16 up to E became 16, 32, 64, 128."""
    old, new = [[1, 256, 16], [257, 4096, 64]], [[1, 32, 16], [33, 96, 32], [97, 512, 64], [513, 4096, 128]]
    assert changed_ranges(old, new) == [(33, 96, 16, 32), (97, 256, 16, 64), (513, 4096, 64, 128)]
