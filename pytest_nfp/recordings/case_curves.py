"""The recorded curve of a case, from the library's tables. Each case without a comparable curve gets its own reason."""

from __future__ import annotations

from pytest_nfp import catalog
from pytest_nfp.cases import Case
from pytest_nfp.curves import Curve
from pytest_nfp.principle import Point
from pytest_nfp.recordings import library
from pytest_nfp.recordings.errors import NoRecording
from pytest_nfp.recordings.library import Key
from pytest_nfp.recordings.tables import GROUP_LIMITED, MIN_EXPERTS_BYTES, MIN_GEMM_BYTES, source_of, table_path

MAX_POSITIONS = 4096


def curve(case: Case) -> Curve:
    """T(N) of a recorded GEMM (b = 1: N = m) or balanced MoE. Raises NoRecording with the one reason."""
    path = table_path(case.gpu, case.backend.framework, case.backend.release, case.module)
    if case.dtype != "bf16":
        raise NoRecording(f"recordings are read for bf16, not for {case.dtype}")
    wanted = _gemm(case) if case.module == "dense" else _experts(case)
    latencies = {key.kernel: us for key, us in library.latencies(path, case.dtype).by_key.items() if key[:-1] == wanted}
    if not latencies:
        raise NoRecording(f"the table of {case.backend} on {case.gpu} does not hold this shape")
    if len(latencies) > 1:
        raise NoRecording(f"the table holds several kernels for this shape: {', '.join(sorted(latencies))}")
    ((kernel, by_rows),) = latencies.items()
    points = tuple(
        Point(m // case.batch, us)
        for m, us in sorted(by_rows.items())
        if m % case.batch == 0 and m // case.batch <= MAX_POSITIONS
    )
    base = next((p for p in points if p.positions >= case.baseline_positions), None)
    if base is None:
        raise NoRecording(f"the grid of the table has no point at or above N0 = {case.baseline_positions}")
    _check_bandwidth(case, base.latency_us)
    return Curve(
        points=points,
        baseline_positions=base.positions,
        kind="recorded",
        source=source_of(path),
        kernel=kernel,
        counts={"points": len(points)},
    )


def _check_bandwidth(case: Case, base_us: float) -> None:
    """Raise NoRecording if the forward did not read all its weights from memory.

    It did not if the weights fit the cache, or if they were read faster than the memory can deliver.
    """
    gpu = catalog.gpu(case.gpu)
    if case.gemm is not None:
        weights = case.bytes_per_element * case.gemm[0] * case.gemm[1]
        smallest, what = MIN_GEMM_BYTES, "weights"
    else:
        moe = case.subject.moe
        assert moe is not None
        weights = case.bytes_per_element * moe.experts * moe.matrices * case.subject.hidden * moe.width
        smallest, what = MIN_EXPERTS_BYTES, "experts"
    if weights < smallest:
        raise NoRecording(
            f"{what} of {weights / 1e6:.0f} MB stay in the cache; curves from {smallest / 1e6:.0f} MB on are read"
        )
    share = weights / (base_us * 1e-6) / gpu.bandwidth
    if share > 1:
        raise NoRecording(
            f"T(N0) implies {share:.0%} of the peak bandwidth: not all {what} were read, so it is not comparable"
        )


def _gemm(case: Case) -> tuple[object, ...]:
    """The case's GEMM as a Key of the library without the kernel. Raises NoRecording for a whole FFN."""
    if case.gemm is None:
        raise NoRecording("the recordings hold single GEMMs; a whole FFN is not composed of them here")
    n, k = case.gemm
    return Key(1, 1, k, n, 1, "", "")[:-1]


def _experts(case: Case) -> tuple[object, ...]:
    """The case's experts as a Key of the library without the kernel. Raises NoRecording."""
    moe, hidden = case.subject.moe, case.subject.hidden
    assert moe is not None and case.top_k is not None
    if case.routing != "balanced":
        raise NoRecording("the recordings hold balanced routing (and power laws), not skewed routing")
    is_deepseek = (hidden, moe.experts) == (7168, 256)
    if is_deepseek and (case.backend.framework, case.backend.release) in GROUP_LIMITED:
        raise NoRecording(
            "this table ran DeepSeek shapes with group-limited routing: half of the experts, not comparable"
        )
    return Key(moe.experts, case.top_k, hidden, moe.width, 1, "balanced", "")[:-1]
