"""Versions in a real object store: the promises hold without a lock, between machines, and when writers are killed."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.fleet.object_store import SeaweedFS, environment_of
from models.errors import CorruptVersion, FormatError, StaleParent
from models.storage import Storage, open_storage
from models.versions import pruning
from models.versions.data_format import FORMAT, open_data_folder
from models.versions.folder_id import folder_id
from models.versions.promotions import Promotion, effective
from models.versions.store import VersionStore
from tests.support import object_stores
from tests.support.manifests import make_manifest
from tests.support.object_stores import new_bucket
from tests.support.version_stores import (
    SAMPLES,
    STEPS,
    TENSORS,
    kill_and_publish_again,
    publish,
    race,
    start_trainer,
)


@pytest.fixture
def url(seaweedfs: int) -> str:
    return new_bucket()


@pytest.fixture
def store(url: str, tmp_path: Path) -> VersionStore:
    """An empty store, as the first machine sees it."""
    return VersionStore(open_storage(tmp_path / "first", url))


def of_another_machine(store: VersionStore, tmp_path: Path) -> VersionStore:
    """The same versions through another storage object, with an empty local folder."""
    return VersionStore(open_storage(tmp_path / "another", store.storage.location("").rstrip("/")))


def test_another_machine_with_an_empty_folder_sees_the_same_versions(store: VersionStore, tmp_path: Path) -> None:
    graph = store.add_graph(b"a graph")
    publish(store, "task-1", None, graphs={"trunk": graph})
    publish(store, "task-2", 1, graphs={"trunk": graph})
    other = of_another_machine(store, tmp_path)
    assert (other.current(), other.versions(), other.lineage()) == (2, [1, 2], [2, 1])
    assert other.load().tensors.keys() == TENSORS.keys()
    assert other.load().samples == SAMPLES
    assert other.graph_path(graph).read_bytes() == b"a graph"
    other.activate(1, "operator", "roll back")
    assert store.current() == 1
    assert [(line.previous, line.version) for line in store.log()] == [(None, 1), (1, 2), (2, 1)]
    assert other.find_task("task-2") is None
    assert folder_id(store.storage) == folder_id(other.storage)


def test_a_rejected_task_is_kept_for_inspection_and_replaced_by_the_next_attempt(store: VersionStore) -> None:
    publish(store, "task-1", None)
    for reason in ("accuracy fell", "forgets cats"):
        place = store.reject(make_manifest("task-2", 1), TENSORS, SAMPLES, reason)
    assert place == store.storage.location("rejected/task-2.json")
    assert store.rejected()["task-2"].metrics["rejected"] == "forgets cats"
    assert (store.current(), store.versions()) == (1, [1])


def test_a_swap_reads_only_what_is_new_and_lists_nothing(
    store: VersionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, "task-1", None)
    other = of_another_machine(store, tmp_path)
    other.load()
    publish(store, "task-2", 1)  # with the same tensors and samples
    requests: list[str] = []
    fetch = type(other.storage)._fetch  # type: ignore[attr-defined]
    monkeypatch.setattr(type(other.storage), "_fetch", lambda self, key: requests.append(key) or fetch(self, key))
    monkeypatch.setattr(type(other.storage), "list", lambda self, prefix: pytest.fail("a swap lists nothing"))
    assert other.load(other.current()).manifest.version == 2
    assert requests == ["CURRENT", "versions/000002.json"]


@pytest.mark.parametrize("step", STEPS)
def test_a_trainer_killed_at_any_step_publishes_its_task_exactly_once(store: VersionStore, step: str) -> None:
    publish(store, "task-1", None)
    kill_and_publish_again(store, step, 1)


def test_exactly_one_of_two_writers_through_two_gateways_succeeds(
    own_seaweedfs: tuple[SeaweedFS, Storage],
) -> None:
    server, storage = own_seaweedfs
    store = VersionStore(storage)
    environments = [environment_of(port) for port in (server.port, server.add_gateway())]
    parent: int | None = None
    for generation in (1, 2):
        manifests = [make_manifest(f"g{generation}-{i}", parent) for i in range(4)]
        answers = race(store, manifests, environments)
        assert answers[1:] == ["stale"] * 3
        parent = store.current()
        assert str(parent) in answers
    assert [line.version for line in store.log()] == [store.lineage()[1], store.lineage()[0]]


@pytest.fixture
def own_seaweedfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SeaweedFS, Storage]]:
    """A server of this test, and a storage in it."""
    with object_stores.own_seaweedfs(tmp_path / "seaweedfs") as server:
        for name, value in environment_of(server.port).items():
            monkeypatch.setenv(name, value)
        yield server, open_storage(tmp_path / "data", new_bucket())


def test_a_store_that_is_restarted_while_in_use_loses_nothing(own_seaweedfs: tuple[SeaweedFS, Storage]) -> None:
    server, storage = own_seaweedfs
    store = VersionStore(storage)
    publish(store, "task-1", None)
    trainer = start_trainer(storage, make_manifest("task-2", 1), "written stopped")
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "stopped\n"
    server.kill()
    assert trainer.stdin is not None
    trainer.stdin.write("go on\n")
    trainer.stdin.flush()
    time.sleep(0.3)  # the trainer tries in vain
    server.start()
    assert trainer.communicate(timeout=60)[0] == "2\n"
    assert store.current() == 2
    assert store.load().manifest.task_id == "task-2"


@pytest.mark.parametrize("step", ["written", "numbered", "logged"])
def test_a_stopped_trainer_that_wakes_up_cannot_publish(store: VersionStore, step: str) -> None:
    """Another trainer has published the task since, and an operator has rolled that back: A-B-A."""
    publish(store, "task-1", None)
    zombie = start_trainer(store.storage, make_manifest("task-2", 1, submission="s"), f"{step} stopped")
    assert zombie.stdout is not None
    assert zombie.stdout.readline() == "stopped\n"
    published = store.publish(make_manifest("task-2", 1, submission="s"), TENSORS, SAMPLES).version
    store.activate(1, "operator", "roll back")
    assert zombie.communicate("go on\n", timeout=60)[0] == "stale\n"
    assert store.current() == 1
    with pytest.raises(StaleParent, match=f"published as version {published} already"):
        store.publish(make_manifest("task-2", 1, submission="s"), TENSORS, SAMPLES)
    assert [line.version for line in store.log()] == [1, published, 1]


def test_a_writer_that_was_overtaken_leaves_no_gap_in_the_log() -> None:
    def line(version: int, previous: int | None) -> Promotion:
        return Promotion.model_validate(
            {"time": "2026-01-01T00:00:00Z", "version": version, "previous": previous, "by": "trainer", "reason": "x"}
        )

    first, won, lost, last = line(1, None), line(2, 1), line(3, 1), line(4, 2)
    assert effective([first, won, lost, last], 4) == [first, won, last]
    assert effective([first, lost, won, last], 4) == [first, won, last]
    assert effective([first, won, lost], 3) == [first, lost]
    assert effective([won, line(5, 4)], 5) == [line(5, 4)]  # the promotion of version 4 is lost


def test_a_publication_that_began_before_pruning_is_refused(
    store: VersionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, "task-1", None)
    slow = start_trainer(store.storage, make_manifest("slow", 1), "numbered stopped")
    assert slow.stdout is not None
    assert slow.stdout.readline() == "stopped\n"
    start_trainer(store.storage, make_manifest("killed", 1), "numbered").communicate(timeout=60)
    monkeypatch.setattr(pruning, "YOUNG_SECONDS", -5.0)  # the store counts in seconds
    pruned = pruning.prune(of_another_machine(store, tmp_path), last=1)
    assert pruned.versions == [2]
    assert slow.communicate("go on\n", timeout=60)[0] == "stale\n"
    assert (store.current(), store.versions()) == (1, [1, 3])
    assert publish(store, "slow", 1) == 4
    assert store.load().manifest.task_id == "slow"


@pytest.fixture
def prunable(store: VersionStore, monkeypatch: pytest.MonkeyPatch) -> VersionStore:
    """Version 4 is current on version 1; versions 2 and 3 would be pruned."""
    publish(store, "task-1", None)
    publish(store, "task-2", 1, graphs={"trunk": store.add_graph(b"a graph")})
    publish(store, "task-3", 2)
    store.activate(1, "operator", "roll back")
    publish(store, "task-4", 1)
    monkeypatch.setattr(pruning, "YOUNG_SECONDS", -5.0)  # the store counts in seconds
    return store


def test_a_version_that_is_being_pruned_cannot_be_activated(
    prunable: VersionStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruner, refuse = of_another_machine(prunable, tmp_path), VersionStore.refuse_earlier_writers
    refused: list[CorruptVersion] = []

    def activate_afterwards(self: VersionStore, before: bytes | None) -> None:
        refuse(self, before)
        with pytest.raises(CorruptVersion) as caught:
            prunable.activate(3, "operator", "while its contents are being deleted")
        refused.append(caught.value)

    monkeypatch.setattr(VersionStore, "refuse_earlier_writers", activate_afterwards)
    assert pruning.prune(pruner, last=1).versions == [2, 3]
    assert len(refused) == 1
    assert (prunable.current(), prunable.versions()) == (4, [1, 4])
    assert prunable.load().manifest.task_id == "task-4"


def test_an_activation_that_is_faster_than_pruning_keeps_the_version_and_its_parents(
    prunable: VersionStore, tmp_path: Path
) -> None:
    """It has seen the manifest, and replaces `CURRENT` after the manifests are deleted, before the pruner does."""
    manifests_deleted, activated = threading.Event(), threading.Event()
    pruner = of_another_machine(prunable, tmp_path)
    refuse = pruner.refuse_earlier_writers

    def wait_for_activation(before: bytes | None) -> None:
        manifests_deleted.set()
        assert activated.wait(60)
        refuse(before)

    pruner.refuse_earlier_writers = wait_for_activation  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as thread:

        def on_step(step: str) -> None:
            if step == "logged":
                pruning_ends.append(thread.submit(pruning.prune, pruner, last=1))
                assert manifests_deleted.wait(60)

        pruning_ends: list[Future[pruning.Pruned]] = []
        VersionStore(prunable.storage, on_step).activate(3, "operator", "just in time")
        activated.set()
        with pytest.raises(StaleParent):
            pruning_ends[0].result(60)
    fresh = VersionStore(open_storage(tmp_path / "fresh", prunable.storage.location("")))
    assert (fresh.current(), fresh.lineage()) == (3, [3, 2, 1])
    assert [fresh.load(n).manifest.version for n in fresh.lineage()] == [3, 2, 1]


def test_an_activation_that_is_slower_than_pruning_is_refused(prunable: VersionStore, tmp_path: Path) -> None:
    pruner = of_another_machine(prunable, tmp_path)

    def on_step(step: str) -> None:
        if step == "logged":
            assert pruning.prune(pruner, last=1).versions == [2, 3]

    with pytest.raises(StaleParent):
        VersionStore(prunable.storage, on_step).activate(3, "operator", "too late")
    assert (prunable.current(), prunable.versions()) == (4, [1, 4])


def test_of_two_prunings_at_once_none_restores_what_the_other_removes(prunable: VersionStore, tmp_path: Path) -> None:
    pruner = of_another_machine(prunable, tmp_path)
    refuse = pruner.refuse_earlier_writers

    def overtaken(before: bytes | None) -> None:
        VersionStore(prunable.storage).refuse_earlier_writers(before)  # as the other one does
        refuse(before)

    pruner.refuse_earlier_writers = overtaken  # type: ignore[method-assign]
    with pytest.raises(StaleParent):
        pruning.prune(pruner, last=1)
    assert (prunable.current(), prunable.versions()) == (4, [1, 4])


def test_a_store_of_another_format_is_refused(store: VersionStore) -> None:
    open_data_folder(store.storage)
    for number, remedy in ((FORMAT - 1, "openworld migrate"), (FORMAT + 1, "upgrade openworld")):
        store.storage.put("FORMAT", f"{number}\n".encode())
        with pytest.raises(FormatError, match=remedy):
            VersionStore(store.storage)
        with pytest.raises(FormatError, match=remedy):
            open_data_folder(store.storage)
