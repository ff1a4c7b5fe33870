"""nfp calibrate: fit the tile roofline to recorded curves, or to curves of a short run on this machine's CPU or GPU."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pytest_nfp import catalog
from pytest_nfp.catalog import CALIBRATIONS, UnknownName
from pytest_nfp.cli import options
from pytest_nfp.files import read_yaml, write_atomically
from pytest_nfp.predict.calibrations import own_calibrations
from pytest_nfp.recordings.errors import NoRecording

if TYPE_CHECKING:
    from pytest_nfp.devices import Device
    from pytest_nfp.predict.calibration_files import Fitted

Module = Literal["dense", "moe"]
MODULES: tuple[Module, ...] = ("dense", "moe")


def add(commands: Any) -> None:
    """Declare the command."""
    p = commands.add_parser(
        "calibrate",
        help="fit the tile roofline to recorded curves or to this device",
        description="Fits effective bandwidth, compute by tile height, overlap and costs for each GPU, framework, kernel and dtype,"
        " cross-validates over shapes, and writes the calibrations. The same recordings give the same bytes.",
        epilog="examples: nfp calibrate --from recorded --gpu h200 --output calibrations.yaml;"
        " nfp calibrate --from device measures GEMMs, and the experts of the vLLM or SGLang that is installed",
    )
    p.add_argument("--from", dest="source", choices=("recorded", "device"), default="recorded", help="default recorded")
    p.add_argument(
        "--gpu",
        action="append",
        default=[],
        help="catalog name; repeatable (default: all recorded ones, or the device here)",
    )
    p.add_argument("--module", choices=MODULES, action="append", default=[], help="default both; repeatable")
    options.add_dtype(p, action="append", default=[], help="default: all that are recorded; repeatable")
    p.add_argument(
        "--output",
        type=Path,
        help="file to write (default: the catalog's own; with --from device the one in your cache, which comes before the catalog). Other calibrations in it are kept",
    )
    p.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Fit and write calibrations. Raises UnknownName, NoRecording, FileError."""
    if given.source == "device":
        return _device(given)
    from pytest_nfp.predict.calibration_files import text_of
    from pytest_nfp.recordings import library, tables

    output = given.output or CALIBRATIONS
    recorded = [d for d in options.DTYPES if d in library.DTYPES]
    jobs = []
    for gpu in given.gpu or sorted(tables.SYSTEMS):
        name = catalog.gpu(gpu).name
        for module in given.module or MODULES:
            backends = tables.releases(name, module)
            if not backends:
                tables.table_path(name, "vllm", "0", module)  # raises an error that names what is missing
            frameworks = dict.fromkeys(b.framework for b in backends)
            jobs += [(name, f, module, dtype) for f in frameworks for dtype in given.dtype or recorded]
    kept = _kept(output)
    written = 0
    with ProcessPoolExecutor() as pool:
        for kernel_fits in pool.map(_fit, jobs):
            for line, calibrated in kernel_fits:
                print(line, file=sys.stdout if calibrated else sys.stderr, flush=True)
                if calibrated is not None:
                    fitted, residuals = calibrated
                    kept[fitted.key] = fitted
                    write_atomically(fitted.residuals_path(output), residuals)
                    written += 1
    if not written:
        raise NoRecording("nothing could be fitted, so nothing was written")
    write_atomically(output, text_of(list(kept.values())))
    print(f"wrote {output}")
    return 0


def _fit(job: tuple[str, str, Module, str]) -> list[tuple[str, tuple[Fitted, str] | None]]:
    """Fit each kernel of one job: a GPU, framework, module and dtype.

    Returns (message, (calibration, residuals)) for each kernel. The pair is None where nothing was fitted.
    """
    from pytest_nfp.calibration import fit, kernel_work
    from pytest_nfp.recordings import library, tables

    gpu, framework, module, dtype = job
    curves = library.read_all([gpu], module, dtype).curves
    framework_curves = [c for c in curves if c.framework == framework and c.distribution in ("", "balanced")]
    kernel_fits: list[tuple[str, tuple[Fitted, str] | None]] = []
    for family in sorted({c.family for c in framework_curves}):
        name = f"{gpu} {framework} {family} {dtype}"
        try:
            joined, _ = kernel_work.join([c for c in framework_curves if c.family == family])
            fitted, residuals = fit.calibrate(joined, tables.digest([j.curve for j in joined]))
        except fit.NoFit as reason:
            kernel_fits.append((f"  {name}: no calibration: {reason}", None))
            continue
        kernel_fits.append((said_of(fitted), (fitted, residuals)))
    return kernel_fits


def _device(given: argparse.Namespace) -> int:
    """Calibrate this machine's CPU or GPU. Raises UnknownName where the device is not here."""
    from pytest_nfp.devices import detect, find_device
    from pytest_nfp.devices.lock import device_lock

    if len(given.gpu) > 1:
        raise UnknownName("one device is calibrated at a time: give one --gpu, or none for the one that is here")
    gpu = given.gpu[0] if given.gpu else detect()
    if gpu == "cpu" and (given.output or given.module or given.dtype):
        raise UnknownName(
            "a CPU's calibration is one file of the cache, of all its kernels in FP32: no --output, --module, --dtype"
        )
    device, reason = find_device(gpu if gpu == "cpu" else catalog.gpu(gpu).name)
    if device is None:
        raise UnknownName(reason)
    with device_lock(device):
        return _cpu(device) if gpu == "cpu" else _gpu(device, given)


def _cpu(device: Device) -> int:
    """Calibrate every kernel of torch, from the cache or by a measurement.

    Raises NoRecording where none could be calibrated.
    """
    from pytest_nfp.calibration import own_cpu
    from pytest_nfp.calibration.fit import NoFit
    from pytest_nfp.granularity.artifacts import cache_folder

    folder, count = cache_folder("calibrations"), 0
    for kernel in own_cpu.KERNELS:
        try:
            print(said_of(own_cpu.load_or_calibrate(device, kernel, folder, 0, _say)))
        except NoFit as reason:
            _say(f"{kernel}: no calibration: {reason}")
            continue
        count += 1
    if not count:
        raise NoRecording("no kernel of this CPU could be calibrated, for the reasons above")
    print(f"kept in {own_cpu.calibrations_path(device, folder)}: delete it to measure again")
    return 0


def _gpu(device: Device, given: argparse.Namespace) -> int:
    """Measure, fit and write the kernels that run here. Raises NoRecording where nothing could be fitted."""
    from pytest_nfp.calibration import device_curves as run
    from pytest_nfp.calibration import fit, kernel_work
    from pytest_nfp.predict import calibration_files

    if others := set(given.dtype) - {"bf16"}:
        raise UnknownName(f"a device run measures bf16, not {', '.join(sorted(others))}: --from recorded has those")
    frameworks = run.installed()
    wanted = given.module or MODULES
    if not frameworks and "moe" in wanted:
        _say("neither vllm nor sglang is installed, so no experts are measured")
    cases = [c for c in run.calibration_cases(device, frameworks) if c.module in wanted]
    curves = run.measured(cases, device, say=_say)
    output = given.output or own_calibrations()
    kept = _kept(output)
    written = 0
    for framework, family in sorted({(c.framework, c.family) for c in curves}):
        family_curves = [c for c in curves if (c.framework, c.family) == (framework, family)]
        joined, left_out = kernel_work.join(family_curves)
        for why, count in left_out.items():
            _say(f"left out: {count} curves of {framework}: {why}")
        try:
            fitted, residuals = fit.calibrate(
                joined, run.digest(family_curves), "measured", fit.peaks_of(device.gpu, "bf16", device.processors)
            )
        except fit.NoFit as reason:
            _say(f"{device.gpu} {framework} {family} bf16: no calibration: {reason}")
            continue
        print(said_of(fitted))
        kept[fitted.key] = fitted
        write_atomically(fitted.residuals_path(output), residuals)
        written += 1
    if not written:
        raise NoRecording(
            "nothing could be fitted, so nothing was written; the lines above say what was left out, and why"
        )
    write_atomically(output, calibration_files.text_of(list(kept.values())))
    used = (
        "used before the catalog's" if output == own_calibrations() else "not used by itself: --output chose the file"
    )
    print(f"wrote {output}, {used}")
    return 0


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def _kept(output: Path) -> dict[tuple[str, str, str, str], Fitted]:
    """The calibrations that the file already holds, by key. Raises FileError."""
    from pytest_nfp.predict.calibration_files import CalibrationsFile

    return {f.key: f for f in read_yaml(output, CalibrationsFile).calibrations} if output.exists() else {}


def said_of(c: Fitted) -> str:
    """A calibration in one line."""
    return (
        f"{' '.join(c.key)}: {c.curves} curves of {c.shapes} shapes, T error {c.error:.1%}, N_max within one step"
        f" {c.within_one_step:.0%}, in its interval {c.covered:.0%} (held-out shapes)"
    )
