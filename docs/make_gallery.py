"""The pictures of gallery.md, from runs that need no GPU: python docs/make_gallery.py [DIR]. Needs chromium and the package index."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).parents[1]
RECORDED = ("--nfp-gpu=h200", "--nfp-measure=recorded", "--nfp-backend=vllm==0.24.0", "suites/moe", "suites/dense")
UPGRADE = ("--nfp-gpu=h20", "--nfp-measure=none", "--nfp-backend=vllm==0.33.0", "suites/moe")


def pictures(report: Path, upgrade: Path, folder: Path) -> list[Path]:
    """Photograph the table, a case, and what an upgrade changed."""
    from playwright.sync_api import sync_playwright

    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no chromium: apt-get install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        written = []
        for name, page_file, scheme in (
            ("report", report, "light"),
            ("case", report, "light"),
            ("upgrade", upgrade, "dark"),
        ):
            page = started.new_page(viewport={"width": 1200, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
            page.goto(page_file.as_uri())
            page.wait_for_selector("html[data-ready=true]", state="attached")
            if name != "report":
                if name == "upgrade":
                    page.fill("#query", "llada-2.1-mini balanced")
                page.click("#table tbody button >> nth=0")
                page.wait_for_selector(".detail [data-chart=strip] svg")
            if name == "case":
                page.locator(".detail").screenshot(path=str(folder / "case.png"))
            else:
                page.screenshot(path=str(folder / f"{name}.png"), full_page=name == "upgrade", clip=None)
            written.append(folder / f"{name}.png")
        started.close()
    return written


def main() -> None:
    """Two runs, three pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PROJECT / "docs" / "gallery"
    with tempfile.TemporaryDirectory() as scratch:
        for name, given in (("recorded", RECORDED), ("upgrade", UPGRADE)):
            command = [sys.executable, "-m", "pytest", "-q", *given, f"--nfp-report={Path(scratch) / name}"]
            # 1: some cases failed, which is what the upgrade is there to show.
            if subprocess.run(command, cwd=PROJECT, check=False).returncode not in (0, 1):
                raise SystemExit(f"{' '.join(command)} did not run")
        for path in pictures(
            Path(scratch) / "recorded/h200/index.html", Path(scratch) / "upgrade/h20/index.html", folder
        ):
            print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
