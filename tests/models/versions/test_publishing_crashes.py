"""Concurrent and killed publishers: one version per task, nothing lost, nothing left behind."""

import shutil
import threading

import numpy as np
import pytest

from models.errors import CorruptVersion, StaleParent
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from tests.support.manifests import make_manifest
from tests.support.version_stores import (
    SAMPLES,
    STEPS,
    TENSORS,
    flip_byte,
    kill_and_publish_again,
    publish,
    race,
    start_trainer,
    temporaries,
    tree,
)


def test_a_stale_parent_is_refused_and_nothing_is_written(store: VersionStore) -> None:
    publish(store, "task-1", None)
    publish(store, "task-2", 1)
    before = tree(store.root)
    for parent in (None, 1, 7):
        with pytest.raises(StaleParent, match=f"started from version {parent}, but 2 is current"):
            publish(store, "task-3", parent)
    assert tree(store.root) == before


def test_a_parent_that_becomes_stale_while_waiting_for_the_lock_is_refused(store: VersionStore) -> None:
    publish(store, "task-1", None)
    errors: list[BaseException] = []

    def late() -> None:
        try:
            publish(store, "late", 1)
        except StaleParent as error:
            errors.append(error)

    thread = threading.Thread(target=late)

    def while_holding_the_lock(step: str) -> None:
        if step == "started":
            thread.start()
            thread.join(0.3)
            assert thread.is_alive()

    publish(VersionStore(store.root, while_holding_the_lock), "task-2", 1)
    thread.join(10)
    assert len(errors) == 1
    assert store.versions() == [1, 2]
    assert store.find_task("late") is None


def test_exactly_one_of_several_concurrent_publishers_succeeds(store: VersionStore) -> None:
    parent: int | None = None
    for generation in (1, 2):
        answers = race(store, [make_manifest(f"g{generation}-{i}", parent) for i in range(4)], [{}])
        assert answers == [str(generation), "stale", "stale", "stale"]
        parent = store.current()
        assert parent == generation
    assert store.versions() == [1, 2]
    assert [(p.previous, p.version) for p in store.log()] == [(None, 1), (1, 2)]
    assert not temporaries(store.root)


# Crashes


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("parent", [None, 1])
def test_a_trainer_killed_at_any_step_publishes_its_task_exactly_once(
    store: VersionStore, step: str, parent: int | None
) -> None:
    if parent:
        publish(store, "task-1", None)
    kill_and_publish_again(store, step, parent)
    learned = [n for n in store.versions() if store.load(n).manifest.task_id == "killed"]
    assert learned == [store.current()]
    assert [p.version for p in store.log()] == store.versions()
    assert not temporaries(store.root)


def leave_unfinished(store: VersionStore, manifest: Manifest) -> None:
    trainer = start_trainer(store.root, manifest, "numbered")
    trainer.communicate(timeout=60)


def test_a_retry_on_a_newer_parent_replaces_the_folder_of_the_killed_attempt(store: VersionStore) -> None:
    publish(store, "task-1", None)
    leave_unfinished(store, make_manifest("killed", 1))
    assert store.versions() == [1, 2]
    assert publish(store, "other", 1) == 3
    assert publish(store, "killed", 3) == 3 + 1
    assert store.versions() == [1, 3, 4]
    assert store.find_task("killed") == 4


def test_the_folder_of_a_killed_edit_is_removed_by_the_next_version(store: VersionStore) -> None:
    """No attempt has the random task id of an edit again."""
    publish(store, "task-1", None)
    leave_unfinished(store, make_manifest("edit-1", 1))
    publish(store, "task-2", 1)
    assert store.versions() == [1, 3]
    shutil.rmtree(store.root / "promotions")  # nothing tells which versions were current: all are kept
    store.activate(1, "operator", "roll back")
    shutil.rmtree(store.root / "promotions")
    publish(store, "task-3", 1)
    assert store.versions() == [1, 3, 4]


@pytest.mark.parametrize("same", [True, False])
def test_the_folder_of_a_killed_attempt_is_promoted_only_if_its_content_is_the_same(
    store: VersionStore, same: bool
) -> None:
    leave_unfinished(store, make_manifest("killed"))
    left = store.manifest(1)
    tensors, samples = ({"w": np.ones(3)}, {}) if same else (TENSORS, SAMPLES)
    published = store.publish(make_manifest("killed"), tensors, samples)
    assert (published == left) == same
    assert store.load().tensors.keys() == tensors.keys()
    assert len(store.versions()) == 1


def test_a_damaged_folder_of_a_killed_attempt_is_written_again(store: VersionStore) -> None:
    leave_unfinished(store, make_manifest("killed"))
    flip_byte(store.content_path(1, "heads"))
    publish(store, "killed", None)
    assert store.load().tensors.keys() == TENSORS.keys()
    assert len(store.versions()) == 1


def test_a_damaged_manifest_is_not_overwritten(store: VersionStore) -> None:
    store.manifest_path(1).parent.mkdir(parents=True)
    store.manifest_path(1).write_text("{")
    assert publish(store, "task-1", None) == 2
    with pytest.raises(CorruptVersion, match=r"version 1: manifest: not JSON"):
        store.load(1)


def test_temporary_files_of_other_programs_are_not_removed(store: VersionStore) -> None:
    store.root.mkdir()
    theirs = store.root / ".backbone.json.0123.tmp"
    theirs.write_bytes(b"being written")
    publish(store, "task-1", None)
    assert theirs.exists()
