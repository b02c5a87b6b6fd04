"""The inbox page in a browser: labelling, keyboard use, and hundreds of images."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from service.inbox import Inbox, InboxLimits
from tests.support.browsers import playwright, visit
from tests.support.console import dismiss_all, image_buttons, new_novelties, send_novel_images, try_image, words_about
from tests.support.images import make_image
from tests.support.inbox import random_direction, sighting
from tests.support.learning_loop import Loop
from tests.support.servers import known_image, running_server, wait_until

expect = playwright.expect


def test_an_image_reported_as_wrong_goes_into_the_inbox(browser: Any, service: Loop) -> None:
    dismiss_all(service.url)
    with visit(browser, service.url) as visiting:
        page = visiting.open("try")
        try_image(page, known_image("class 1", 300))
        words = words_about(service.url, known_image("class 1", 300), "class 1")
        expect(page.locator(".answer")).to_have_text(words)
        page.get_by_role("button", name="Report as wrong").click()
        page.get_by_role("link", name="Open the inbox").click()
        expect(image_buttons(page)).to_have_count(1)
        expect(page.get_by_text("answered as class 1")).to_be_visible()
        image_buttons(page).first.press("i")
        expect(page.get_by_role("dialog")).to_contain_text("reported as not class 1")
        page.keyboard.press("Escape")
        image_buttons(page).first.press("d")
        expect(page.get_by_text("No novel images")).to_be_visible()
    assert new_novelties(service.url) == []


def test_the_inbox_can_be_used_by_keyboard_alone(browser: Any, service: Loop) -> None:
    dismiss_all(service.url)
    send_novel_images(service.url, "plum", 6)
    wait_until(lambda: len(new_novelties(service.url)) == 6)
    with visit(browser, service.url) as visiting:
        page = visiting.open("inbox")
        expect(image_buttons(page)).to_have_count(6)
        pressed = page.locator("button.image-button[aria-pressed=true]")
        image_buttons(page).first.focus()
        page.keyboard.press("Space")
        page.keyboard.press("Shift+ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(pressed).to_have_count(2)
        image_buttons(page).nth(4).click(modifiers=["Shift"])
        expect(pressed).to_have_count(5)
        page.keyboard.press("Escape")
        expect(pressed).to_have_count(0)

        page.keyboard.press("d")  # the image that has the focus
        expect(image_buttons(page)).to_have_count(5)
        page.get_by_role("button", name="Undo").click()
        expect(image_buttons(page)).to_have_count(6)

        image_buttons(page).first.focus()
        page.keyboard.press("a")
        expect(pressed).to_have_count(6)
        page.keyboard.press("Enter")
        page.keyboard.type("class 1")
        expect(page.get_by_text("is learned already: the images will extend it")).to_be_visible()
        page.get_by_label("Class name").fill("Class 1")
        expect(page.get_by_role("button", name="Add to batch")).to_be_disabled()
        page.get_by_label("Class name").fill("prune")
        page.keyboard.press("Enter")
        expect(page.get_by_text("1 class, 6 images")).to_be_visible()
        page.get_by_role("button", name="Remove prune from the batch").click()
        expect(image_buttons(page)).to_have_count(6)

        # A class of one image can be taught, with a remark.
        page.keyboard.press("Escape")
        image_buttons(page).first.click()
        page.get_by_label("Class name").fill("prune")
        page.keyboard.press("Enter")
        expect(page.get_by_text("One image makes a weak class")).to_be_visible()
        expect(page.get_by_role("button", name="Teach 1 class")).to_be_enabled()
        page.get_by_role("button", name="Remove prune from the batch").click()
        expect(image_buttons(page)).to_have_count(6)

        # Dismissed images can be restored.
        page.get_by_role("button", name="Select all").click()
        page.get_by_role("button", name="Dismiss").click()
        expect(page.get_by_text("No novel images")).to_be_visible()
        page.get_by_label("Show", exact=True).select_option("Dismissed")
        expect(page.get_by_role("button", name="Restore")).to_be_disabled()
        page.get_by_role("button", name="Select all").first.click()
        page.get_by_role("button", name="Restore").click()
        expect(page.get_by_text("No dismissed images")).to_be_visible()
        page.get_by_label("Show", exact=True).select_option("New")
        expect(image_buttons(page).nth(5)).to_be_visible()
    assert len(new_novelties(service.url)) >= 6


def test_only_images_near_the_viewport_are_in_the_page(browser: Any, tmp_path: Path) -> None:
    count = 300
    limits = InboxLimits(rate=1e6, burst=10**6)
    with contextlib.closing(Inbox(tmp_path / "robot", limits)) as filled:
        for number in range(count):
            filled.add(sighting(make_image(number), number, random_direction(number, 64)))
        groups = len(filled.groups("new", count, None, "largest").items)
    with running_server(tmp_path / "robot", threads=1) as server, visit(browser, server.url) as visiting:
        page = visiting.open("inbox")
        expect(image_buttons(page).first).to_be_visible()
        sections, most = page.locator(".group"), 0
        while sections.count() < groups:
            page.mouse.wheel(0, 1500)
            page.wait_for_timeout(30)
            most = max(most, image_buttons(page).count())
        assert most < count / 2
        page.evaluate("scrollTo(0, 0)")
        expect(image_buttons(page).first).to_be_in_viewport()
        visiting.expect_error("/tasks")
