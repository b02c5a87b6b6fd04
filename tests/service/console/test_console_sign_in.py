"""Signing in to the console with a key, and the pages that each role sees."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browsers import Visit, playwright, visit
from tests.support.console import image_buttons, send_novel_images, try_image, words_about
from tests.support.servers import RunningServer, known_image, learned_folder, running_server, wait_until

expect = playwright.expect
SECRETS = {role: f"{role}-secret-of-the-console" for role in ("predict", "label", "operate")}
KEYS = ",".join(f"{role}-key:{role}:{secret}" for role, secret in SECRETS.items())


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[RunningServer]:
    """A server with keys and four novelties."""
    data = learned_folder(tmp_path_factory.mktemp("locked") / "robot")
    with running_server(data, threads=1, keys=KEYS) as running:
        send_novel_images(running.url, "kiwi", 4, {"X-API-Key": SECRETS["predict"]})
        yield running


def sign_in(visiting: Visit, role: str) -> Any:
    page = visiting.page
    page.goto(visiting.url)
    page.get_by_label("Key").fill(SECRETS[role])
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_selector("nav a")
    visiting.expect_error("/me")  # the first request has no key: 401
    return page


def page_titles(page: Any) -> list[str]:
    found: list[str] = page.locator("nav a").all_inner_texts()
    return found


def test_a_key_with_only_the_predict_role_sees_no_inbox(browser: Any, locked: RunningServer) -> None:
    with visit(browser, locked.url) as visiting:
        page = sign_in(visiting, "predict")
        assert page_titles(page) == ["Tasks", "Try it", "Versions", "Live"]
        page.goto(f"{locked.url}/#/inbox")
        expect(page.locator("h1")).to_have_text("Tasks")
        page = visiting.open("try")
        try_image(page, known_image("class 0"))
        words = words_about(locked.url, known_image("class 0"), "class 0", {"X-API-Key": SECRETS["predict"]})
        expect(page.locator(".answer")).to_have_text(words)
        expect(page.get_by_role("button", name="Report as wrong")).to_have_count(0)
        page = visiting.open("versions/1")
        expect(page.locator(".detail h2")).to_have_text("Version 1")
        assert page.get_by_role("button", name=re.compile("Roll back|Rename|Retire")).count() == 0
        visiting.expect_error("/tasks")


def test_an_operator_sees_who_changed_what(browser: Any, locked: RunningServer) -> None:
    for number, reason in ((2, "for the test"), (3, "back again")):
        path = f"/versions/{number}/activate?reason={reason}"
        assert locked.post(path, headers={"X-API-Key": SECRETS["operate"]}).status_code == 200
    with visit(browser, locked.url) as visiting:
        page = sign_in(visiting, "operate")
        assert page_titles(page) == ["Tasks", "Versions", "Live", "Audit"]
        page = visiting.open("audit")
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text("operate-key")
        expect(rows.first).to_contain_text("activated version")
        expect(rows.nth(1)).to_contain_text("reason: for the test")
        visiting.expect_error("/tasks")


def test_a_labeller_sees_images_that_need_a_key_and_signs_out(browser: Any, locked: RunningServer) -> None:
    with visit(browser, locked.url) as visiting:
        page = sign_in(visiting, "label")
        assert page_titles(page) == ["Inbox", "Tasks", "Versions", "Live"]
        expect(image_buttons(page)).to_have_count(4)
        drawn = "[...document.querySelectorAll('.thumbnail')].every(image => image.naturalWidth > 0)"
        wait_until(lambda: page.evaluate(drawn))
        assert page.locator(".thumbnail").first.get_attribute("src").startswith("blob:")
        expect(page.locator("#user")).to_contain_text("label-key")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Key")).to_be_visible()
        page.get_by_label("Key").fill("an-unknown-key-of-the-console")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_text("The server does not accept this key")).to_be_visible()
        visiting.expect_error("/me")
        visiting.expect_error("/tasks")
