"""How far the closed form on datasheet figures is off on recorded GPU curves: the interval of a prediction that nothing calibrates.

    python benchmarks/datasheet_errors.py [--write]

For each module and framework, over all recorded curves of BF16 under balanced routing: the recorded N_max over the principle's. 95% of
the curves lie between `low` and `high`. --write puts the table into the catalog, where verdicts read it.
"""

from __future__ import annotations

import argparse

from pytest_nfp import catalog
from pytest_nfp.calibration import cross_validation, kernel_work
from pytest_nfp.calibration.cross_validation import TOLERANCE
from pytest_nfp.calibration.kernel_work import Joined
from pytest_nfp.files import write_atomically
from pytest_nfp.principle import branch_term, dense_term, find_boundary, moe_term
from pytest_nfp.recordings import library, tables

GPUS = ("a100", "b200", "h100", "h200", "l40s")


def principle(j: Joined) -> int:
    """N_max of the closed form in rows, as the suites compute it: at N0, never below it."""
    c = j.curve
    if c.module == "dense":
        gpu = catalog.gpu(c.gpu)
        return dense_term(gpu.peak_flops_of(c.dtype) / gpu.bandwidth, library.WEIGHT_BYTES[c.dtype], 1)
    assert j.granularity is not None
    limit = j.granularity.branch_limit(c.base)
    terms = [moe_term("balanced", j.granularity.tile(c.base), c.experts, c.top_k, 1)]
    return min([*terms, *([branch_term(limit, 1)] if limit else [])])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--write", action="store_true", help=f"write {catalog.DATASHEET_ERRORS}")
    given = p.parse_args()
    rows = []
    modules: tuple[library.Module, ...] = ("dense", "moe")
    for module in modules:
        curves = [c for c in library.read_all(GPUS, module).curves if c.distribution in ("", "balanced")]
        for framework in ("sglang", "vllm"):
            mine = [c for c in curves if c.framework == framework]
            joined = [j for j in kernel_work.join(mine)[0] if module == "dense" or j.granularity is not None]
            ratios = [find_boundary(j.curve.points, TOLERANCE, j.curve.base).n_max / principle(j) for j in joined]
            low, high = cross_validation.percentiles(ratios)
            print(f"{module} {framework}: {len(joined)} curves, recorded over predicted N_max {low} to {high} (95%)")
            rows.append(
                f"- {{module: {module}, framework: {framework}, low: {low}, high: {high}, curves: {len(joined)}}}"
            )
    if given.write:
        head = (
            "# Written by `python benchmarks/datasheet_errors.py --write`: recorded N_max over the principle's, BF16, balanced.\n"
            f"schema: 1\nsource: aiconfigurator-core {tables.VERSION}\nerrors:\n"
        )
        write_atomically(catalog.DATASHEET_ERRORS, head + "\n".join(rows) + "\n")
        print(f"wrote {catalog.DATASHEET_ERRORS}")


if __name__ == "__main__":
    main()
