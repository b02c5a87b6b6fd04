"""The history says what each version added: by provisional versions, by learned ones, and by edits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.versions.edits import Edit, publish_edit
from models.versions.history import history
from models.versions.manifest import PendingTask
from models.versions.reader import manifest_key
from models.versions.store import VersionStore
from openworld.commands.versions import _change
from tests.support.manifests import make_manifest
from tests.support.version_stores import SAMPLES

BASE, NEW, MORE = ["base.1", "base.2"], ["new.1"], ["more.1"]


def pending(*tasks: str) -> dict[str, Any]:
    named = [PendingTask(task_id=task) for task in tasks]
    return {"stage": "provisional", "pending": named, "refined_rule": {"name": "paper"}}


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(tmp_path / "data")


def publish(store: VersionStore, task_id: str, learned: int, images: dict[str, int], **fields: Any) -> int:
    """A version that has the contents of `learned` tasks; `images` are those of its own task."""
    metrics = {"images_per_class": images}
    tensors = {f"task.{n}/w": np.array([n]) for n in range(learned)}
    return store.publish(make_manifest(task_id, store.current(), metrics=metrics, **fields), tensors, SAMPLES).version


def teach_pizza(store: VersionStore) -> None:
    """Version 1 knows cat and dog, version 2 answers with pizza, version 3 has learned it."""
    publish(store, "base", 1, {"cat": 5, "dog": 5}, tasks=[["cat", "dog"]], class_ids=[BASE])
    two: dict[str, Any] = {"tasks": [["cat", "dog"], ["pizza"]], "class_ids": [BASE, NEW]}
    publish(store, "new", 1, {"pizza": 5}, **two, **pending("new"))
    publish(store, "new", 2, {"pizza": 5}, **two)


def added(store: VersionStore) -> list[list[str]]:
    return [entry["added"] for entry in history(store, store.current())]


def changes(store: VersionStore) -> list[str]:
    return [_change(entry) for entry in history(store, store.current())]


def test_a_learned_version_adds_what_its_provisional_parent_answers_with(store: VersionStore) -> None:
    teach_pizza(store)
    assert added(store) == [["cat", "dog"], ["pizza"], ["pizza"]]
    assert changes(store) == ["learned cat, dog", "answers with pizza", "learned pizza"]


def test_images_of_a_known_class_add_no_class(store: VersionStore) -> None:
    teach_pizza(store)
    two: dict[str, Any] = {"tasks": [["cat", "dog"], ["pizza"]], "class_ids": [BASE, NEW]}
    publish(store, "more", 2, {"cat": 3}, **two, **pending("more"))
    publish(store, "more", 2, {"cat": 3}, **two)
    assert added(store)[3:] == [[], []]
    assert changes(store)[3:] == ["answers with more images of cat", "learned more of cat"]


def test_a_learned_task_does_not_add_the_classes_that_stay_pending(store: VersionStore) -> None:
    publish(store, "base", 1, {"cat": 5, "dog": 5}, tasks=[["cat", "dog"]], class_ids=[BASE])
    three: dict[str, Any] = {"tasks": [["cat", "dog"], ["pizza"], ["kiwi"]], "class_ids": [BASE, NEW, MORE]}
    publish(store, "new", 1, {"pizza": 5}, tasks=three["tasks"][:2], class_ids=[BASE, NEW], **pending("new"))
    publish(store, "more", 1, {"kiwi": 5}, **three, **pending("new", "more"))
    publish(store, "new", 2, {"pizza": 5}, **three, **pending("more"))
    assert changes(store)[1:] == ["answers with pizza", "answers with kiwi", "learned pizza"]


def test_a_renamed_class_is_not_added(store: VersionStore) -> None:
    teach_pizza(store)
    publish_edit(store, Edit("rename", "pizza", "margherita"), "operator", "alice")
    assert (added(store)[3], changes(store)[3]) == ([], "renamed pizza to margherita")


def test_the_classes_of_a_version_without_its_parent_are_those_of_its_task(store: VersionStore) -> None:
    teach_pizza(store)
    (store.root / manifest_key(2)).unlink()
    assert added(store) == [["cat", "dog"], ["pizza"]]
