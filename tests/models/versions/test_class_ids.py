"""Labels of queued batches follow renames, merges and roll backs through the ids of classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.versions.class_ids import changed_labels, learned_labels, new_class_id, present_names
from models.versions.edits import Edit, publish_edit
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from tests.support.manifests import make_manifest
from tests.support.version_stores import TENSORS

SAMPLES = {"memory": {}, "seen": {}, "held_out": []}


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    """Version 1 with the classes cat and dog."""
    store = VersionStore(tmp_path)
    learn(store, "cat", "dog")
    return store


def learn(store: VersionStore, *names: str) -> int:
    parent, task_id = store.current_manifest(), f"task-{store.next_version()}"
    manifest = make_manifest(
        task_id,
        parent.version if parent else None,
        tasks=[*(parent.tasks if parent else []), list(names)],
        class_ids=[*(parent.class_ids if parent else []), [new_class_id(task_id, name) for name in names]],
        aliases=parent.aliases if parent else {},
    )
    return store.publish(manifest, TENSORS, SAMPLES).version


def edit(store: VersionStore, *what: str) -> int:
    return publish_edit(store, Edit(*what), "operator", "anna").version  # type: ignore[arg-type]


def names(store: VersionStore, labels: str, submitted_at: int | None) -> str:
    found = present_names(store, store.current_manifest(), labels.split(), submitted_at)
    return " ".join(found.values())


def test_answers_of_an_earlier_version_have_present_labels(store: VersionStore) -> None:
    learn(store, "bird")
    edit(store, "rename", "cat", "lynx")
    edit(store, "merge", "dog", "lynx")
    edit(store, "retire", "bird")
    one, three, last = store.manifest(1), store.manifest(3), store.current_manifest()
    assert last is not None
    assert changed_labels(one, last) == {"cat": "lynx", "dog": "lynx"}
    assert changed_labels(three, last) == {"dog": "lynx"}  # a retired class keeps its name
    assert changed_labels(last, one) == {"lynx": "cat"}  # after a roll back


def test_a_label_follows_renames_and_merges_since_its_submission(store: VersionStore) -> None:
    edit(store, "rename", "cat", "lynx")
    assert names(store, "cat dog bird", 1) == "lynx dog bird"
    assert names(store, "cat dog bird", 2) == "cat dog bird"  # submitted after the rename: a new class
    edit(store, "merge", "dog", "lynx")
    assert names(store, "cat dog", 1) == "lynx lynx"
    edit(store, "restore", "dog")
    assert names(store, "cat dog", 1) == "lynx dog"
    edit(store, "retire", "dog")
    assert names(store, "cat dog", 1) == "lynx dog"  # refused by `unusable_labels`


def test_a_name_that_was_given_to_another_class_since_still_means_the_first_one(store: VersionStore) -> None:
    edit(store, "rename", "cat", "lynx")
    edit(store, "rename", "dog", "cat")
    assert names(store, "cat dog", 1) == "lynx cat"


@pytest.mark.parametrize("submitted_at", [0, 1])
def test_a_class_that_an_earlier_queued_task_creates_is_followed_too(store: VersionStore, submitted_at: int) -> None:
    learn(store, "bird")
    edit(store, "rename", "bird", "robin")
    assert names(store, "bird", submitted_at) == "robin"


def test_after_a_roll_back_a_label_means_the_class_with_the_same_id(store: VersionStore) -> None:
    edit(store, "rename", "cat", "lynx")
    learn(store, "bird")
    store.activate(1, "operator", "roll back")
    learn(store, "fish")
    assert names(store, "lynx dog bird fish", 3) == "cat dog bird fish"


def test_without_a_version_labels_are_the_names_of_the_parent(store: VersionStore) -> None:
    edit(store, "rename", "cat", "lynx")
    assert names(store, "cat lynx", None) == "cat lynx"
    assert present_names(store, None, ["cat"], 0) == {"cat": "cat"}


def test_ids_are_unique_and_cover_every_class() -> None:
    assert new_class_id("task-1", "cat") == new_class_id("task-1", "cat") != new_class_id("task-2", "cat")
    for ids in ([["a"]], [["a", "a"]], [["a"], ["b"]]):
        with pytest.raises(ValueError, match="one id for each class"):
            make_manifest(tasks=[["cat", "dog"]], class_ids=ids)
    manifest: Manifest = make_manifest(tasks=[["cat", "dog"]], class_ids=[["a", "b"]])
    assert manifest.id_of == {"cat": "a", "dog": "b"}


def test_labels_of_images_follow_renames_and_merges_and_include_pending_tasks(store: VersionStore) -> None:
    learn(store, "wolf")
    edit(store, "rename", "cat", "tiger")
    edit(store, "merge", "wolf", "dog")
    manifest = store.current_manifest()
    assert manifest is not None
    ids = manifest.id_of
    seen = {ids["tiger"]: ["1", "2"], ids["wolf"]: ["3"]}
    samples = SAMPLES | {"seen": seen, "pending": {"task-9": {ids["dog"]: ["4"]}}}
    assert learned_labels(samples, manifest, "1345") == {"1": "tiger", "3": "dog", "4": "dog"}
