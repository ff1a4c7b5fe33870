"""A real browser for pages that are files: Debian's chromium, headless."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SCREENSHOTS = Path(__file__).parents[2] / "reports" / "screenshots"


@dataclass
class Opened:
    """A page with what it asked for and complained of."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def row_names(self) -> list[str]:
        """Cases of the table as it is filtered and sorted now."""
        found: list[str] = self.page.eval_on_selector_all(
            "#table tbody tr[data-case]", "rows => rows.map(r => r.dataset.case)"
        )
        return found

    def shot(self, name: str) -> None:
        """Keep a picture: what CI shows of a view."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(SCREENSHOTS / f"{name}.png"), full_page=True)


def chromium() -> str:
    """The browser; skips where there is none, fails where NFP_REQUIRE_BROWSER asks for one."""
    found = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
    if found is None:
        message = "no chromium: apt-get install chromium"
        if os.environ.get("NFP_REQUIRE_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    return found


@contextmanager
def opened(
    path: Path, script: bool = True, ready: bool = True, scheme: Literal["light", "dark"] = "light", wide: int = 1300
) -> Iterator[Opened]:
    """The page of a file. script: whether the browser runs any; ready: wait for the table."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(ARGUMENTS))
        try:
            context = browser.new_context(
                java_script_enabled=script, color_scheme=scheme, viewport={"width": wide, "height": 900}, offline=True
            )
            page = context.new_page()
            found = Opened(page)
            page.on("request", lambda r: found.requests.append(r.url))
            page.on("console", lambda m: found.complaints.append(m.text))
            page.on("pageerror", lambda e: found.complaints.append(str(e)))
            page.goto(path.as_uri())
            if script and ready:
                page.wait_for_selector("html[data-ready=true]", state="attached")
            yield found
        finally:
            browser.close()
