"""Pruning: what is kept, what is removed, and that a running program never misses a file."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from models import files
from models.errors import CorruptVersion
from models.versions.pruning import LOCK, YOUNG_SECONDS, mark_kept, marked_versions, prune, unmark_kept
from models.versions.store import VersionStore
from tests.support.manifests import make_manifest
from tests.support.version_stores import SAMPLES, publish, start_trainer, tree


def learn(store: VersionStore, task: str, parent: int | None) -> int:
    """A version with a task of its own beside those of its parent."""
    inherited = store.manifest(parent).files if parent else {}
    known = {role: entry for role, entry in inherited.items() if role.startswith("task.")}
    tensors = {f"task.{len(known)}/w": np.frombuffer(task.encode(), np.uint8), "head": np.arange(len(known) + 1)}
    return store.publish(make_manifest(task, parent, files=known), tensors, SAMPLES).version


def age(root: Path) -> None:
    """Let all files be older than what is always kept."""
    for path in root.rglob("*"):
        os.utime(path, (time.time() - 2 * YOUNG_SECONDS,) * 2)


@pytest.fixture
def branched(store: VersionStore) -> VersionStore:
    """1 - 2 - 5 is current; 3 - 4 was rolled back."""
    learn(store, "one", None)
    learn(store, "two", 1)
    learn(store, "three", 2)
    learn(store, "four", 3)
    store.activate(2, "operator", "roll back")
    learn(store, "five", 2)
    age(store.root)
    return store


def test_versions_that_were_rolled_back_are_removed_with_their_tasks(branched: VersionStore) -> None:
    gone = [branched.content_path(4, role) for role in ("task.2", "task.3")]
    size = sum(path.stat().st_size for path in branched.root.rglob("*") if path.is_file())
    plan = prune(branched, 1, dry_run=True)
    assert plan.versions == [3, 4]
    assert all(path.exists() for path in gone)
    done = prune(branched, 1)
    assert (done.versions, done.contents, done.bytes) == (plan.versions, plan.contents, plan.bytes)
    assert done.bytes == size - sum(path.stat().st_size for path in branched.root.rglob("*") if path.is_file())
    assert branched.versions() == [1, 2, 5]
    assert not any(path.exists() for path in gone)
    for n in branched.versions():
        branched.load(n)
    assert prune(branched, 1).bytes == 0
    assert learn(branched, "six", 5) == 6


@pytest.mark.parametrize("last", [1, 2, 3])
def test_the_last_versions_and_their_parents_are_kept(branched: VersionStore, last: int) -> None:
    prune(branched, last)
    assert branched.versions() == ([1, 2, 5] if last == 1 else [1, 2, 3, 4, 5])


def test_a_marked_version_is_kept_with_its_parents_until_it_is_released(branched: VersionStore) -> None:
    mark_kept(branched, 3)
    assert marked_versions(branched) == {3}
    prune(branched, 1)
    assert branched.versions() == [1, 2, 3, 5]
    branched.load(3)
    unmark_kept(branched, 3)
    prune(branched, 1)
    assert branched.versions() == [1, 2, 5]


def test_what_is_young_is_kept(branched: VersionStore) -> None:
    """A publishing trainer may have written it, or a server may be reading it."""
    os.utime(branched.manifest_path(4))
    orphan = branched.root / "tasks" / f"{'0' * 64}.safetensors"
    orphan.write_bytes(b"just written")
    assert prune(branched, 1).bytes == 0
    assert branched.versions() == [1, 2, 3, 4, 5]
    assert orphan.exists()


def test_rejected_versions_orphans_graphs_and_temporary_files_are_removed(store: VersionStore) -> None:
    graph, unused = store.add_graph(b"in use"), store.add_graph(b"of no version")
    publish(store, "task-1", None, graphs={"trunk": graph})
    store.reject(make_manifest("bad", 1), {"w": np.ones(4)}, SAMPLES, "forgets")
    orphan = store.root / "heads" / f"{'0' * 64}.safetensors"
    orphan.write_bytes(b"of a killed attempt")
    temporary = files.temporary_beside(orphan)
    temporary.write_bytes(b"half")
    age(store.root)
    done = prune(store)
    assert done.rejected == ["bad"]
    assert done.temporaries == [str(temporary.relative_to(store.root))]
    assert store.graph_path(graph).exists()
    assert not any(
        path.exists() for path in (store.graph_path(unused), orphan, temporary, store.root / "rejected/bad.json")
    )
    store.load()


def test_the_graphs_of_a_first_training_are_kept(store: VersionStore) -> None:
    graph = store.add_graph(b"exported before the training")
    age(store.root)
    assert prune(store).contents == []
    assert store.graph_path(graph).exists()


def test_what_a_killed_trainer_left_is_used_by_the_next_attempt_or_pruned(store: VersionStore) -> None:
    publish(store, "task-1", None)
    start_trainer(store.root, make_manifest("killed", 1), "written").communicate(timeout=60)
    assert store.versions() == [1]
    before = len(tree(store.root))
    age(store.root)
    assert len(prune(store).contents) == 2  # heads and samples of the attempt
    assert len(tree(store.root)) == before - 2


def test_nothing_is_removed_if_it_is_not_known_what_is_needed(branched: VersionStore) -> None:
    branched.manifest_path(2).write_text("{")
    age(branched.root)
    done = prune(branched, 1)
    assert done.contents == []
    assert done.note is not None
    (branched.root / "CURRENT").write_text("?")
    before = tree(branched.root)
    with pytest.raises(CorruptVersion):
        prune(branched, 1)
    assert tree(branched.root) == before


def test_pruning_waits_for_a_publishing_trainer_and_for_a_backup(branched: VersionStore) -> None:
    for lock in (".lock", LOCK):
        thread = threading.Thread(target=prune, args=(branched, 1), kwargs={"dry_run": True})
        with files.file_lock(branched.root / lock):
            thread.start()
            thread.join(0.2)
            assert thread.is_alive()
        thread.join(10)
        assert not thread.is_alive()
