"""A real Chromium for the console's tests, an eye on what it does, and axe-core for what it shows.

Where something is missing, the tests are skipped with the command that would help.
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

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "openworld-tests"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; skips where there is none."""
    with playwright.sync_playwright() as player:
        own = Path(player.chromium.executable_path)
        found = next(filter(None, map(shutil.which, NAMES)), str(own) if own.exists() else None)
        if found is None:
            pytest.skip("no Chromium: apt-get install chromium, or playwright install chromium")
        browser = player.chromium.launch(executable_path=found, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """A tab on the console, and everything that went wrong in it."""

    page: Any
    url: str
    errors: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)  # addresses of other hosts that it asked

    def __post_init__(self) -> None:
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error}"))
        self.page.on("request", self._asked)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} ({message.location.get('url')})")

    def _asked(self, request: Any) -> None:
        address = urlsplit(request.url)
        if address.scheme not in ("blob", "data") and address.netloc != urlsplit(self.url).netloc:
            self.strangers.append(request.url)

    def open(self, page: str) -> Any:
        """A page of the console, drawn."""
        self.page.goto(f"{self.url}/#/{page}")
        self.page.wait_for_selector("main h1")
        return self.page

    def forgive(self, part: str) -> None:
        """An error that the test provoked: a browser notes every answer from 400 on."""
        assert [error for error in self.errors if part in error], self.errors
        self.errors = [error for error in self.errors if part not in error]


@contextmanager
def visit(browser: Any, url: str, viewport: dict[str, int] | None = None, **options: Any) -> Iterator[Visit]:
    """A tab of its own; at its end, nothing may have gone wrong and nobody else been asked."""
    context = browser.new_context(viewport=viewport or DESK, **options)
    context.set_default_timeout(20_000)
    try:
        visiting = Visit(context.new_page(), url)
        yield visiting
        assert not visiting.errors, visiting.errors
        assert not visiting.strangers, visiting.strangers
    finally:
        context.close()


@cache
def axe() -> str:
    """The source of axe-core, fetched once from npm's registry; skips where that cannot be."""
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
    """What axe-core finds serious, a line each. Evaluated from outside: the page's own policy stays in force."""
    page.evaluate(axe())
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{rule['id']} ({rule['impact']}): {node['html'][:160]} {node.get('failureSummary', '')[:200]}"
        for rule in found["violations"]
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]
