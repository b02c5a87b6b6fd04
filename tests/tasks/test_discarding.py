"""Images of ended tasks are discarded, those of other tasks and of batches on their way are not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from models.versions.keep import RECORD
from models.versions.store import VersionStore
from openworld.check import check_folder
from tasks.discarding import UPLOAD_SECONDS, discard_ended, discard_task, record_queue, withdraw_batch
from tasks.images import FeatureStore, ImageStore, erased_images
from tasks.queue import Task, TaskQueue, key_prefix
from tests.support.images import make_image
from tests.support.manifests import make_manifest
from tests.support.redis_servers import PREFIX, RedisServer, client_of, make_task
from trainer.learning.memory import HeldOut, Samples


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def queue(redis_server: RedisServer) -> Iterator[TaskQueue]:
    with client_of(redis_server.url) as client:
        yield TaskQueue(client, PREFIX)


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    (tmp_path / RECORD).write_text("features\n")
    return VersionStore(tmp_path)


def stored(store: VersionStore, *numbers: int) -> list[str]:
    return [ImageStore(store.storage).put(make_image(number)) for number in numbers]


def left(store: VersionStore) -> set[str]:
    return {image.sha256 for image in ImageStore(store.storage)}


def task_of(name: str, images: list[str]) -> Task:
    return make_task(name, classes={name: images})


def make_old(store: VersionStore, sha256: str) -> None:
    old = time.time() - UPLOAD_SECONDS - 60
    os.utime(store.root / "images" / sha256[:2] / sha256, (old, old))


def test_images_that_another_task_needs_stay(store: VersionStore, queue: TaskQueue) -> None:
    own, shared, other = stored(store, 1, 2, 3)
    ended = queue.submit(task_of("a", [own, shared])).task
    queue.submit(task_of("b", [shared, other]))
    discard_task(store, queue, ended, time.time() + 1)
    assert left(store) == {shared, other}
    assert erased_images(store.storage) == {own}
    assert erased_images(store.storage, with_features=True) == set()


def test_images_that_were_stored_again_meanwhile_stay(store: VersionStore, queue: TaskQueue) -> None:
    first, again = stored(store, 1, 2)
    ended = queue.submit(task_of("a", [first, again])).task
    since = time.time() - 60
    os.utime(store.root / "images" / first[:2] / first, (since - 1, since - 1))
    discard_task(store, queue, ended, since)
    assert left(store) == {again}


def test_what_a_killed_process_left_is_found(store: VersionStore, queue: TaskQueue) -> None:
    ended, waiting, on_its_way, abandoned = stored(store, 1, 2, 3, 4)
    task = queue.submit(task_of("a", [ended])).task
    queue.cancel(task.id)
    queue.submit(task_of("b", [waiting]))
    record_queue(store.storage, queue)
    make_old(store, abandoned)
    assert "image_kept" in {finding.code for finding in check_folder(store.root, queue).problems}
    assert discard_ended(store, queue) == 2
    assert left(store) == {waiting, on_its_way}
    assert discard_ended(store, queue) == 0
    report = check_folder(store.root, queue)
    assert "image_kept" not in {finding.code for finding in report.problems}
    assert "unknown_file" not in {finding.code for finding in report.notes}


def test_what_a_killed_conversion_left_of_features_is_found(store: VersionStore, queue: TaskQueue) -> None:
    (store.root / RECORD).write_text("statistics\n")
    waiting, ended = stored(store, 1, 2)
    for sha256 in (waiting, ended):
        FeatureStore(store.storage).put(sha256, {0: np.zeros((1, 2), np.float32)})
    queue.submit(task_of("b", [waiting]))
    ImageStore(store.storage).remove(ended)
    assert "features_kept" in {finding.code for finding in check_folder(store.root, queue).problems}
    discard_ended(store, queue)
    assert {found.sha256 for found in FeatureStore(store.storage)} == {waiting}  # until its task has ended
    assert "features_kept" not in {finding.code for finding in check_folder(store.root, queue).problems}


def test_images_of_tasks_in_another_redis_server_stay(
    store: VersionStore, queue: TaskQueue, caplog: pytest.LogCaptureFixture
) -> None:
    waiting, ended = stored(store, 1, 2)
    make_old(store, waiting)
    assert discard_ended(store, queue) == 0  # no queue is recorded: this one may be a wrong one
    other = TaskQueue(queue.client, key_prefix("another server"))  # its keys are apart, as in another server
    record_queue(store.storage, other)
    other.submit(task_of("a", [waiting]))
    queue.cancel(queue.submit(task_of("b", [ended])).task.id)
    assert discard_ended(store, queue) == 1
    assert left(store) == {waiting}
    assert "another Redis server" in caplog.text
    record_queue(store.storage, queue)  # both have tasks
    assert discard_ended(store, queue) == 0


def test_features_that_an_older_version_needs_stay(store: VersionStore, queue: TaskQueue) -> None:
    replayed, held_out, pending, _ = images = stored(store, 1, 2, 3, 4)
    older = Samples({"a": (replayed,)}, (HeldOut(held_out, "a"),), {}, {"task-b": {"b": (pending,)}})
    store.publish(make_manifest("task-a", None), {"x": np.zeros(1)}, older.to_json())
    store.publish(make_manifest("task-b", 1), {"x": np.zeros(1)}, Samples({}, (), {}).to_json())
    for sha256 in images:
        FeatureStore(store.storage).put(sha256, {0: np.zeros((1, 2), np.float32)})
    discard_task(store, queue, task_of("a", images), time.time() + 1)
    assert left(store) == set()
    assert {found.sha256 for found in FeatureStore(store.storage)} == {replayed, held_out}


def test_a_refused_batch_is_removed_without_an_erasure(store: VersionStore, queue: TaskQueue) -> None:
    own, needed = stored(store, 1, 2)
    queue.submit(task_of("b", [needed]))
    withdraw_batch(store, queue, task_of("a", [own, needed]), time.time() + 1)
    assert left(store) == {needed}
    assert erased_images(store.storage) == set()  # the inbox may have it: people submit it again


def test_images_of_a_refused_batch_that_another_request_has_stored_since_stay(
    store: VersionStore, queue: TaskQueue
) -> None:
    (shared,) = stored(store, 1)
    withdraw_batch(store, queue, task_of("a", [shared]), time.time() - 60)
    assert left(store) == {shared}
