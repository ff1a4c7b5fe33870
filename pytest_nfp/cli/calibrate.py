"""nfp calibrate: fit the tile roofline to recorded curves, or to this machine's CPU."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pytest_nfp import catalog
from pytest_nfp.catalog import CALIBRATIONS, UnknownName
from pytest_nfp.files import read_yaml, write_atomically
from pytest_nfp.recordings.errors import NoRecording

if TYPE_CHECKING:
    from pytest_nfp.recordings.fit import Fitted

Module = Literal["dense", "moe"]
MODULES: tuple[Module, ...] = ("dense", "moe")
DTYPES = ("bf16", "fp8", "fp8-block", "int4")


def add(commands: Any) -> None:
    """Declare the command."""
    p = commands.add_parser(
        "calibrate",
        help="fit the tile roofline to recorded curves or to this CPU",
        description="Fits effective bandwidth, compute by tile height, overlap and costs for each GPU, framework, kernel and dtype,"
        " cross-validates over shapes, and writes the calibrations. The same recordings give the same bytes.",
        epilog="example: nfp calibrate --from recorded --gpu h200 --output calibrations.yaml",
    )
    p.add_argument("--from", dest="source", choices=("recorded", "device"), default="recorded", help="default recorded")
    p.add_argument("--gpu", action="append", default=[], help="catalog name; repeatable (default: all recorded ones)")
    p.add_argument("--module", choices=MODULES, action="append", default=[], help="default both; repeatable")
    p.add_argument("--dtype", choices=DTYPES, action="append", default=[], help="default all; repeatable")
    p.add_argument(
        "--output",
        type=Path,
        default=CALIBRATIONS,
        help="default: the catalog's own file; what it holds of other GPUs, modules and dtypes stays",
    )
    p.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Fit and write. Raises UnknownName, NoRecording, FileError."""
    if given.source == "device":
        return _device()
    from pytest_nfp.recordings import aiconfigurator
    from pytest_nfp.recordings.fit import CalibrationsFile, text_of

    jobs = []
    for gpu in given.gpu or sorted(aiconfigurator.SYSTEMS):
        name = catalog.gpu(gpu).name
        for module in given.module or MODULES:
            backends = aiconfigurator.releases(name, module)
            if not backends:
                aiconfigurator.table_path(name, "vllm", "0", module)  # says what is missing
            frameworks = dict.fromkeys(b.framework for b in backends)
            jobs += [(name, f, module, dtype) for f in frameworks for dtype in given.dtype or DTYPES]
    kept = {}
    if given.output.exists():
        kept = {f.key: f for f in read_yaml(given.output, CalibrationsFile).calibrations}
    written = 0
    with ProcessPoolExecutor() as pool:
        for found in pool.map(_fit, jobs):
            for said, calibrated in found:
                print(said, file=sys.stdout if calibrated else sys.stderr, flush=True)
                if calibrated is not None:
                    fitted, residuals = calibrated
                    kept[fitted.key] = fitted
                    write_atomically(fitted.residuals_path(given.output), residuals)
                    written += 1
    if not written:
        raise NoRecording("nothing could be fitted, so nothing was written")
    write_atomically(given.output, text_of(list(kept.values())))
    print(f"wrote {given.output}")
    return 0


def _fit(job: tuple[str, str, Module, str]) -> list[tuple[str, tuple[Fitted, str] | None]]:
    """What is said of each kernel of one table set, with its calibration and residuals where there is one."""
    from pytest_nfp.recordings import aiconfigurator, fit, library

    gpu, framework, module, dtype = job
    curves = library.read_all([gpu], module, dtype).curves
    mine = [c for c in curves if c.framework == framework and c.distribution in ("", "balanced")]
    found: list[tuple[str, tuple[Fitted, str] | None]] = []
    for family in sorted({c.family for c in mine}):
        name = f"{gpu} {framework} {family} {dtype}"
        try:
            joined, _ = fit.join([c for c in mine if c.family == family])
            one, residuals = fit.calibrate(joined, aiconfigurator.path_of_curve)
        except fit.NoFit as reason:
            found.append((f"  {name}: no calibration: {reason}", None))
            continue
        said = (
            f"{name}: {one.curves} curves of {one.shapes} shapes, T error {one.error:.1%}, N_max within one step"
            f" {one.within_one_step:.0%}, in its interval {one.covered:.0%} (held-out shapes)"
        )
        found.append((said, (one, residuals)))
    return found


def _device() -> int:
    """The CPU's own calibration, made now or taken from the cache."""
    from pytest_nfp.devices import find_device
    from pytest_nfp.granularity.artifacts import cache_folder
    from pytest_nfp.measure.calibrate import load_or_calibrate

    device, reason = find_device("cpu")
    if device is None:
        raise UnknownName(reason)
    found = load_or_calibrate(device, cache_folder("calibrations"), 0, lambda text: print(f"  {text}", file=sys.stderr))
    for kernel, c in found.kernels.items():
        verdict = "describes it" if c.describes else f"does not describe it: {c.cause}"
        print(
            f"{kernel}: {c.flops:.3g} FLOP/s, {c.bandwidth:.3g} B/s, overlap {c.overlap}, error {c.error:.1%}; {verdict}"
        )
    return 0
