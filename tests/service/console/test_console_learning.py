"""Teaching and version management on the console, in a browser on the real service."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median_low
from typing import Any

import httpx2 as httpx

from tests.support.browsers import Visit, playwright, visit
from tests.support.console import (
    dismiss_all,
    image,
    image_buttons,
    label_first_group,
    new_novelties,
    send_novel_images,
    try_image,
    words_about,
)
from tests.support.learning_loop import Loop, batch
from tests.support.servers import learned_folder, running_server, wait_until

expect = playwright.expect


def test_labelled_novelties_are_learned_and_can_be_rolled_back(browser: Any, service: Loop) -> None:
    dismiss_all(service.url)
    send_novel_images(service.url, "kiwi", 12)
    wait_until(lambda: len(new_novelties(service.url)) == 12)
    with visit(browser, service.url) as visiting:
        page = visiting.open("try")
        try_image(page, image("kiwi", 0))
        expect(page.locator(".answer")).to_have_text(words_about(service.url, image("kiwi", 0), None))

        page = visiting.open("inbox")
        expect(image_buttons(page)).to_have_count(8)
        expect(page.get_by_text("12 similar images")).to_be_visible()
        expect(image_buttons(page).first).to_have_attribute(
            "aria-label", re.compile(r"^Image, never seen; nearest: class \d \((<\s1|\d+)\s%\)")
        )
        label_first_group(page, "kiwi")
        expect(page.get_by_text("No novel images")).to_be_visible()

        # The batch survives a reload, and new images appear.
        send_novel_images(service.url, "fig", 6)
        wait_until(lambda: len(new_novelties(service.url)) == 18)
        page.reload()
        expect(page.get_by_text("1 class, 12 images")).to_be_visible()
        expect(page.get_by_text("6 similar images")).to_be_visible()
        label_first_group(page, "fig")
        expect(page.get_by_text("10 or more images are recommended")).to_be_visible()
        page.get_by_role("button", name="Teach 2 classes").click()
        page.get_by_role("link", name="Show task").click()

        wait_for_publication(page)
        assert new_novelties(service.url) == []
        expect(page.get_by_role("region", name="Messages")).to_contain_text("Version 4 has learned fig and kiwi")
        expect(page.locator(".task").first.get_by_role("table")).to_contain_text("4: fig, kiwi")

        page = visiting.open("try")
        try_image(page, image("kiwi", 0))
        expect(page.locator(".answer")).to_have_text(words_about(service.url, image("kiwi", 0), "kiwi"))
        expect(page.locator(".evidence")).to_contain_text("4: fig, kiwi")

        accept = httpx.get(f"{service.url}/versions/4", timeout=30).json()["accept"]
        page = visiting.open("versions/4")
        expect(page.get_by_text(f"The trainer was set to accept {100 * accept:.0f} % of known images")).to_be_visible()

        roll_back(visiting)
        try_image(visiting.open("try"), image("kiwi", 0))
        expect(page.locator(".answer")).to_have_text(words_about(service.url, image("kiwi", 0), None))


def wait_for_publication(page: Any) -> None:
    """Assert that the progress bar moves until the task is published."""
    page.wait_for_selector(".task progress")
    shares = set[float]()
    card = page.locator(".task").first
    while not card.get_by_text("published").count():
        for bar in page.query_selector_all(".task progress"):
            shares.add(float(bar.evaluate("bar => bar.value")))
        page.wait_for_timeout(50)
    assert len(shares) >= 3, shares
    assert max(shares) > min(shares)


def roll_back(visiting: Visit) -> None:
    page = visiting.open("versions/3")
    expect(page.locator(".lineage [aria-current]")).to_contain_text("Version 3")
    page.get_by_role("button", name="Roll back to this version").click()
    page.get_by_label("Reason, for the history").fill("a test")
    page.get_by_role("button", name="Activate version 3").click()
    expect(page.locator(".detail .badge")).to_contain_text("active since")
    history = httpx.get(f"{visiting.url}/versions", timeout=30).json()["history"]
    assert history[-1]["reason"] == "anonymous: a test"


def test_a_task_can_be_cancelled_and_tried_again(browser: Any, service: Loop) -> None:
    id = service.submit(batch("pear", images=80)).json()["id"]  # long enough to be cancelled in the middle
    with visit(browser, service.url) as visiting:
        page = visiting.open("tasks")
        card = page.locator(".task", has_text="pear")
        card.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Cancel task").click()
        expect(card.locator(".badge")).to_have_text("cancelled")
        card.get_by_role("button", name="Try again").click()
        expect(page.locator("#current-task")).to_contain_text("pear")
        expect(card.locator(".badge")).to_have_text("published", timeout=30_000)
        expect(card.get_by_role("button", name="Cancel")).to_have_count(0)
    assert service.task(id)["state"] == "published"


def test_a_class_is_renamed_merged_retired_and_restored(browser: Any, tmp_path: Path) -> None:
    with (
        running_server(learned_folder(tmp_path / "robot"), threads=1) as server,
        visit(browser, server.url) as visiting,
    ):
        page = visiting.open("versions")
        page.get_by_role("button", name="Rename class 0").click()
        page.get_by_label("New name").fill("apple")
        page.get_by_role("dialog").get_by_role("button", name="Rename").click()
        expect(page.get_by_role("button", name="Rename apple")).to_be_visible()
        page.get_by_role("button", name="Merge class 1 into another class").click()
        page.get_by_label("Into", exact=True).select_option("apple")
        page.get_by_role("dialog").get_by_role("button", name="Merge").click()
        expect(page.get_by_text("merged into apple")).to_be_visible()
        page.get_by_role("button", name="Retire class 2").click()
        page.get_by_role("dialog").get_by_role("button", name="Retire").click()
        expect(page.get_by_role("button", name="Restore class 2")).to_be_visible()
        page.get_by_role("button", name="Restore class 1").click()
        expect(page.get_by_role("button", name="Restore class 1")).to_have_count(0)
        expect(page.locator(".lineage li")).to_have_count(7)
        states = {one["name"]: one["state"] for one in server.get("/classes").json()["classes"]}
        assert states == {**dict.fromkeys(["apple", "class 1", "class 3", "class 4"], "active"), "class 2": "retired"}
        visiting.expect_error("/tasks")  # this server has no queue


def share_accepted(scores: list[float], threshold: float) -> float:
    return sum(score >= threshold for score in scores) / len(scores)


def test_the_threshold_slider_shows_what_is_accepted_and_what_is_flagged(browser: Any, service: Loop) -> None:
    with visit(browser, service.url) as visiting:
        page = visiting.open("versions/3")
        detail = httpx.get(f"{service.url}/versions/3", timeout=30).json()
        reference, simulated, own = detail["reference"], detail["simulated"], detail["threshold"]
        accepted, flagged = share_accepted(reference, own), 1 - share_accepted(simulated, own)
        words = f"accepts {100 * accepted:.0f} % of known images, flags {100 * flagged:.0f} % of simulated novel ones"
        expect(page.locator(".threshold strong")).to_have_text(f"At this setting: {words}.")
        # A point that both settings can ask for: it accepts and flags some images, not all.
        both = [at for at in [*reference, *simulated] if 0.5 < share_accepted(reference, at) < 1]
        middle = median_low([at for at in both if 0 < share_accepted(simulated, at) < 1])
        slider = page.get_by_role("slider", name="Threshold")
        slider.evaluate("(input, at) => { input.value = at; input.dispatchEvent(new Event('input')) }", middle)
        expect(page.get_by_text("OPENWORLD_TRAIN_ACCEPT=")).to_be_visible()
        expect(page.get_by_text("OPENWORLD_TRAIN_FLAG=")).to_be_visible()
        expect(page.locator(".threshold .line")).to_have_count(2)
        slider.press("End")
        expect(page.locator(".threshold strong")).to_contain_text("accepts 0 % of known images")
        slider.press("Home")
        expect(page.locator(".threshold strong")).to_contain_text("accepts 100 % of known images")
        expect(
            page.get_by_text(f"Measured on {len(reference)} left-out known images and {len(simulated)} simulated")
        ).to_be_visible()
        log_scores = page.get_by_text("As novelty scores: chosen")
        expect(log_scores).to_be_hidden()
        page.locator(".threshold summary").click()
        expect(log_scores).to_be_visible()
