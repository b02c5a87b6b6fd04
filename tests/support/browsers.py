"""A real Chromium for the console's tests, with axe-core for accessibility.

Tests are skipped, with the command that installs the missing part, where Chromium or axe-core is absent.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install 'openworld[dev]'")

TIMEOUT = 60_000  # milliseconds, for a busy machine
playwright.expect.set_options(timeout=TIMEOUT)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "openworld-tests"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser; skip the test where none is installed."""
    with playwright.sync_playwright() as player:
        own = Path(player.chromium.executable_path)
        found = next(filter(None, map(shutil.which, NAMES)), str(own) if own.exists() else None)
        if found is None:
            pytest.skip("Chromium is not installed: apt-get install chromium, or playwright install chromium")
        browser = player.chromium.launch(executable_path=found, args=ARGUMENTS, timeout=TIMEOUT)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """A browser tab on the console that records errors and requests to other hosts."""

    page: Any
    url: str
    errors: list[str] = field(default_factory=list)
    foreign_requests: list[str] = field(default_factory=list)  # URLs of other hosts

    def __post_init__(self) -> None:
        self.page.on("console", self._on_console_message)
        self.page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error}"))
        self.page.on("request", self._on_request)

    def _on_console_message(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} ({message.location.get('url')})")

    def _on_request(self, request: Any) -> None:
        address = urlsplit(request.url)
        if address.scheme not in ("blob", "data") and address.netloc != urlsplit(self.url).netloc:
            self.foreign_requests.append(request.url)

    def open(self, page: str) -> Any:
        """Open a page of the console and wait until it is drawn."""
        self.page.goto(f"{self.url}/#/{page}")
        self.page.wait_for_selector("main h1")
        return self.page

    def expect_error(self, part: str) -> None:
        """Drop a recorded error that the test provoked; browsers log every response with a status from 400."""
        assert [error for error in self.errors if part in error], self.errors
        self.errors = [error for error in self.errors if part not in error]


@contextmanager
def visit(browser: Any, url: str, viewport: dict[str, int] | None = None, **options: Any) -> Iterator[Visit]:
    """A new tab. Fails at the end if the page logged an error or contacted another host."""
    context = browser.new_context(viewport=viewport or DESK, **options)
    context.set_default_timeout(TIMEOUT)
    try:
        visiting = Visit(context.new_page(), url)
        yield visiting
        assert not visiting.errors, visiting.errors
        assert not visiting.foreign_requests, visiting.foreign_requests
    finally:
        context.close()


@cache
def axe() -> str:
    """The source of axe-core, fetched once with npm; skip the test where that fails."""
    script = CACHE / "axe.min.js"
    if not script.exists():
        if shutil.which("npm") is None:
            pytest.skip("no npm to fetch axe-core with: apt-get install npm")
        CACHE.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["npm", "pack", "axe-core@4", "--silent"],
            cwd=CACHE,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"axe-core cannot be fetched: npm pack axe-core@4 in {CACHE}\n{done.stderr[-300:]}")
        archive = CACHE / done.stdout.split()[-1]
        with tarfile.open(archive) as files:
            member = files.extractfile("package/axe.min.js")
            assert member is not None
            script.write_bytes(member.read())
        archive.unlink()
    return script.read_text()


def axe_problems(page: Any) -> list[str]:
    """Serious axe-core findings, one line each. Evaluated through the driver, so the page's CSP stays in force."""
    page.evaluate(axe())
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{rule['id']} ({rule['impact']}): {node['html'][:160]} {node.get('failureSummary', '')[:200]}"
        for rule in found["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]
