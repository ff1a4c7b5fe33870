"""Curves of a short run on the GPU here, in the form of the recorded ones: the same fit, cross-validation and file take them.

Single GEMMs by torch, and the Triton experts of whichever of vLLM and SGLang is installed; BF16, balanced routing, shapes that
no suite tests. Not run on a GPU yet: the logic is tested with a simulated device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib import metadata

from pytest_nfp.backends import REFUSALS, Unsupported, prepare
from pytest_nfp.cases import Backend, Case
from pytest_nfp.catalog import Model, Moe
from pytest_nfp.devices import Device
from pytest_nfp.measure.sweep import sweep_module
from pytest_nfp.principle import Point
from pytest_nfp.recordings.library import MIN_POINTS, RecordedCurve
from pytest_nfp.recordings.residuals import GEMM_ROWS

GEMMS = (
    *((6144, 6144), (5120, 7168), (9216, 4608), (4608, 9216), (12288, 3072), (3072, 12288), (7168, 10240)),
    *((10240, 7168), (18432, 4608), (4608, 18432), (24576, 3072), (16384, 6144), (6144, 16384), (28672, 6144)),
)
"""(n, k), more than 60 MB each: below, weights stay in the cache between forwards."""
EXPERTS = (
    *((32, 4, 2048, 1024), (32, 2, 4096, 1792), (48, 6, 2048, 1280), (64, 4, 3072, 896), (64, 8, 1536, 1536)),
    *((96, 6, 2560, 768), (96, 8, 4096, 640), (128, 4, 2048, 512), (128, 6, 3584, 1024), (160, 8, 2560, 1024)),
    *((192, 8, 3072, 512), (256, 8, 2560, 384), (256, 4, 1536, 768), (16, 2, 3584, 3072)),
)
"""(experts, k, hidden, width), more than 150 MB together."""
TOKENS = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1536, 2048, 3072),
    4096,
)
TRITON = {"vllm": "vllm_fused_moe", "sglang": "sglang_fused_moe_triton"}
"""The kernel that a framework's fused experts run, as the recorded tables name it."""


def installed() -> dict[str, str]:
    """Framework -> release, of those whose experts can be called here."""
    found = {}
    for framework in TRITON:
        try:
            found[framework] = metadata.version(framework)
        except metadata.PackageNotFoundError:
            continue
    return found


def calibration_cases(device: Device, frameworks: dict[str, str]) -> list[Case]:
    """A case for each shape: N positions of one request are N rows."""
    torch = Backend("torch", device.torch_release)
    found = [
        Case(device.gpu, torch, "dense", Model(name=f"gemm-{n}x{k}", hidden=k, source="calibration shape"), "bf16", gemm=(n, k))
        for n, k in GEMMS
    ]  # fmt: skip
    for framework, release in frameworks.items():
        for experts, top_k, hidden, width in EXPERTS:
            moe = Moe(experts=experts, top_k=top_k, width=width)
            name = f"experts-{experts}x{hidden}x{width}"
            subject = Model(name=name, hidden=hidden, moe=moe, source="calibration shape")
            backend = Backend(framework, release)
            found.append(Case(device.gpu, backend, "moe", subject, "bf16", top_k=top_k, routing="balanced"))
    return found


def measured(
    cases: Sequence[Case], device: Device, seed: int = 0, say: Callable[[str], None] = lambda text: None
) -> list[RecordedCurve]:
    """One curve a case, each checked against its reference first. What can't be measured or trusted is left out, and said."""
    curves = []
    for i, case in enumerate(cases, 1):
        name = f"{case.backend} {case.subject.name}"
        say(f"measuring {name} ({i} of {len(cases)})")
        try:
            curves.append(_curve(case, device, seed))
        except (_LeftOut, Unsupported, *REFUSALS) as reason:
            say(f"left out: {name}: {reason}")
        # What a case held is gone with its frames: the next one may need the memory.
        device.clean()
    return curves


class _LeftOut(Exception):
    """A case that gives no curve; the message says why."""


def _curve(case: Case, device: Device, seed: int) -> RecordedCurve:
    prepared = prepare(case, seed, device.cache_bytes)
    base = case.baseline_positions
    if prepared.check is not None and (wrong := prepared.check(base)):
        raise _LeftOut(wrong)
    rows = sorted(GEMM_ROWS) if case.module == "dense" else TOKENS
    curve = sweep_module(prepared, [m for m in rows if m >= base], device, base, seed)
    if curve.invalid:
        raise _LeftOut("; ".join(curve.invalid))
    if curve.boundary(0.20) is None or len(curve.points) < MIN_POINTS:
        refused = next(iter(curve.unsupported.values()), "no N was measured")
        raise _LeftOut(f"{len(curve.points)} points are too few: {refused}")
    return _as_recorded(case, curve.points, device)


def _as_recorded(case: Case, points: tuple[Point, ...], device: Device) -> RecordedCurve:
    """The curve in the library's form. A GEMM is one expert of one matrix."""
    moe, hidden, width = case.subject.moe, case.subject.hidden, 0
    if case.gemm is not None:
        width, hidden = case.gemm
    elif moe is not None:
        width = moe.width
    return RecordedCurve(
        gpu=device.gpu,
        framework=case.backend.framework,
        release=case.backend.release,
        module="dense" if moe is None else "moe",
        dtype=case.dtype,
        kernel=TRITON.get(case.backend.framework, "torch.matmul"),
        experts=moe.experts if moe is not None else 1,
        top_k=case.top_k or 1,
        hidden=hidden,
        width=width,
        tp=1,
        distribution="" if moe is None else "balanced",
        base=case.baseline_positions,
        points=tuple(Point(p.positions, p.latency_us) for p in points),
        source=source_of(device),
    )


def source_of(device: Device) -> str:
    """The device as a calibration cites it: its name, driver, CUDA, torch and timer."""
    known = {name: device.identity.get(name) for name in ("driver", "cuda")}
    parts = [device.title, *(f"{name} {value}" for name, value in known.items() if value)]
    return ", ".join([*parts, f"torch {device.torch_release}", device.timer])


def digest(curves: Sequence[RecordedCurve]) -> str:
    """SHA-256 of what was measured."""
    return hashlib.sha256(repr([(c.shape, c.points) for c in curves]).encode()).hexdigest()
