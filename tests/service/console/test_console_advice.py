"""Advice after learning, on the command line and on the console, from the real service."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from models.versions.store import VersionStore
from openworld.cli import main
from tests.support.browsers import playwright, visit
from tests.support.console import image
from tests.support.images import write_classes
from tests.support.learning_loop import Loop

expect = playwright.expect


def test_advice_is_printed_and_shown_after_learning(
    browser: Any, service: Loop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = {"cherry": [image("cherry", 0)], "quince": [image("quince", number) for number in range(12)]}
    assert main(["teach", str(write_classes(tmp_path / "batch", images)), "--url", service.url]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"estimate for fresh images, accuracy \d+\.\d %, AUC of novelty [01]\.\d+", printed)
    assert "what would help:" in printed
    assert "  - 10 more images of cherry would help most (it has 1)" in printed
    assert f"version 4 is active: {service.url}/#/versions/4" in printed

    with visit(browser, service.url) as visiting:
        for name in ("tasks", "versions/4"):
            page = visiting.open(name)
            expect(page.locator(".advice")).to_contain_text("10 more images of cherry would help most (it has 1).")
        expect(page.locator(".detail dl")).to_contain_text("estimate: accuracy")
        expect(page.locator(".detail dl")).to_contain_text("novelty AUC")


def test_no_auc_of_novelty_is_estimated_from_few_classes(browser: Any, service: Loop) -> None:
    """Version 2 has four classes, version 3 has five."""
    store = VersionStore(service.data)
    for classes in (4, 5):
        loaded = store.load(classes - 2)
        metrics = {"accuracy": 0.95, "novelty_auc": 1.0}
        changes = {"parent": store.current(), "task_id": f"few-{classes}", "metrics": metrics}
        version = store.publish(loaded.manifest.model_copy(update=changes), loaded.tensors, loaded.samples).version
        with visit(browser, service.url) as visiting:
            page = visiting.open(f"versions/{version}")
            facts, entry = page.locator(".detail dl"), page.locator(".lineage [aria-current]")
            expect(facts).to_contain_text("estimate: accuracy 95.0 %")
            if classes == 4:
                expect(facts).to_contain_text("too few classes to estimate how well novel images are recognised")
                expect(facts).not_to_contain_text("novelty AUC")
                expect(entry).not_to_contain_text("novelty AUC")
            else:
                expect(facts).to_contain_text("novelty AUC 1.000")
                expect(entry).to_contain_text("novelty AUC")


def test_a_label_that_looks_wrong_is_shown_with_its_image_and_corrected(browser: Any, service: Loop) -> None:
    store = VersionStore(service.data)
    loaded = store.load()
    sha, *others = loaded.samples["seen"]["class 0"]
    wrong = {"image": sha, "label": "class 0", "looks_like": "class 1", "share": 0.9}
    changes = {
        "parent": loaded.manifest.version,
        "task_id": "advised",
        "metrics": {**loaded.manifest.metrics, "advice": {"wrong_labels": [wrong]}},
    }
    version = store.publish(loaded.manifest.model_copy(update=changes), loaded.tensors, loaded.samples).version
    with visit(browser, service.url) as visiting:
        page = visiting.open(f"versions/{version}")
        box = page.locator(".advice")
        expect(box).to_contain_text("it is labelled class 0, but looks like class 1 (90 %)")
        assert box.locator("img").evaluate("async (image) => (await image.decode(), image.naturalWidth)") > 0
        box.get_by_role("button", name="Label it class 1").click()
        page.get_by_role("dialog").get_by_role("button", name="Label it class 1").click()
        page.get_by_role("link", name="Show task").click()
        expect(page.locator(".task").first.get_by_text("published")).to_be_visible(timeout=30_000)
        expect(page.locator(".task").first).to_contain_text("class 'class 0' loses 1 image to class 'class 1'")
    seen = store.load().samples["seen"]
    assert set(seen["class 0"]) == set(others)
    assert sha in seen["class 1"]
