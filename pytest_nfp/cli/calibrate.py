"""nfp calibrate: fit the tile roofline to recorded curves, or to this machine's CPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pytest_nfp import catalog
from pytest_nfp.catalog import CALIBRATIONS, UnknownName
from pytest_nfp.files import write_atomically
from pytest_nfp.recordings.errors import NoRecording


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
    p.add_argument("--module", choices=("dense", "moe"), action="append", default=[], help="default both; repeatable")
    p.add_argument("--dtype", default="bf16", help="default bf16")
    p.add_argument("--output", type=Path, default=CALIBRATIONS, help="default: the catalog's own file")
    p.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Fit and write. Raises UnknownName, NoRecording."""
    if given.source == "device":
        return _device()
    from pytest_nfp.recordings import aiconfigurator, fit, library

    fitted = []
    for gpu in given.gpu or sorted(aiconfigurator.SYSTEMS):
        name = catalog.gpu(gpu).name
        for module in given.module or ("dense", "moe"):
            backends = aiconfigurator.releases(name, module)
            if not backends:
                aiconfigurator.table_path(name, "vllm", "0", module)  # says what is missing
            found = [
                c for c in library.read_all([name], module, given.dtype).curves if c.distribution in ("", "balanced")
            ]
            for framework in dict.fromkeys(b.framework for b in backends):
                mine = [c for c in found if c.framework == framework]
                if not mine:
                    continue
                print(f"  {name} {framework} {module} {given.dtype}: {len(mine)} curves", file=sys.stderr)
                try:
                    joined, _ = fit.join(mine)
                    one = fit.calibrate(joined, aiconfigurator.path_of_curve)
                except fit.NoFit as reason:
                    print(f"  {name} {framework} {module}: no calibration: {reason}", file=sys.stderr)
                    continue
                fitted.append(one)
                print(
                    f"{one.gpu} {one.framework} {one.kernel} {one.dtype}: {one.curves} curves of {one.shapes} shapes,"
                    f" T error {one.error:.1%}, N_max within one step {one.within_one_step:.0%} (held-out shapes)"
                )
    if not fitted:
        raise NoRecording("nothing could be fitted, so nothing was written")
    write_atomically(given.output, fit.text_of(fitted))
    print(f"wrote {given.output}")
    return 0


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
