"""Curves of a short run on this machine's device, in the form of recorded curves. They get the same fit and the same
file.

On a GPU: single GEMMs by torch, and the Triton experts of vLLM and SGLang, whichever is installed; BF16, balanced
routing. This has not run on a GPU yet: the logic is tested with a simulated device. On a CPU: the kernels of torch, in
FP32. No suite tests these shapes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata

from pytest_nfp import frameworks
from pytest_nfp.backends import REFUSALS, Prepared, Unsupported, prepare_on
from pytest_nfp.cases import ROUTINGS, Backend, Case
from pytest_nfp.catalog import Attention, Model, Moe
from pytest_nfp.devices import Device
from pytest_nfp.measure.protocol import CALIBRATION, CPU_CALIBRATION
from pytest_nfp.measure.sweep import sweep_module
from pytest_nfp.predict.residuals import GEMM_ROWS
from pytest_nfp.principle import Point
from pytest_nfp.recordings.library import MIN_POINTS, RecordedCurve

GEMMS = (
    *((6144, 6144), (5120, 7168), (9216, 4608), (4608, 9216), (12288, 3072), (3072, 12288), (7168, 10240)),
    *((10240, 7168), (18432, 4608), (4608, 18432), (24576, 3072), (16384, 6144), (6144, 16384), (28672, 6144)),
)
"""(n, k), more than 60 MB each: smaller weights stay in the cache between forwards."""
EXPERTS = (
    *((32, 4, 2048, 1024), (32, 2, 4096, 1792), (48, 6, 2048, 1280), (64, 4, 3072, 896), (64, 8, 1536, 1536)),
    *((96, 6, 2560, 768), (96, 8, 4096, 640), (128, 4, 2048, 512), (128, 6, 3584, 1024), (160, 8, 2560, 1024)),
    *((192, 8, 3072, 512), (256, 8, 2560, 384), (256, 4, 1536, 768), (16, 2, 3584, 3072)),
)
"""(experts, k, hidden, width), more than 150 MB for all experts of a shape."""
TOKENS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1536, 2048, 3072),
    4096,
)
CPU_GEMMS = (
    *((4096, 2048), (2048, 4096), (6144, 1536), (1536, 6144), (5120, 2560), (2560, 5120), (3072, 3072)),
    *((7168, 1792), (1792, 7168), (3584, 3584), (4608, 2304), (2304, 4608)),
)
"""(n, k) near the GEMMs of the suites' FFN, 33 to 52 MB each."""
CPU_EXPERTS = (
    *(
        (16, 4, 768, 896),
        (12, 4, 1280, 512),
        (16, 4, 768, 768),
        (12, 2, 896, 896),
        (12, 2, 1024, 640),
        (16, 4, 1024, 512),
    ),
    *(
        (16, 4, 896, 640),
        (12, 4, 1152, 640),
        (12, 4, 1536, 512),
        (16, 4, 640, 1024),
        (12, 4, 1024, 896),
        (12, 3, 1152, 768),
    ),
)
"""(experts, k, hidden, width)."""
CPU_ATTENTION = (
    *((12, 4096), (20, 3072), (8, 8192), (16, 3072), (12, 2560), (24, 1536), (8, 6144), (20, 1792), (32, 1536)),
    *((10, 5120), (14, 2304), (12, 6144)),
)
"""(heads, cached tokens). Each head has 128 dimensions."""
CPU_ROWS = {
    "dense": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48),
    "moe": (1, 2, 3, 4, 5, 6, 8, 12),
    "attention": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 33),
}
"""Rows of a GEMM, of each active expert, or of a request's queries. They hold both sides of every row count at which a
CPU's kernels were seen to switch."""
PARTS_OF_N0 = (1.25, 1.5)
"""Multiples of N0 at which balanced routing gives a second row to a part of the experts."""
FAR = 2.5
"""A CPU's curve ends where T is this many times the longest T of its first rows: no boundary lies farther out."""
FIRST_ROWS = 8
"""Number of grid points that count as the first rows."""


def installed() -> dict[str, str]:
    """By framework: its installed release, for frameworks whose experts can be called here."""
    release_by_framework = {}
    for framework in (f.name for f in frameworks.known().values() if f.triton_experts):
        try:
            release_by_framework[framework] = metadata.version(framework)
        except metadata.PackageNotFoundError:
            continue
    return release_by_framework


def calibration_cases(device: Device, frameworks: dict[str, str]) -> list[Case]:
    """A case for each shape on a GPU: N positions of one request are N rows."""
    torch = Backend("torch", device.torch_release)
    cases = [
        Case(device.gpu, torch, "dense", Model(name=f"gemm-{n}x{k}", hidden=k, source="calibration shape"), "bf16", gemm=(n, k))
        for n, k in GEMMS
    ]  # fmt: skip
    for framework, release in frameworks.items():
        for experts, top_k, hidden, width in EXPERTS:
            moe = Moe(experts=experts, top_k=top_k, width=width)
            name = f"experts-{experts}x{hidden}x{width}"
            subject = Model(name=name, hidden=hidden, moe=moe, source="calibration shape")
            backend = Backend(framework, release)
            cases.append(Case(device.gpu, backend, "moe", subject, "bf16", top_k=top_k, routing="balanced"))
    return cases


def cpu_cases(device: Device, kernel: str) -> list[Case]:
    """A case for each calibration shape of one of torch's CPU kernels; experts have one for each of both routings.

    Empty for a kernel without calibration shapes.
    """
    torch = Backend("torch", device.torch_release)

    def model(name: str, hidden: int, **part: Attention | Moe) -> Model:
        return Model(name=name, hidden=hidden, source="calibration shape", **part)

    if kernel in ("matmul", "onednn-packed"):
        return [
            Case("cpu", torch, "dense", model(f"gemm-{n}x{k}", k), "fp32", kernel=kernel, gemm=(n, k))
            for n, k in CPU_GEMMS
        ]
    if kernel == "grouped_mm":
        subjects = [
            model(f"experts-{e}x{d}x{f}", d, moe=Moe(experts=e, top_k=k, width=f)) for e, k, d, f in CPU_EXPERTS
        ]
        return [
            Case("cpu", torch, "moe", m, "fp32", kernel=kernel, top_k=m.moe.top_k, routing=routing)
            for m in subjects
            if m.moe is not None
            for routing in ROUTINGS
        ]
    if kernel == "sdpa":
        return [
            Case(
                "cpu", torch, "attention",
                model(f"attention-{heads}x128", heads * 128, attention=Attention(heads=heads, kv_heads=heads, head_dim=128)),
                "fp32", kernel=kernel, context=context,
            )
            for heads, context in CPU_ATTENTION
        ]  # fmt: skip
    return []


def measured(
    cases: Sequence[Case], device: Device, seed: int = 0, say: Callable[[str], None] = lambda text: None
) -> list[RecordedCurve]:
    """One curve for each case. Each case is checked against its reference first.

    A case that can't be measured or trusted is left out, and `say` gets the reason.
    """
    curves = []
    for i, case in enumerate(cases, 1):
        routing = f" {case.routing}" if case.gpu == "cpu" and case.routing else ""  # a GPU's cases are all balanced
        name = f"{case.backend} {case.subject.name}{routing}"
        say(f"measuring {name} ({i} of {len(cases)})")
        try:
            curves.append(_curve(case, device, seed))
        except (_LeftOut, Unsupported, *REFUSALS) as reason:
            say(f"left out: {name}: {reason}")
        # The memory of the case is free now: the next case may need it.
        device.clean()
    return curves


class _LeftOut(Exception):
    """A case without a usable curve. The message is the reason."""


def _curve(case: Case, device: Device, seed: int) -> RecordedCurve:
    prepared = prepare_on(device, case, seed)
    base = case.baseline_positions
    if prepared.check is not None and (wrong := prepared.check(base)):
        raise _LeftOut(wrong)
    on_cpu = device.gpu == "cpu"
    grid = _near(_rows(case), prepared, device) if on_cpu else _rows(case)
    protocol = CPU_CALIBRATION if on_cpu else CALIBRATION
    device = replace(device, kernels=None)  # Naming the kernels would take one forward of ten.
    curve = sweep_module(prepared, grid, device, base, seed, protocol)
    if curve.invalid and on_cpu:
        # The load of another process may have passed.
        curve = sweep_module(prepared, grid, device, base, seed, protocol)
    if curve.invalid:
        raise _LeftOut("; ".join(curve.invalid))
    if curve.boundary(0.20) is None or len(curve.points) < MIN_POINTS:
        refused = next(iter(curve.unsupported.values()), "no N was measured")
        raise _LeftOut(f"{len(curve.points)} points are too few: {refused}")
    return _as_recorded(case, curve.points, device)


def _rows(case: Case) -> list[int]:
    """The grid of N of a curve, from N0 on."""
    base = case.baseline_positions
    if case.gpu != "cpu":
        return [m for m in (sorted(GEMM_ROWS) if case.module == "dense" else TOKENS) if m >= base]
    counts = {base * rows for rows in CPU_ROWS[case.module]}
    return sorted(counts | {int(base * part) for part in PARTS_OF_N0 if base > 1})


def _near(grid: Sequence[int], prepared: Prepared, device: Device) -> list[int]:
    """The part of the grid where T is near enough to T(N0) for a boundary to be read."""
    near: list[int] = []
    longest = 0.0
    for i, n in enumerate(grid):
        run = prepared.forward(n)
        device.time_us(run)
        us = device.time_us(run)
        if i >= FIRST_ROWS and us > FAR * longest:
            break
        longest = max(longest, us) if i < FIRST_ROWS else longest
        near.append(n)
    return near


def _as_recorded(case: Case, points: tuple[Point, ...], device: Device) -> RecordedCurve:
    """The curve in the form of the library. A GEMM counts as one expert of one matrix."""
    moe, attention, hidden, width = case.subject.moe, case.subject.attention, case.subject.hidden, 0
    if case.gemm is not None:
        width, hidden = case.gemm
    elif moe is not None:
        width = moe.width
    elif attention is not None:
        width = attention.head_dim
    experts = moe.experts if moe is not None else attention.heads if attention is not None else 1
    return RecordedCurve(
        gpu=device.gpu,
        framework=case.backend.framework,
        release=case.backend.release,
        module="dense" if case.gemm is not None else "moe" if moe is not None else "attention",
        dtype=case.dtype,
        kernel=case.kernel or _kernel_of(case),
        experts=experts,
        top_k=case.top_k or 1,
        hidden=hidden,
        width=width,
        tp=1,
        distribution=str(case.routing or ""),
        base=case.baseline_positions,
        points=tuple(Point(p.positions, p.latency_us) for p in points),
        source=source_of(device),
        context=case.context or 0,
    )


def _kernel_of(case: Case) -> str:
    """The kernel of a case that names none, as the recorded tables call it."""
    framework = frameworks.get(case.backend.framework)
    return (framework.triton_experts if framework is not None else "") or "torch.matmul"


def source_of(device: Device) -> str:
    """The device as a calibration cites it: name, driver, CUDA, torch and timer."""
    known = {name: device.identity.get(name) for name in ("driver", "cuda")}
    parts = [device.title, *(f"{name} {value}" for name, value in known.items() if value)]
    return ", ".join([*parts, f"torch {device.torch_release}", device.timer])


def digest(curves: Sequence[RecordedCurve]) -> str:
    """SHA-256 of the measured shapes and points."""
    return hashlib.sha256(repr([(c.shape, c.points) for c in curves]).encode()).hexdigest()
