"""Activating, rejecting, the promotion log, and a full disk."""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from models.errors import CorruptVersion, StaleParent, StoreError
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from tests.support.manifests import make_manifest
from tests.support.version_stores import SAMPLES, TENSORS, publish, tree


def test_an_operator_rolls_back_and_forward(store: VersionStore) -> None:
    publish(store, "task-1", None)
    publish(store, "task-2", 1)
    assert store.activate(1, "operator", "too many novel").version == 1
    assert store.load().manifest.task_id == "task-1"
    assert store.find_task("task-2") is None  # not in the lineage: it can be learned again
    store.activate(2, "operator", "was the camera")
    assert store.load().manifest.task_id == "task-2"
    assert (store.find_task("task-1"), store.find_task("task-2"), store.lineage()) == (1, 2, [2, 1])
    assert [(p.previous, p.version, p.by) for p in store.log()] == [
        (None, 1, "trainer"),
        (1, 2, "trainer"),
        (2, 1, "operator"),
        (1, 2, "operator"),
    ]


def test_a_submission_is_learned_even_if_its_version_was_rolled_back(store: VersionStore) -> None:
    publish(store, "task-1", None)
    publish(store, "task-2", 1, submission="first")
    store.activate(1, "operator", "before the worker reported the version")
    assert store.find_task("task-2", "first") == 2
    assert store.find_task("task-2", "second") is None
    assert publish(store, "task-2", 1, submission="second") == 3
    assert store.find_task("task-2") == store.find_task("task-2", "second") == 3


def test_activating_fails_if_another_version_became_current_meanwhile(
    store: VersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, "task-1", None)
    publish(store, "task-2", 1)
    with pytest.raises(StaleParent, match="version 2 became current in place of 1"):
        store.activate(1, "operator", "I saw version 1", replacing=1)
    load = store.load

    def publish_while_verifying(*arguments: Any) -> Any:
        loaded = load(*arguments)
        publish(store, "task-3", 2)
        return loaded

    monkeypatch.setattr(store, "load", publish_while_verifying)
    with pytest.raises(StaleParent, match="version 3 became current in place of 2"):
        store.activate(1, "operator", "I saw version 2")
    monkeypatch.undo()
    assert (store.current(), [line.version for line in store.log()]) == (3, [1, 2, 3])
    assert store.activate(1, "operator", "I saw version 3", replacing=3).version == 1


def test_a_damaged_version_does_not_cut_the_lineage(store: VersionStore) -> None:
    for number in (1, 2, 3):
        publish(store, f"task-{number}", number - 1 or None)
    store.manifest_path(2).write_bytes(b"damaged")
    assert store.lineage() == [3, 2, 1]
    assert store.find_task("task-1") == 1


def test_a_version_number_is_never_reused(store: VersionStore) -> None:
    publish(store, "task-1", None)
    publish(store, "task-2", 1)
    store.activate(1, "operator", "roll back")
    assert publish(store, "task-3", 1) == 3
    store.manifest_path(3).unlink()
    assert store.next_version() == 4


def test_a_version_that_does_not_exist_cannot_be_activated(store: VersionStore) -> None:
    publish(store, "task-1", None)
    with pytest.raises(CorruptVersion, match="version 9"):
        store.activate(9, "operator", "typo")
    assert store.current() == 1


def test_a_rejected_task_is_stored_with_its_reason_and_is_not_current(store: VersionStore) -> None:
    publish(store, "task-1", None)
    for reason in ("accuracy fell", "forgets cats"):
        place = store.reject(make_manifest("task-2", 1), TENSORS, SAMPLES, reason)
    path = store.root / "rejected/task-2.json"
    assert place == str(path)
    kept = Manifest.from_json(path.read_bytes())
    assert kept.metrics == {"accuracy": 0.9, "rejected": "forgets cats"}
    assert kept.files.keys() == {"heads", "samples"}
    for role, entry in kept.files.items():
        store.content(role, entry, "rejected")
    assert (store.current(), store.versions(), store.find_task("task-2")) == (1, [1], None)
    assert [p.name for p in path.parent.iterdir()] == ["task-2.json"]


def test_the_log_only_grows(store: VersionStore) -> None:
    seen: dict[str, bytes | None] = {}
    parent = None
    for i in range(4):
        parent = publish(store, f"task-{i}", parent)
        now = tree(store.root / "promotions")
        assert seen.items() < now.items()
        seen = now


def test_a_damaged_entry_of_the_log_is_ignored(store: VersionStore) -> None:
    publish(store, "task-1", None)
    (store.root / "promotions" / "000000002.json").write_bytes(b'{"time": "2024-')
    assert [p.version for p in store.log()] == [1]
    publish(store, "task-2", 1)
    assert [p.version for p in store.log()] == [1, 2]


def test_a_learned_task_is_found_without_the_log(store: VersionStore) -> None:
    publish(store, "task-1", None)
    publish(store, "task-2", 1)
    shutil.rmtree(store.root / "promotions")
    assert (store.find_task("task-1"), store.find_task("task-2")) == (1, 2)
    publish(store, "task-3", 2)
    assert store.find_task("task-1") == 1


# A full disk


def without_log(store: VersionStore) -> dict[str, bytes | None]:
    """A promotion may be logged without effect."""
    return {name: content for name, content in tree(store.root).items() if not name.startswith("promotions")}


def out_of_space(monkeypatch: pytest.MonkeyPatch, call: str, after: int) -> Callable[[], bool]:
    """Let `after` calls of an os function pass, then fail all others. Returns whether any call failed."""
    real, count = getattr(os, call), 0

    def limited(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        if count > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **keywords)

    monkeypatch.setattr(os, call, limited)
    return lambda: count > after


@pytest.mark.parametrize("call", ["fsync", "write"])
def test_publishing_on_a_full_disk_leaves_the_store_unchanged(store: VersionStore, call: str) -> None:
    publish(store, "task-1", None)
    before, log = without_log(store), store.log()
    for after in range(20):
        with pytest.MonkeyPatch.context() as patch:
            failed = out_of_space(patch, call, after)
            with suppress(StoreError):
                publish(store, "task-2", 1)
        if store.current() != 1:
            break
        assert failed()
        assert without_log(store) == before
        assert store.log() == log
    # Only the last fsync, after CURRENT was replaced, may fail with the version published.
    assert after >= 3
    assert store.load().manifest.task_id == "task-2"
    assert store.find_task("task-2") == store.current()


def test_rejecting_and_activating_on_a_full_disk_leave_the_store_unchanged(store: VersionStore) -> None:
    publish(store, "task-1", None)
    publish(store, "task-2", 1)
    before = tree(store.root)
    for action in (
        lambda: store.reject(make_manifest("bad", 2), TENSORS, SAMPLES, "forgets"),
        lambda: store.activate(1, "operator", "roll back"),
        lambda: store.add_graph(b"a graph"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            out_of_space(patch, "write", 0)
            with pytest.raises(StoreError, match="No space left"):
                action()
    now = tree(store.root)
    assert {now.pop("rejected"), now.pop("graphs")} == {None}  # empty folders
    assert now == before
