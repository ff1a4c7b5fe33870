"""A report of 10,000 cases: seconds to render, megabytes, and in a browser milliseconds to open, filter, sort and open a case.

    python benchmarks/report.py [CASES]

Needs chromium; without it the browser's figures are left out.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from pytest_nfp import records
from pytest_nfp.records import CaseRecord, Held, Record, TestResult
from pytest_nfp.report import charts
from pytest_nfp.report.files import write_page

GPUS, MODELS = (
    ("h100", "h200", "b200", "l40s"),
    ("qwen3-8b", "mixtral-8x7b", "llada-2.1-mini", "qwen3-30b-a3b", "ling-2.0-mini"),
)
GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)


def made(i: int, drawn: random.Random) -> CaseRecord:
    """A case with a curve, intervals, a map of four tiles and a baseline, no two alike."""
    gpu, model = GPUS[i % 4], MODELS[i % 5]
    batch, top_k, release = 2 ** (i % 6), 2 ** (i % 4), f"0.{20 + i % 9}.0"
    base = drawn.uniform(20, 900)
    curve = [(n, round(base * (1 + 0.002 * n * drawn.uniform(0.9, 1.1)), 2)) for n in GRID]
    tiles = [(1, 32, 16), (33, 96, 32 if i % 7 else 64), (97, 512, 64), (513, 4096, 128)]
    outcome = ("PASS", "PASS", "PASS", "FAIL", "UNDECIDED")[drawn.randrange(5)]
    workload = f"moe-bf16-b{batch}-k{top_k}-{'balanced' if i % 2 else 'skewed'}-{i}"
    reasons = (
        []
        if outcome == "PASS"
        else [f"measured N_max {drawn.randrange(1, 512)} is not the baseline's {drawn.randrange(1, 512)}"]
    )
    n_max = drawn.choice(GRID[3:-1])
    terms = {name: {"n_max": drawn.choice(GRID), "limiting": "moe"} for name in ("principle", "tile_roofline")}
    return CaseRecord(
        id=f"{gpu}-vllm=={release}-{model}-{workload}", gpu=gpu, backend=f"vllm=={release}", module="moe", subject=model,
        workload=workload, dtype="bf16", batch=batch, top_k=top_k, routing="balanced" if i % 2 else "skewed", kind="measured",
        outcome=outcome, reasons=reasons, tests={"boundary": TestResult(outcome=outcome, reasons=reasons)}, n_idle=1445.0,  # type: ignore[arg-type]
        predicted=terms, basis="datasheet", baseline_positions=1, n_max=n_max, n_max_interval=(n_max, n_max + 1), n_first_exit=n_max,
        curve=curve, ratios=[(n, round(us / base * 0.99, 4), round(us / base * 1.01, 4)) for n, us in curve], timer="cuda-graph",
        kernel="fused_moe_kernel", source="NVIDIA H200", counts={"rounds": drawn.randrange(10, 99), "forwards": drawn.randrange(1000)},
        trust={"other_load": round(drawn.random() / 9, 3)},
        granularity={"kernel": "triton", "tiles": tiles, "source": "default rule", "artifact": f"vllm-{release}.whl", "sha256": "ab" * 32,
                     "origin": "index", "warnings": [], "edges": [32, 96, 512]},
        baseline=Held(name="the baseline of vllm==0.19.0", exact=False, kernel="triton", tiles=[(1, 32, 16), (33, 512, 64), (513, 4096, 128)],
                      predicted=terms, kind="measured", n_max=n_max, n_max_interval=(n_max, n_max + 1), curve=curve),
    )  # fmt: skip


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    drawn = random.Random(0)
    run = Record(
        schema=records.SCHEMA, tool="pytest-nfp", gpu="all", started="2026-01-01T00:00:00+00:00", partial=False, tolerance=0.2,
        match_tolerance=0.15, protocol="adaptive", seed=0, machine={"title": "made up"}, cases=[made(i, drawn) for i in range(count)],
    )  # fmt: skip
    charts.bundle()  # Two seconds, once for a version of vl-convert: then it is in the cache.
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        (path,) = write_page(Path(folder), [run])
        print(f"{count} cases: rendered in {time.perf_counter() - began:.2f} s, {path.stat().st_size / 1e6:.2f} MB")
        browser = shutil.which("chromium") or shutil.which("chromium-browser")
        if browser is None:
            print("no chromium: the browser's figures are left out")
            return
        for name, times in in_browser(path, browser).items():
            print(f"{name}: {median(times):.0f} ms (median of {len(times)}, {min(times):.0f} to {max(times):.0f})")


TIMED = """async ([select, act]) => {
  const node = document.querySelector(select), began = performance.now();
  if (act === 'click') node.click();
  else if (act.startsWith('=')) { node.value = act.slice(1); node.dispatchEvent(new Event('input')); node.dispatchEvent(new Event('change')); }
  node.getBoundingClientRect(); document.body.offsetHeight;
  return performance.now() - began;
}"""


def in_browser(path: Path, browser: str, repeats: int = 7) -> dict[str, list[float]]:
    """Milliseconds, layout included; opening from the page's own clock."""
    from playwright.sync_api import sync_playwright

    found: dict[str, list[float]] = {}
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(repeats):
            page = started.new_page()
            page.goto(path.as_uri())
            page.wait_for_selector("html[data-ready=true]", state="attached")
            navigation = "performance.getEntriesByType('navigation')[0]"
            ready = page.evaluate("performance.getEntriesByName('nfp-ready')[0].startTime")
            found.setdefault("opens, from the first byte to a table that filters", []).append(
                ready - page.evaluate(f"{navigation}.responseStart")
            )
            found.setdefault("of which the table", []).append(
                page.evaluate("performance.measure('t', 'nfp-start', 'nfp-ready').duration")
            )
            found.setdefault("all of the file is read, in the background", []).append(
                page.evaluate(f"{navigation}.domInteractive - {navigation}.responseStart")
            )
            for name, select, act in (
                ("filters by a word", "#query", "=qwen3-8b fail"),
                ("filters by nothing again", "#query", "="),
                ("filters by a choice", "[data-facet=outcome]", "=1"),
                ("sorts by n_max", "th[data-column=n_max] button", "click"),
            ):
                found.setdefault(name, []).append(page.evaluate(TIMED, [select, act]))
            began = time.perf_counter()
            page.click("#table tbody button >> nth=0")
            page.wait_for_selector("[data-chart=curve] svg")
            found.setdefault("opens a first case, with its charts", []).append((time.perf_counter() - began) * 1e3)
            page.close()
        started.close()
    return found


if __name__ == "__main__":
    main()
