"""Actions on the console's pages, and what a robot and the API do beside them."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx

from service.wire.predictions import Prediction
from tests.support.servers import IMAGES

PAGES = ("inbox", "tasks", "try", "versions", "live", "audit")


def image(name: str, number: int) -> bytes:
    return IMAGES.read(f"{name}/{number}")


def send_novel_images(url: str, name: str, count: int, headers: dict[str, str] | None = None) -> None:
    """Send images of an unknown class to /predict, until it has answered novel to so many; some may look known."""
    novel = 0
    for number in range(4 * count):
        answer = httpx.post(f"{url}/predict", content=image(name, number), headers=headers or {}, timeout=30).json()
        novel += answer["predictions"][0]["novel"]
        if novel == count:
            return
    raise AssertionError(f"{novel} of {4 * count} images of {name} are novel")


def words_about(url: str, data: bytes, label: str | None, headers: dict[str, str] | None = None) -> str:
    """The service's answer in the words of the Python client; its label must be `label`."""
    (answer,) = httpx.post(f"{url}/predict", content=data, headers=headers or {}, timeout=30).json()["predictions"]
    assert answer["label"] == label, answer
    return Prediction.model_validate(answer).in_words()


def new_novelties(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/novelties?limit=200", timeout=30).json()["items"]
    return found


def dismiss_all(url: str) -> None:
    """Empty the inbox of what earlier tests have left."""
    if ids := [novelty["id"] for novelty in new_novelties(url)]:
        httpx.post(f"{url}/novelties/dismiss", json={"ids": ids}, timeout=30)


def image_buttons(page: Any) -> Any:
    return page.locator("button.image-button")


def label_first_group(page: Any, name: str) -> None:
    page.get_by_role("button", name="Select all").first.click()
    page.get_by_label("Class name").fill(name)
    page.get_by_role("button", name="Add to batch").click()


def try_image(page: Any, data: bytes, name: str = "image.png") -> None:
    page.locator("input[multiple]").set_input_files({"name": name, "mimeType": "image/png", "buffer": data})
