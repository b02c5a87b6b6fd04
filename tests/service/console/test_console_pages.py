"""All pages of the console: live figures, problems, empty states, accessibility, phones and themes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from service.wire.predictions import in_words
from tests.support.browsers import PHONE, axe_problems, playwright, visit
from tests.support.console import PAGES, image_buttons, send_novel_images, try_image, words_about
from tests.support.learning_loop import Loop, batch
from tests.support.servers import known_image, running_server

expect = playwright.expect


@pytest.fixture(scope="module")
def taught(service: Loop) -> Loop:
    """The service after one published task, so that no page is empty."""
    send_novel_images(service.url, "grape", 3)
    task = service.wait_until_ended(service.submit(batch("pear", images=8)).json()["id"])
    assert task["state"] == "published", task
    return service


def test_live_shows_the_traffic_and_the_version_changes(browser: Any, taught: Loop) -> None:
    httpx.post(f"{taught.url}/predict", content=known_image("class 0"), timeout=30)
    with visit(browser, taught.url) as visiting:
        page = visiting.open("live")
        pulse = httpx.get(f"{taught.url}/pulse", timeout=30).json()
        expect(page.locator(".stats")).to_contain_text(f"{pulse['known'] + pulse['novel']}")
        expect(page.locator(".stats")).to_contain_text(f"version {pulse['version']}")
        expect(page.locator(".stats dt").first).to_have_text("Never seen")
        expect(page.locator("svg .mark-text").first).to_contain_text("version")
        expect(page.get_by_role("img", name=re.compile("Fit of [0-9]+ images?: "))).to_be_visible()


def test_a_problem_shows_its_detail_and_request_id(browser: Any, taught: Loop) -> None:
    with visit(browser, taught.url) as visiting:
        page = visiting.open("try")
        try_image(page, b"not an image", "broken.png")
        problem = page.get_by_role("alert")
        expect(problem).to_contain_text("send JPEG, PNG or WebP")
        expect(problem.locator("code")).to_have_text(re.compile(r"[0-9a-f]{24}"))
        visiting.expect_error("415")
        try_image(page, known_image("class 0"))  # the page still works
        expect(page.locator(".answer")).to_have_text(words_about(taught.url, known_image("class 0"), "class 0"))


def test_scores_are_shown_as_details_for_experts_only(browser: Any, taught: Loop) -> None:
    explained = httpx.post(f"{taught.url}/explain", content=known_image("class 0"), timeout=30).json()
    score = f"{explained['score']:.2f}".replace("-", "−")
    with visit(browser, taught.url) as visiting:
        page = visiting.open("try")
        try_image(page, known_image("class 0"))
        expect(page.get_by_text(re.compile(r"Fits better than \d+\s% of known images"))).to_be_visible()
        evidence = page.locator(".evidence")
        expect(evidence.get_by_text("A log-score says how well a class fits")).to_be_hidden()
        expect(page.locator("main")).not_to_contain_text(score, use_inner_text=True)
        evidence.locator("summary").click()
        expect(evidence.get_by_text("A log-score says how well a class fits")).to_be_visible()
        expect(evidence.locator("dd").first).to_have_text(f"{score}, higher for known images")


def test_the_console_uses_the_words_of_the_python_client(browser: Any, taught: Loop) -> None:
    answers: list[tuple[str, str | None, list[tuple[str, float]], float]] = [
        ("sure", "apple", [("apple", 0.93), ("pear", 0.04)], 0.03),
        ("unsure", "pear", [("pear", 0.54), ("apple", 0.31), ("fig", 0.1)], 0.05),
        ("unsure", "pear", [("pear", 0.6), ("apple", 0.049)], 0.3),
        ("unsure", "pear", [("apple", 0.4), ("pear", 0.3)], 0.3),
        ("unsure", "pear", [("pear", 0.14), ("apple", 0.11)], 0.6),
        ("novel", None, [("pear", 0.12), ("apple", 0.04)], 0.9),
        ("novel", None, [("pear", 1e-9)], 1.0),
        ("novel", None, [], 1.0),
    ]
    with visit(browser, taught.url) as visiting:
        page = visiting.open("try")
        for certainty, label, nearest, p_novel in answers:
            entries = [{"label": name, "share": share} for name, share in nearest]
            words = page.evaluate(
                "async (answer) => (await import(new URL('console/js/format.mjs', location.href))).inWords(answer)",
                {"certainty": certainty, "label": label, "nearest": entries, "p_novel": p_novel},
            )
            assert words.replace("\u00a0", " ") == in_words(certainty, label, nearest, p_novel)


def test_every_page_says_what_to_do_while_nothing_is_learned(browser: Any, tmp_path: Path) -> None:
    with running_server(tmp_path / "robot", threads=1) as server, visit(browser, server.url) as visiting:
        for name, text in {
            "inbox": "every image is novel",
            "versions": "openworld teach",
            "live": "No images in the last",
            "tasks": "this server only predicts",
        }.items():
            expect(visiting.open(name).locator("main")).to_contain_text(text)
        page = visiting.open("try")
        try_image(page, known_image("class 0"))
        expect(page.locator(".answer")).to_have_text("never seen")
        visiting.expect_error("/tasks")


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_serious_problem(browser: Any, taught: Loop, name: str) -> None:
    for scheme in ("light", "dark"):
        with visit(browser, taught.url, color_scheme=scheme) as visiting:
            page = visiting.open(name)
            if name == "try":
                try_image(page, known_image("class 0"))
                page.locator(".evidence summary").click()
            if name == "inbox":
                image_buttons(page).first.click()
            page.wait_for_load_state("networkidle" if name != "tasks" else "load")
            problems = axe_problems(page)
            assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", PAGES)
def test_every_page_fits_the_width_of_a_phone(browser: Any, taught: Loop, name: str) -> None:
    with visit(browser, taught.url, PHONE, is_mobile=True, has_touch=True) as visiting:
        page = visiting.open(name)
        if name == "try":
            try_image(page, known_image("class 0"))
            page.locator(".evidence summary").click()
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_the_theme_follows_the_system_until_the_user_chooses(browser: Any, taught: Loop) -> None:
    with visit(browser, taught.url, color_scheme="dark") as visiting:
        page = visiting.open("live")
        root = page.locator("html")
        expect(root).to_have_attribute("data-theme", "dark")
        page.get_by_role("button", name="Use light colours").click()
        expect(root).to_have_attribute("data-theme", "light")
        page.reload()
        expect(root).to_have_attribute("data-theme", "light")
