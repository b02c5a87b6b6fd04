"""The console in a real browser on the real service: a labeller's day, from the first novel image to a roll-back."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from service.inbox import Inbox, InboxLimits
from tests.service.inbox.test_groups import direction
from tests.service.inbox.test_inbox import sighting
from tests.support.browsers import PHONE, Visit, axe_problems, chromium, playwright, visit
from tests.support.images import make_image
from tests.support.learning_loop import Loop, loop
from tests.support.servers import IMAGES, RunningServer, known_image, learned_folder, running_server, wait_until

expect = playwright.expect
PAGES = ("inbox", "teaching", "try", "versions", "live")
SECRETS = {role: f"{role}-secret-of-the-console" for role in ("predict", "label", "operate")}
KEYS = ",".join(f"{role}-key:{role}:{secret}" for role, secret in SECRETS.items())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[Loop]:
    """Server, queue and a trainer that takes its time, so that there is something to follow."""
    with pytest.MonkeyPatch.context() as patch, loop(tmp_path_factory.mktemp("console"), inbox_rate="1000") as running:
        running.start("serve")
        patch.setenv("SLOW", "0.3")
        running.start("train")
        yield running


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[RunningServer]:
    """A server with keys, and some novelties."""
    data = learned_folder(tmp_path_factory.mktemp("locked") / "robot")
    with running_server(data, threads=1, keys=KEYS) as running:
        arrive(running.url, "kiwi", 4, {"X-API-Key": SECRETS["predict"]})
        yield running


def image(name: str, number: int) -> bytes:
    return IMAGES.read(f"{name}/{number}")


def arrive(url: str, name: str, count: int, headers: dict[str, str] | None = None) -> None:
    """A robot sees something; all of it is novel."""
    for number in range(count):
        answer = httpx.post(f"{url}/predict", content=image(name, number), headers=headers or {}, timeout=30).json()
        assert answer["predictions"][0]["novel"], (name, number)


def inbox(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/novelties?limit=200", timeout=30).json()["items"]
    return found


def clear(url: str) -> None:
    """Nothing is new in the inbox, whatever the tests before have left."""
    if ids := [one["id"] for one in inbox(url)]:
        httpx.post(f"{url}/novelties/dismiss", json={"ids": ids}, timeout=30)


def picks(page: Any) -> Any:
    return page.locator("button.pick")


def name_all(page: Any, name: str) -> None:
    """The whole first group under one name."""
    page.get_by_role("button", name="Select all").first.click()
    page.get_by_label("Name of the class").fill(name)
    page.get_by_role("button", name="Put into the basket").click()


def try_picture(page: Any, data: bytes, name: str = "photo.png") -> None:
    page.locator("input[multiple]").set_input_files({"name": name, "mimeType": "image/png", "buffer": data})


# The story


def test_a_labeller_names_what_is_novel_and_the_service_learns_it(browser: Any, service: Loop) -> None:
    clear(service.url)
    arrive(service.url, "kiwi", 12)
    wait_until(lambda: len(inbox(service.url)) == 12)
    with visit(browser, service.url) as visiting:
        page = visiting.open("try")
        try_picture(page, image("kiwi", 0))
        expect(page.locator(".verdict")).to_have_text("novel")

        page = visiting.open("inbox")
        expect(picks(page)).to_have_count(8)
        expect(page.get_by_text("12 images alike")).to_be_visible()
        expect(picks(page).first).to_have_attribute(
            "aria-label", re.compile(r"looks like class \d, \d\.\d\d, score 0\.")
        )
        name_all(page, "kiwi")
        expect(page.get_by_text("Nothing novel here")).to_be_visible()

        # Going elsewhere loses nothing, and others of the robot's finds join.
        arrive(service.url, "fig", 6)
        wait_until(lambda: len(inbox(service.url)) == 18)
        page.reload()
        expect(page.get_by_text("1 class, 12 images")).to_be_visible()
        expect(page.get_by_text("6 images alike")).to_be_visible()
        name_all(page, "fig")
        expect(page.get_by_text("few: 10 or more are better")).to_be_visible()
        page.get_by_role("button", name="Teach 2 classes").click()
        page.get_by_role("link", name="Follow it").click()

        follow_to_the_end(page)
        assert inbox(service.url) == []
        expect(page.get_by_role("region", name="Notices")).to_contain_text("Version 4 has learned fig and kiwi")
        expect(page.locator(".task").first.get_by_role("table")).to_contain_text("4: fig, kiwi")

        page = visiting.open("try")
        try_picture(page, image("kiwi", 0))
        expect(page.locator(".verdict")).to_have_text("kiwi")
        expect(page.locator(".evidence")).to_contain_text("4: fig, kiwi")

        roll_back(visiting)
        try_picture(visiting.open("try"), image("kiwi", 0))
        expect(page.locator(".verdict")).to_have_text("novel")


def follow_to_the_end(page: Any) -> None:
    """The bar moves, elsewhere as well, and the task ends as a version."""
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
    page.get_by_role("button", name="Roll back to it").click()
    page.get_by_label("Why, for the history").fill("a test")
    page.get_by_role("button", name="Activate version 3").click()
    expect(page.locator(".detail .badge")).to_contain_text("answers since")
    history = httpx.get(f"{visiting.url}/versions").json()["history"]
    assert history[-1]["reason"] == "anonymous: a test"


def test_a_picture_that_was_answered_wrongly_goes_into_the_inbox(browser: Any, service: Loop) -> None:
    clear(service.url)
    with visit(browser, service.url) as visiting:
        page = visiting.open("try")
        try_picture(page, known_image("class 1", 300))
        expect(page.locator(".verdict")).to_have_text("class 1")
        page.get_by_role("button", name="That is wrong").click()
        page.get_by_role("link", name="Open it").click()
        expect(picks(page)).to_have_count(1)
        expect(page.get_by_text("called class 1")).to_be_visible()
        picks(page).first.press("i")
        expect(page.get_by_role("dialog")).to_contain_text("said not to be class 1")
        page.keyboard.press("Escape")
        picks(page).first.press("d")
        expect(page.get_by_text("Nothing novel here")).to_be_visible()
    assert inbox(service.url) == []


def test_everything_in_the_inbox_can_be_done_with_keys_alone(browser: Any, service: Loop) -> None:
    clear(service.url)
    arrive(service.url, "plum", 6)
    wait_until(lambda: len(inbox(service.url)) == 6)
    with visit(browser, service.url) as visiting:
        page = visiting.open("inbox")
        expect(picks(page)).to_have_count(6)
        pressed = page.locator("button.pick[aria-pressed=true]")
        picks(page).first.focus()
        page.keyboard.press("Space")
        page.keyboard.press("Shift+ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(pressed).to_have_count(2)
        picks(page).nth(4).click(modifiers=["Shift"])
        expect(pressed).to_have_count(5)
        page.keyboard.press("Escape")
        expect(pressed).to_have_count(0)

        page.keyboard.press("d")  # the one that has the focus
        expect(picks(page)).to_have_count(5)
        page.get_by_role("button", name="Undo").click()
        expect(picks(page)).to_have_count(6)

        picks(page).first.focus()
        page.keyboard.press("a")
        expect(pressed).to_have_count(6)
        page.keyboard.press("Enter")
        page.keyboard.type("class 1")
        expect(page.get_by_text("is known already: these images will extend it")).to_be_visible()
        page.get_by_label("Name of the class").fill("Class 1")
        expect(page.get_by_role("button", name="Put into the basket")).to_be_disabled()
        page.get_by_label("Name of the class").fill("prune")
        page.keyboard.press("Enter")
        expect(page.get_by_text("1 class, 6 images")).to_be_visible()
        page.get_by_role("button", name="Take prune out of the basket").click()
        expect(picks(page)).to_have_count(6)

        # One image is no class; and dismissing puts the rest aside, from where it can be brought back.
        page.keyboard.press("Escape")
        picks(page).first.click()
        page.get_by_label("Name of the class").fill("prune")
        page.keyboard.press("Enter")
        expect(page.get_by_text("needs at least 2 images")).to_be_visible()
        expect(page.get_by_role("button", name="Teach 1 class")).to_be_disabled()
        page.get_by_role("button", name="Take prune out of the basket").click()
        expect(picks(page)).to_have_count(6)
        page.get_by_role("button", name="Select all").click()
        page.get_by_role("button", name="Dismiss").click()
        expect(page.get_by_text("Nothing novel here")).to_be_visible()
        page.get_by_label("Show").select_option("Dismissed")
        expect(page.get_by_role("button", name="Bring back")).to_be_disabled()
        page.get_by_role("button", name="Select all").first.click()
        page.get_by_role("button", name="Bring back").click()
        expect(page.get_by_text("Nothing is dismissed")).to_be_visible()
        page.get_by_label("Show").select_option("New")
        expect(picks(page).nth(5)).to_be_visible()
    assert len(inbox(service.url)) >= 6


def test_a_task_can_be_cancelled_and_tried_again(browser: Any, service: Loop) -> None:
    files = [("pear", (f"{n}.png", image("pear", n))) for n in range(8)]
    id = service.submit(files).json()["id"]
    with visit(browser, service.url) as visiting:
        page = visiting.open("teaching")
        card = page.locator(".task", has_text="pear")
        card.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Stop it").click()
        expect(card.locator(".badge")).to_have_text("cancelled")
        card.get_by_role("button", name="Try again").click()
        expect(page.locator("#busy")).to_contain_text("pear")
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
        page.get_by_role("button", name="Rename it").click()
        expect(page.get_by_role("button", name="Rename apple")).to_be_visible()
        page.get_by_role("button", name="Merge class 1 into another class").click()
        page.get_by_label("Into", exact=True).select_option("apple")
        page.get_by_role("button", name="Merge it").click()
        expect(page.get_by_text("merged into apple")).to_be_visible()
        page.get_by_role("button", name="Retire class 2").click()
        page.get_by_role("button", name="Retire it").click()
        expect(page.get_by_role("button", name="Restore class 2")).to_be_visible()
        page.get_by_role("button", name="Restore class 1").click()
        expect(page.get_by_role("button", name="Restore class 1")).to_have_count(0)
        expect(page.locator(".lineage li")).to_have_count(7)
        states = {one["name"]: one["state"] for one in server.get("/classes").json()["classes"]}
        assert states == {**dict.fromkeys(["apple", "class 1", "class 3", "class 4"], "active"), "class 2": "retired"}
        visiting.expect_error("/tasks")  # this server has no queue


def test_the_threshold_slider_tells_what_it_would_flag(browser: Any, service: Loop) -> None:
    with visit(browser, service.url) as visiting:
        page = visiting.open("versions/3")
        reference = httpx.get(f"{service.url}/versions/3").json()["reference"]
        slider = page.get_by_label("Threshold")
        slider.press("End")
        expect(page.locator(".threshold strong")).to_have_text("100.0 % of known images would be flagged as novel")
        slider.press("Home")
        expect(page.locator(".threshold strong")).to_have_text("0.0 % of known images would be flagged as novel")
        expect(page.get_by_text(f"Measured on {len(reference)} scores")).to_be_visible()


def test_live_shows_what_was_asked_and_where_the_version_changed(browser: Any, service: Loop) -> None:
    httpx.post(f"{service.url}/predict", content=known_image("class 0"), timeout=30)
    with visit(browser, service.url) as visiting:
        page = visiting.open("live")
        pulse = httpx.get(f"{service.url}/pulse").json()
        expect(page.locator(".figures")).to_contain_text(f"{pulse['known'] + pulse['novel']}")
        expect(page.locator(".figures")).to_contain_text(f"version {pulse['version']}")
        expect(page.locator("svg .marked").first).to_contain_text("version")
        expect(page.get_by_role("img", name=re.compile("Calibrated scores of"))).to_be_visible()


def test_of_hundreds_of_images_only_those_near_the_screen_are_in_the_page(browser: Any, tmp_path: Path) -> None:
    count = 300
    limits = InboxLimits(rate=1e6, burst=10**6)
    with contextlib.closing(Inbox(tmp_path / "robot", limits)) as filled:
        for number in range(count):
            filled.add(sighting(make_image(number), number, direction(number, 64)))
        groups = len(filled.groups("new", count, None, "largest").items)
    with running_server(tmp_path / "robot", threads=1) as server, visit(browser, server.url) as visiting:
        page = visiting.open("inbox")
        expect(picks(page).first).to_be_visible()
        slots, most = page.locator(".group"), 0
        while slots.count() < groups:
            page.mouse.wheel(0, 1500)
            page.wait_for_timeout(30)
            most = max(most, picks(page).count())
        assert most < count / 2
        page.evaluate("scrollTo(0, 0)")
        expect(picks(page).first).to_be_in_viewport()
        visiting.expect_error("/tasks")


# Errors, and nothing there


def test_a_problem_is_told_with_its_detail_and_its_request_id(browser: Any, service: Loop) -> None:
    with visit(browser, service.url) as visiting:
        page = visiting.open("try")
        try_picture(page, b"no picture", "broken.png")
        problem = page.get_by_role("alert")
        expect(problem).to_contain_text("send JPEG, PNG or WebP")
        expect(problem.locator("code")).to_have_text(re.compile(r"[0-9a-f]{24}"))
        visiting.expect_error("415")
        try_picture(page, known_image("class 0"))  # and it goes on
        expect(page.locator(".verdict")).to_have_text("class 0")


def test_where_nothing_is_learned_every_page_says_what_to_do(browser: Any, tmp_path: Path) -> None:
    with running_server(tmp_path / "robot", threads=1) as server, visit(browser, server.url) as visiting:
        for name, text in {
            "inbox": "every image that is sent is novel",
            "versions": "openworld teach",
            "live": "Nothing was asked",
            "teaching": "this server only predicts",
        }.items():
            expect(visiting.open(name).locator("main")).to_contain_text(text)
        page = visiting.open("try")
        try_picture(page, known_image("class 0"))
        expect(page.locator(".verdict")).to_have_text("novel")
        visiting.expect_error("/tasks")


# Keys


def enter(visiting: Visit, role: str) -> Any:
    page = visiting.page
    page.goto(visiting.url)
    page.get_by_label("Key").fill(SECRETS[role])
    page.get_by_role("button", name="Come in").click()
    page.wait_for_selector("nav a")
    visiting.expect_error("/me")  # the question that was answered with 401
    return page


def pages(page: Any) -> list[str]:
    found: list[str] = page.locator("nav a").all_inner_texts()
    return found


def test_a_key_that_may_only_predict_sees_no_inbox(browser: Any, locked: RunningServer) -> None:
    with visit(browser, locked.url) as visiting:
        page = enter(visiting, "predict")
        assert pages(page) == ["Teaching", "Try it", "Versions", "Live"]
        page.goto(f"{locked.url}/#/inbox")
        expect(page.locator("h1")).to_have_text("Teaching")
        page = visiting.open("try")
        try_picture(page, known_image("class 0"))
        expect(page.locator(".verdict")).to_have_text("class 0")
        expect(page.get_by_role("button", name="That is wrong")).to_have_count(0)
        page = visiting.open("versions/1")
        expect(page.locator(".detail h2")).to_have_text("Version 1")
        assert page.get_by_role("button", name=re.compile("Roll back|Rename|Retire")).count() == 0
        visiting.expect_error("/tasks")


def test_a_labeller_sees_pictures_that_need_a_key_and_forgets_it(browser: Any, locked: RunningServer) -> None:
    with visit(browser, locked.url) as visiting:
        page = enter(visiting, "label")
        assert pages(page) == ["Inbox", "Teaching", "Versions", "Live"]
        expect(picks(page)).to_have_count(4)
        drawn = "[...document.querySelectorAll('.thumb')].every(image => image.naturalWidth > 0)"
        wait_until(lambda: page.evaluate(drawn))
        assert page.locator(".thumb").first.get_attribute("src").startswith("blob:")
        expect(page.locator("#who")).to_contain_text("label-key")
        page.get_by_role("button", name="Forget the key").click()
        expect(page.get_by_label("Key")).to_be_visible()
        page.get_by_label("Key").fill("a-key-of-nobody-at-all")
        page.get_by_role("button", name="Come in").click()
        expect(page.get_by_text("The server does not know that key")).to_be_visible()
        visiting.expect_error("/me")
        visiting.expect_error("/tasks")


# What everybody should be able to use


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_serious(browser: Any, service: Loop, name: str) -> None:
    arrive(service.url, "grape", 3)
    for scheme in ("light", "dark"):
        with visit(browser, service.url, color_scheme=scheme) as visiting:
            page = visiting.open(name)
            if name == "try":
                try_picture(page, known_image("class 0"))
                page.wait_for_selector(".evidence")
            if name == "inbox":
                picks(page).first.click()
            page.wait_for_load_state("networkidle" if name != "teaching" else "load")
            problems = axe_problems(page)
            assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_shows_the_whole_width(browser: Any, service: Loop, name: str) -> None:
    with visit(browser, service.url, PHONE, is_mobile=True, has_touch=True) as visiting:
        page = visiting.open(name)
        if name == "try":
            try_picture(page, known_image("class 0"))
            page.wait_for_selector(".evidence")
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_light_and_dark_follow_the_system_until_somebody_chooses(browser: Any, service: Loop) -> None:
    with visit(browser, service.url, color_scheme="dark") as visiting:
        page = visiting.open("live")
        root = page.locator("html")
        expect(root).to_have_attribute("data-theme", "dark")
        page.get_by_role("button", name="Use light colours").click()
        expect(root).to_have_attribute("data-theme", "light")
        page.reload()
        expect(root).to_have_attribute("data-theme", "light")
