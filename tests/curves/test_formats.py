"""Curves from files of every kind, and what is said of a file that is none."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_nfp.curves.formats import read_curve
from pytest_nfp.files import FileError


def file(folder: Path, content: Any, name: str = "curve.csv") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def points(path: Path, **asked: Any) -> list[tuple[int, float]]:
    return [(p.positions, round(p.latency_us, 6)) for p in read_curve(path, **asked).curve.points]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("N,latency_us\n1,100\n2,110\n", [(1, 100), (2, 110)]),
        ("positions, latency (ms)\n2, 0.11\n1, 0.1\n", [(1, 100), (2, 110)]),
        ("num_tokens;time\n", None),
        ("query_len,time_s,kernel\n1,1e-4,a\n2,2e-4,b\n", [(1, 100), (2, 200)]),
        ("n,t\n1,100\n1,104\n1,102\n2,210\n", [(1, 102), (2, 210)]),
        ("n,samples\n1,100;104;102\n2,210;200;190\n", [(1, 102), (2, 200)]),
        # triton's perf_report: x axis of any name, a provider, its extremes.
        ("size,triton (ms),triton-min,triton-max\n1.0,0.1,0.09,0.2\n2.0,0.3,0.2,0.4\n", [(1, 100), (2, 300)]),
        ([[1, 100], [2, 110]], [(1, 100), (2, 110)]),
        (
            {"points": [{"positions": 1, "samples": [100, 102, 104]}, {"positions": 4, "samples": [210]}]},
            [(1, 102), (4, 210)],
        ),
        ({"curve": [[1, 100, 95, 105], [2, 110, 100, 120]]}, [(1, 100), (2, 110)]),
        ({"1": 31.0, "2": [36.0, 36.2, 36.4]}, [(1, 31.0), (2, 36.2)]),
        (
            [{"N": 1, "median_ms": 1.0, "spread": 0.1}, {"N": 2, "median_ms": 2.0, "spread": 0.1}],
            [(1, 1000), (2, 2000)],
        ),
    ],
)
def test_tables_of_many_shapes(tmp_path: Path, content: Any, expected: list[tuple[int, float]] | None) -> None:
    """Columns by their usual names, units by theirs, several rows of one N as samples."""
    path = file(tmp_path, content)
    if expected is None:
        with pytest.raises(FileError, match="a table needs a header"):
            points(path)
    else:
        assert points(path) == expected


def nvbench(*states: tuple[int, float, float, int], axis: str = "N") -> dict[str, Any]:
    def summary(tag: str, value: float) -> dict[str, Any]:
        return {"tag": tag, "data": [{"name": "value", "type": "float64", "value": str(value)}]}

    return {
        "meta": {"version": {}},
        "benchmarks": [
            {
                "name": "decode",
                "states": [
                    {
                        "axis_values": [
                            {"name": axis, "type": "int64", "value": str(n)},
                            {"name": "D", "type": "int64", "value": "128"},
                        ],
                        "summaries": [
                            summary("nv/cold/time/gpu/mean", mean),
                            summary("nv/cold/time/gpu/stdev/relative", relative),
                            summary("nv/cold/sample_size", count),
                        ],
                    }
                    for n, mean, relative, count in states
                ],
            }
        ],
    }


def test_nvbench_gives_means_with_their_error(tmp_path: Path) -> None:
    """The axis that varies is N; 1.96 standard errors around the mean."""
    table = read_curve(file(tmp_path, nvbench((1, 1e-4, 0.1, 100), (8, 2e-4, 0.2, 400)), "nv.json"))
    assert [(p.positions, p.latency_us) for p in table.curve.points] == [(1, 100.0), (8, 200.0)]
    p = table.curve.points[1]
    assert p.ratio_low == pytest.approx((200 - 3.92) / (100 + 1.96))
    assert p.ratio_high == pytest.approx((200 + 3.92) / (100 - 1.96))


def test_kernels_modes_host_and_throughput_are_taken_along(tmp_path: Path) -> None:
    """By N; a row without a latency is a refusal with its reason."""
    text = "n,latency_us,kernel,mode,host_us,tokens_per_s,error\n1,100,decode,full,20,10,\n2,300,prefill,full,25,6,\n5,,,,,,no variant\n"
    table = read_curve(file(tmp_path, text))
    assert table.curve.kernels == {1: "decode", 2: "prefill"}
    assert table.curve.modes == {1: "full", 2: "full"}
    assert table.host_us == {1: 20.0, 2: 25.0}
    assert table.throughput == {1: 10.0, 2: 6.0}
    assert table.curve.unsupported == {5: "no variant"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "a table needs a header"),
        ("n,latency_us\n", "holds no rows"),
        ("{", "broken JSON"),
        ("[1]", "item 1: must be an object"),
        ("n,latency_us\n1,100\nx,100\n", r":3: n must be a whole number of at least 1, got 'x'"),
        ("n,latency_us\n1,100\n2.5,100\n", "n must be a whole number"),
        ("n,latency_us\n1,100\n2,-4\n", "latency_us must be above 0, got -4"),
        ("n,latency_us\n1,100\n2,fast\n", "must be a number, got 'fast'"),
        ("n,latency_us\n2,100\n4,100\n", "has no T\\(N0\\) at N0 = 1: give --baseline-positions; the first N are 2, 4"),
        ("n,latency_us\n1,100\n2,100,7\n", ":3: has more values than the header"),
        ("n,a_us,b_us\n1,1,2\n2,1,2\n", "several columns may be latencies: a_us, b_us; choose with --column"),
        ("n,tflops\n1,1\n2,1\n", "no column of latencies"),
        ("name,latency_us\na,1\n", "no column of positions"),
        ("n,latency_us,low,high\n1,100,90,110\n2,100,101,110\n", "low <= latency <= high does not hold"),
        ("n,latency_us,spread\n1,100,1\n2,100,200\n", "spread must lie between 0 and the latency"),
        ("n,latency_us,error\n1,100,\n2,100,\n2,,no\n", "N=2 has a latency and is refused too"),
        (nvbench((1, 1e-4, 0.1, 9), (1, 1e-4, 0.1, 9)), "one integer axis must vary, and here 0 do"),
        ({"benchmarks": [{"states": [{"axis_values": [{"name": "N"}]}]}]}, "not nvbench's JSON after all"),
    ],
)
def test_bad_input_says_where_and_what(tmp_path: Path, content: Any, message: str) -> None:
    """File, row, column."""
    with pytest.raises(FileError, match=message):
        read_curve(file(tmp_path, content))


def test_a_chosen_column_and_other_baseline_positions(tmp_path: Path) -> None:
    """--column and --baseline-positions."""
    path = file(tmp_path, "n,a_us,b_ms\n2,1,2\n4,1,3\n")
    assert points(path, baseline_positions=2, column="b_ms") == [(2, 2000), (4, 3000)]
    with pytest.raises(FileError, match="has no column 'c'; there are a_us, b_ms"):
        read_curve(path, 2, "c")
    with pytest.raises(FileError, match="can't be read"):
        read_curve(tmp_path / "nowhere.csv")


@given(st.text(max_size=300))
def test_any_text_is_a_curve_or_a_reason(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Never another error."""
    path = tmp_path_factory.mktemp("any") / "x.csv"
    path.write_text(text, encoding="utf-8", newline="")
    with contextlib.suppress(FileError):
        read_curve(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["positions", "N", "latency", "samples", "low", "benchmarks", "states", "1"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
@example({"benchmarks": [{"states": "0"}]})
@example({"benchmarks": "0"})
def test_any_json_is_a_curve_or_a_reason(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Never another error."""
    path = tmp_path_factory.mktemp("any") / "x.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with contextlib.suppress(FileError):
        read_curve(path)


@given(st.dictionaries(st.integers(2, 500), st.floats(0.1, 1e6), min_size=1, max_size=20), st.floats(0.1, 1e6))
def test_what_was_written_comes_back(
    tmp_path_factory: pytest.TempPathFactory, latencies: dict[int, float], first: float
) -> None:
    """CSV and JSON give the same curve."""
    folder = tmp_path_factory.mktemp("same")
    curve = {1: first} | latencies
    rows = "".join(f"{n},{t!r}\n" for n, t in curve.items())
    assert points(file(folder, "n,latency_us\n" + rows)) == points(
        file(folder, [[n, t] for n, t in curve.items()], "c.json")
    )
