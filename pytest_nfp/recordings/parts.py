"""Recorded times of one module at exactly its shape: a GEMM, balanced experts, or attention at one position.

Between two recorded row counts T is the line between them. Beyond the last one there is no T. Weights that stayed in
the cache during the recording are left out, as in the library: in a model they do not stay there.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from pytest_nfp.cases import Case
from pytest_nfp.recordings import library, tables
from pytest_nfp.recordings.errors import NoRecording


@dataclass(frozen=True, slots=True)
class RecordedTimes:
    """T of one module over rows."""

    rows: tuple[int, ...]
    """Tokens, or rows of a GEMM, ascending."""
    latencies: tuple[float, ...]
    """Microseconds at each row count."""
    source: str
    """The table that holds them."""

    def at(self, rows: int) -> float:
        """T at a row count from the first recorded one to the last. Raises ValueError outside."""
        if not self.rows[0] <= rows <= self.rows[-1]:
            raise ValueError(f"{rows} rows were not recorded: {self.rows[0]} to {self.rows[-1]} were")
        i = bisect_left(self.rows, rows)
        if self.rows[i] == rows:
            return self.latencies[i]
        (a, b), (s, t) = self.rows[i - 1 : i + 1], self.latencies[i - 1 : i + 1]
        return s + (t - s) * (rows - a) / (b - a)


def times(case: Case) -> RecordedTimes:
    """The recorded times of a GEMM or of balanced experts. Raises NoRecording with the one reason."""
    if case.module not in ("dense", "moe"):
        raise NoRecording(f"{case.module} is recorded at one position alone")
    if case.module == "moe" and case.routing != "balanced":
        raise NoRecording(f"experts under {case.routing} routing were not recorded at every count of tokens")
    table = library.read(case.gpu, case.backend.framework, case.backend.release, case.module, case.dtype)
    moe = case.subject.moe
    if moe is not None and case.module == "moe" and moe.expert_parallel > 1:
        raise NoRecording("experts that are spread over ranks were recorded with other routing")
    for c in table.curves:
        if case.gemm is not None:
            is_match = (c.width, c.hidden) == case.gemm
        else:
            assert moe is not None
            wanted = (moe.experts, case.top_k, case.subject.hidden, moe.width, "balanced")
            is_match = (c.experts, c.top_k, c.hidden, c.width, c.distribution) == wanted
        if is_match:
            return RecordedTimes(tuple(p.positions for p in c.points), tuple(p.latency_us for p in c.points), c.source)
    raise NoRecording(f"the table of {case.backend} on {case.gpu} does not hold this shape, or it stays in the cache")


@dataclass(frozen=True, slots=True)
class RecordedAttention:
    """Attention at one position of each request."""

    latency_us: float
    """T in microseconds."""
    fixed_us: float
    """T over the fewest recorded cached tokens, in microseconds. At most latency_us."""
    source: str
    """The table that holds it."""


def attention_at_one(case: Case, framework: str, release: str) -> RecordedAttention:
    """A framework's attention at exactly the case's heads and batch, over its cached tokens.

    Between two recorded contexts T is the line between their logarithms. Raises NoRecording.
    """
    assert case.subject.attention is not None and case.context is not None
    a = case.subject.attention
    by_context, source = _generation(case.gpu, framework, release, case.batch, a.heads, a.kv_heads, a.head_dim)
    contexts = sorted(by_context)
    if not contexts or not contexts[0] <= case.context <= contexts[-1]:
        raise NoRecording(
            f"{framework} {release} on {case.gpu}: attention of this shape was not recorded over {case.context} tokens"
        )
    i = bisect_left(contexts, case.context)
    latency_us = by_context[contexts[i]]
    if contexts[i] != case.context:
        low, high = contexts[i - 1], contexts[i]
        share = math.log(case.context / low) / math.log(high / low)
        latency_us = by_context[low] ** (1 - share) * by_context[high] ** share
    return RecordedAttention(latency_us, min(latency_us, by_context[contexts[0]]), source)


@lru_cache(maxsize=256)
def _generation(
    gpu: str, framework: str, release: str, batch: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Mapping[int, float], str]:
    from pyarrow import parquet

    for table_framework, table_release, path in tables.tables(gpu, ["attention"]):
        if (table_framework, table_release) != (framework, release) or path.name != "generation_attention_perf.parquet":
            continue
        columns = parquet.read_schema(path).names
        wanted: list[tuple[str, str, object]] = [
            ("batch_size", "==", batch),
            ("num_heads", "==", heads),
            # A table writes 0 KV heads if there are as many as query heads.
            ("num_key_value_heads", "in", [kv_heads, *([0] if kv_heads == heads else [])]),
            ("head_dim", "==", head_dim),
            ("kv_cache_dtype", "==", "bfloat16"),
            ("isl", "==", 1),
        ]
        if missing := [name for name in ("step", "latency", *(f[0] for f in wanted)) if name not in columns]:
            raise NoRecording(f"{path.name} has no column {', '.join(missing)}: it is not read")
        # Older tables have no sliding windows.
        wanted += [("window_size", "==", 0)] if "window_size" in columns else []
        rows = parquet.read_table(path, columns=["step", "latency"], filters=wanted).to_pylist()
        us_by_context: dict[int, float] = {}
        for row in rows:
            us = row["latency"] * 1e3
            us_by_context[row["step"]] = min(us, us_by_context.get(row["step"], us))
        return us_by_context, tables.source_of(path)
    raise NoRecording(f"no recording of the attention of {framework} {release} on {gpu}")
