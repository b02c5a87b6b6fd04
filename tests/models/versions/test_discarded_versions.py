"""Discarded versions: a folder that keeps statistics removes the sums of tasks that were not learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.errors import CorruptVersion, StoreError
from models.storage import Storage, storage_of
from models.versions import pruning
from models.versions.contents import PROVISIONAL, content_key
from models.versions.history import history
from models.versions.keep import RECORD
from models.versions.manifest import PendingTask
from models.versions.pruning import discard_sums, discarded_versions, drop_discarded_copies, mark_kept, prune
from models.versions.store import VersionStore
from tests.support.manifests import make_manifest
from tests.support.object_stores import memory_storage
from tests.support.version_stores import SAMPLES, start_trainer

PENDING = {"stage": "provisional", "pending": [PendingTask(task_id="late")], "refined_rule": {"name": "paper"}}


def statistics_store(storage: Storage) -> VersionStore:
    storage.put(RECORD, b"statistics\n")
    return VersionStore(storage)


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return statistics_store(storage_of(tmp_path / "data"))


def learn(store: VersionStore, task: str, parent: int | None, **changes: Any) -> int:
    """A version with the tasks of its parent and, if tasks are pending, their sums."""
    inherited = store.manifest(parent).files if parent else {}
    known = {role: entry for role, entry in inherited.items() if role.startswith("task.")}
    tensors = {"head": np.arange(len(known) + 1)}
    if "pending" in changes:
        tensors[f"{PROVISIONAL}/sums"] = np.frombuffer(task.encode(), np.uint8)
    else:
        tensors[f"task.{len(known)}/w"] = np.frombuffer(task.encode(), np.uint8)
    manifest = make_manifest(task, parent, files=known, **{"keep": "statistics", **changes})
    return store.publish(manifest, tensors, SAMPLES).version


def sums_of(store: VersionStore, n: int) -> str:
    return content_key(PROVISIONAL, store.manifest(n).files[PROVISIONAL].sha256)


@pytest.fixture
def dropped(store: VersionStore) -> VersionStore:
    """Version 3 follows version 2, in which a task was pending."""
    learn(store, "one", None)
    learn(store, "late", 1, **PENDING)
    learn(store, "two", 2)
    return store


def test_sums_of_pending_tasks_stay_while_their_version_is_current(store: VersionStore) -> None:
    learn(store, "one", None)
    learn(store, "late", 1, **PENDING)
    assert discard_sums(store).contents == []
    store.load()
    assert discarded_versions(store) == []


def test_sums_of_pending_tasks_go_with_the_next_version(dropped: VersionStore) -> None:
    sums = sums_of(dropped, 2)
    done = discard_sums(dropped)
    assert (done.contents, done.versions) == ([sums], [])
    assert dropped.storage.find(sums) is None
    for n in (1, 3):
        dropped.load(n)
    assert dropped.find_task("one") == 1  # what was learned stays known
    assert dropped.versions() == [1, 2, 3]
    assert discarded_versions(dropped) == [2]
    assert ["discarded" in entry for entry in history(dropped, 3)] == [False, True, False]
    assert discard_sums(dropped).bytes == 0


def test_a_discarded_version_cannot_be_used_kept_or_activated(dropped: VersionStore) -> None:
    refusal = "version 2 cannot be used any more, its contents are removed: it was provisional"
    with pytest.raises(CorruptVersion, match=refusal):  # also before they are removed: a reader may be slow
        dropped.activate(2, "operator", "roll back")
    discard_sums(dropped)
    for use in (dropped.load, lambda n: dropped.activate(n, "operator", "roll back")):
        with pytest.raises(CorruptVersion, match=refusal):
            use(2)
    with pytest.raises(StoreError, match="version 2 cannot be kept: it was provisional"):
        mark_kept(dropped, 2)
    assert dropped.current() == 3


def test_a_version_from_before_the_conversion_is_discarded(store: VersionStore) -> None:
    learn(store, "one", None, keep="features")
    learn(store, "two", 1)
    gone = store.manifest(1).files["heads"]
    assert discard_sums(store).contents == [content_key("heads", gone.sha256)]
    with pytest.raises(CorruptVersion, match="from before the conversion of the data folder to statistics"):
        store.activate(1, "operator", "roll back")
    store.load()


@pytest.mark.parametrize("keep", ["images", "features"])
def test_other_folders_keep_all_contents(dropped: VersionStore, keep: str) -> None:
    dropped.storage.put(RECORD, f"{keep}\n".encode())
    assert discard_sums(dropped).bytes == 0
    assert dropped.activate(2, "operator", "roll back").version == 2


@pytest.mark.parametrize("step", ["written", "numbered", "logged"])
def test_what_a_killed_attempt_left_goes_at_once(store: VersionStore, step: str) -> None:
    learn(store, "one", None)
    start_trainer(store.root, make_manifest("killed", 1, keep="statistics"), step).communicate(timeout=60)
    assert len(discard_sums(store).contents) == 2  # heads and samples
    assert store.versions() == [1]
    assert learn(store, "two", 1) > 1


def test_a_rejected_result_has_no_sums(store: VersionStore) -> None:
    learn(store, "one", None)
    before = {found.key for place in ("tasks/", "heads/", "samples/") for found in store.storage.list(place)}
    store.reject(make_manifest("bad", 1), {"task.1/w": np.ones(4)}, SAMPLES, "forgets")
    assert {found.key for place in ("tasks/", "heads/", "samples/") for found in store.storage.list(place)} == before
    assert store.rejected()["bad"].metrics["rejected"] == "forgets"
    assert discard_sums(store).rejected == []


def test_rejected_results_from_before_the_conversion_go(store: VersionStore) -> None:
    learn(store, "one", None)
    store.storage.put(RECORD, b"features\n")
    store.reject(make_manifest("bad", 1), {"task.1/w": np.ones(4)}, SAMPLES, "forgets")
    store.storage.put(RECORD, b"statistics\n")
    done = discard_sums(store)
    assert (done.rejected, len(done.contents), store.rejected()) == (["bad"], 2, {})


def test_a_reader_of_a_version_that_is_discarded_meanwhile_reads_the_next_one(
    dropped: VersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    discard_sums(dropped)
    answers = iter([2])  # `CURRENT`, as a slow reader has read it
    monkeypatch.setattr(VersionStore, "current", lambda self: next(answers, 3))
    assert dropped.load().manifest.version == 3


def test_in_an_object_store_young_sums_stay_and_copies_of_other_machines_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = statistics_store(memory_storage(tmp_path))
    learn(store, "one", None)
    learn(store, "late", 1, **PENDING)
    store.load()  # makes a copy
    learn(store, "two", 2)
    sums = sums_of(store, 2)
    assert (tmp_path / "objects" / sums).exists()
    drop_discarded_copies(store)
    assert not (tmp_path / "objects" / sums).exists()
    assert discard_sums(store).contents == []  # another machine may be publishing the same contents
    assert store.storage.find(sums) is not None
    monkeypatch.setattr(pruning, "YOUNG_SECONDS", -1.0)
    assert discard_sums(store).contents == [sums]
    assert store.storage.find(sums) is None
    store.load()
    assert learn(store, "three", 3) == 4


def test_pruning_removes_the_sums_of_discarded_versions_too(
    dropped: VersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "YOUNG_SECONDS", -1.0)
    assert prune(dropped).contents == [sums_of(dropped, 2)]
