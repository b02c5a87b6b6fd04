"""Provisional versions on the console: both moments of a task are shown, and operators pause learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2 as httpx

from tests.support.browsers import playwright, visit
from tests.support.learning_loop import batch, loop

expect = playwright.expect


def test_a_task_answers_while_learning_is_paused_and_is_learned_after_it(browser: Any, tmp_path: Path) -> None:
    with loop(tmp_path, provisional="on") as running:
        running.start("serve")
        with visit(browser, running.url) as visiting:
            page = visiting.open("tasks")
            page.get_by_role("button", name="Pause learning").click()
            expect(page.get_by_text("Learning is paused")).to_be_visible()
            running.start("train")
            id = running.submit(batch("kiwi", "fig", images=8)).json()["id"]
            card = page.locator(".task", has_text="kiwi")
            expect(card).to_contain_text("Version 4 answers with these classes already", timeout=30_000)
            expect(card.locator(".badge")).to_have_text("queued")

            page = visiting.open("versions/4")
            expect(page.locator(".lineage [aria-current]")).to_contain_text("provisional")
            expect(page.locator(".lineage [aria-current]")).to_contain_text("answers with fig and kiwi")
            expect(page.get_by_text("some classes answer before they are learned")).to_be_visible()

            page = visiting.open("tasks")
            page.get_by_role("button", name="Resume learning").click()
            expect(page.get_by_role("button", name="Pause learning")).to_be_visible()
            expect(page.locator(".task", has_text="kiwi").locator(".badge")).to_have_text("published", timeout=60_000)
            page = visiting.open("versions/5")
            expect(page.locator(".lineage [aria-current]")).not_to_contain_text("provisional")
            expect(page.locator(".lineage [aria-current]")).to_contain_text("learned fig and kiwi")

            httpx.patch(f"{running.url}/classes/kiwi", json={"rename": "kiwifruit"}, timeout=30).raise_for_status()
            page = visiting.open("versions/6")
            page.reload()
            expect(page.locator(".lineage [aria-current]")).to_contain_text("renamed kiwi to kiwifruit")
            expect(page.locator(".detail")).to_contain_text("4: fig, kiwifruit")
            expect(page.locator(".detail")).not_to_contain_text("trained in")
        running.check_learned_once(id)


def test_only_operators_pause_learning(browser: Any, tmp_path: Path) -> None:
    keys = "anna:label:secret-of-anna-0123456789"
    with loop(tmp_path, keys=keys) as running:
        running.start("serve")
        with visit(browser, running.url) as visiting:
            page = visiting.open("tasks")
            page.get_by_label("Key").fill("secret-of-anna-0123456789")
            page.get_by_role("button", name="Sign in").click()
            expect(page.get_by_text("No tasks yet")).to_be_visible()
            expect(page.get_by_role("button", name="Pause learning")).to_have_count(0)
            visiting.expect_error("/me")
