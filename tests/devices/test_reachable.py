"""The cache that a process can use is read off the latency of dependent loads, and the host's number stands where that tells nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nfp.devices import reachable

MIB = 2**20


def knee(cache: int, hit: float = 45.0, miss: float = 190.0) -> Callable[[int], float]:
    """Loads hit a cache of this size, and miss by the share of a larger buffer that it can't hold."""
    return lambda size: hit if size <= cache else miss - (miss - hit) * max(0.0, 1 - (size - cache) / cache)


@pytest.mark.parametrize("cache_mib", [16, 40, 96, 240])
def test_a_share_of_a_hosts_cache_is_found(cache_mib: int) -> None:
    """480 MiB are reported, a virtual machine reaches less: what is found lies outside it, by at most three steps of the sweep."""
    found, latencies = reachable.measure(480 * MIB, 24 * 2**30, knee(cache_mib * MIB))
    assert cache_mib * MIB < found <= cache_mib * MIB * reachable.GROWTH**3
    assert [size for size, _ in latencies] == sorted(size for size, _ in latencies)


def test_a_cache_that_is_all_ones_own_is_at_least_as_large_as_reported() -> None:
    """All of it is reached: nothing smaller may be taken for it."""
    assert reachable.measure(480 * MIB, 24 * 2**30, knee(480 * MIB))[0] >= 480 * MIB


@pytest.mark.parametrize(
    ("memory", "load"),
    [(24 * 2**30, lambda size: 100.0), (2**30, knee(40 * MIB)), (0, knee(40 * MIB))],
    ids=["no contrast", "memory ends before the cache does", "no memory told"],
)
def test_the_hosts_number_stands_where_the_loads_tell_nothing(memory: int, load: Callable[[int], float]) -> None:
    """Equal latencies, or too little memory to look past the cache."""
    assert reachable.measure(480 * MIB, memory, load)[0] == 480 * MIB


@given(st.lists(st.floats(1.0, 1e4), min_size=0, max_size=12), st.integers(1, 10**9))
def test_whatever_is_read_the_answer_is_a_size_of_the_sweep_or_the_hosts(loads: list[float], reported: int) -> None:
    """Noise can't make a cache of no size."""
    latencies = [((i + 1) * MIB, ns) for i, ns in enumerate(loads)]
    found = reachable.reachable(reported, latencies)
    assert found == reported or found in [size for size, _ in latencies]


def test_a_chase_reads_a_latency() -> None:
    """Of a real buffer: some nanoseconds a load."""
    assert 1 < reachable.chase_ns(2 * MIB) < 1e5
