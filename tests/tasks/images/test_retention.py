"""Stored images go when an operator says so: never silently, and what was learned from them stays."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from models.errors import CorruptVersion, StoreError
from models.files import sha256_bytes
from models.versions.store import VersionStore
from openworld.up.embedded_redis import RedisServer
from tasks.errors import BatchError, QueueUnavailable
from tasks.images.retention import Retention
from tasks.images.store import ImageStore
from tasks.queue import TaskQueue
from tests.support.images import make_image
from tests.support.manifests import make_manifest, manifest_of
from tests.support.redis_servers import client_of, make_task
from tests.support.servers import RunningServer, learned_folder, running_server, wait_until
from tests.support.tiny_model import (
    TinyImages,
    class_tasks,
    learn_tasks,
    silent_progress,
    tiny_backbone,
    tiny_learner,
    tiny_settings,
)
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.learner import Learned, Learner
from trainer.learning.memory import HeldOut, Samples
from trainer.learning.tokens import TokenCache
from trainer.publish import Parent

DAY = 86400.0
Unfinished = Callable[[], Mapping[str, Collection[str]]]


class Folder:
    """A data folder with ten images; version 1 remembers 0 and 1 and holds out 2, version 2 remembers 1 and 3."""

    def __init__(self, root: Path) -> None:
        self.root, self.store, self.images = root, VersionStore(root), ImageStore(root)
        self.shas = [self.images.put(make_image(n)) for n in range(10)]
        self.publish(None, memory=(0, 1), held_out=(2,))
        self.publish(1, memory=(1, 3), held_out=())

    def publish(self, parent: int | None, memory: Collection[int], held_out: Collection[int]) -> None:
        samples = Samples(
            {"cat": tuple(self.shas[n] for n in memory)},
            tuple(HeldOut(self.shas[n], "cat") for n in held_out),
            {"cat": tuple(self.shas)},
        )
        self.store.publish(make_manifest(f"task-{parent}", parent), {"x": np.zeros(1)}, samples.to_json())

    def age(self, number: int, days: float) -> None:
        path = self.path(number)
        os.utime(path, (time.time() - days * DAY,) * 2)

    def path(self, number: int) -> Path:
        return self.root / "images" / self.shas[number][:2] / self.shas[number]

    def retention(self, unfinished: Unfinished | None = None) -> Retention:
        return Retention(self.store, unfinished)

    @property
    def there(self) -> set[int]:
        return {n for n, sha in enumerate(self.shas) if sha in self.images}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


# Who needs an image


def test_an_image_tells_which_versions_and_tasks_need_it(folder: Folder) -> None:
    retention = folder.retention(lambda: {"task-a": {folder.shas[3]}, "task-b": [folder.shas[4]]})
    uses = [retention.uses(sha) for sha in folder.shas]
    assert [use.memory for use in uses[:5]] == [(1,), (1, 2), (), (2,), ()]
    assert [use.held_out for use in uses[:5]] == [(), (), (1,), (), ()]
    assert [use.tasks for use in uses[:5]] == [(), (), (), ("task-a",), ("task-b",)]
    assert [use.current for use in uses[:5]] == [False, True, False, True, False]
    assert [len(use.dependents) for use in uses] == [1, 2, 1, 2, 1, 0, 0, 0, 0, 0]
    stored = uses[5].stored
    assert stored is not None
    assert stored.bytes == len(make_image(5))
    assert time.time() - stored.time < 60
    assert retention.uses("0" * 64).stored is None


def test_a_removed_image_is_gone_and_others_are_not(folder: Folder) -> None:
    removed = folder.retention().remove(folder.shas[5])
    assert (removed.sha256s, removed.bytes) == ((folder.shas[5],), len(make_image(5)))
    assert folder.there == set(range(10)) - {5}
    assert folder.retention().remove(folder.shas[5]).sha256s == ()


@pytest.mark.parametrize("sha", ["", "../../CURRENT", "A" * 64, "0" * 63])
def test_what_is_no_hash_never_becomes_a_path(folder: Folder, sha: str) -> None:
    with pytest.raises(StoreError, match="not the sha256"):
        folder.retention().remove(sha)


# By age


def test_only_old_images_that_nobody_needs_now_are_removed(folder: Folder) -> None:
    for number in range(8):
        folder.age(number, days=100)
    folder.age(8, days=29)
    retention = folder.retention(lambda: {"task-a": [folder.shas[4]]})
    expired = retention.expired(30)
    # 0 and 2 are needed by version 1 alone, which is not current: it goes on answering without them.
    assert {one.sha256 for one in expired.removable} == {folder.shas[n] for n in (0, 2, 5, 6, 7)}
    assert expired.bytes == sum(len(make_image(n)) for n in (0, 2, 5, 6, 7))
    assert (expired.kept, expired.kept_bytes) == (3, sum(len(make_image(n)) for n in (1, 3, 4)))
    assert folder.there == set(range(10))
    removed = retention.remove_expired(30)
    assert set(removed.sha256s) == {one.sha256 for one in expired.removable}
    assert removed.bytes == expired.bytes
    assert folder.there == {1, 3, 4, 8, 9}
    assert retention.remove_expired(30).sha256s == ()


def test_an_image_that_a_task_brings_again_is_young_again(folder: Folder) -> None:
    folder.age(5, days=100)
    assert folder.images.put(make_image(5)) == folder.shas[5]
    assert folder.retention().expired(30).removable == ()


def test_before_the_first_version_only_age_and_tasks_count(tmp_path: Path) -> None:
    retention = Retention(VersionStore(tmp_path))
    assert retention.expired(30).removable == ()
    sha = ImageStore(tmp_path).put(make_image(1))
    os.utime(tmp_path / "images" / sha[:2] / sha, (0, 0))
    assert Retention(VersionStore(tmp_path), lambda: {"t": [sha]}).expired(30).kept == 1
    assert [one.sha256 for one in retention.expired(30).removable] == [sha]


def unreachable() -> Mapping[str, Collection[str]]:
    raise QueueUnavailable("Redis cannot be reached")


def test_nothing_is_removed_when_the_queue_cannot_say_what_it_needs(folder: Folder) -> None:
    folder.age(5, days=100)
    for ask in (lambda r: r.remove_expired(30), lambda r: r.uses(folder.shas[5])):
        with pytest.raises(QueueUnavailable):
            ask(folder.retention(unreachable))
    assert folder.there == set(range(10))


@pytest.mark.parametrize("damage", ["changed", "missing", "CURRENT"])
def test_nothing_is_removed_when_the_current_version_cannot_say_what_it_needs(folder: Folder, damage: str) -> None:
    folder.age(5, days=100)
    samples = folder.store.folder(2) / "samples.json"
    if damage == "changed":
        samples.write_text(samples.read_text().replace(folder.shas[1], folder.shas[9]))
    elif damage == "missing":
        samples.unlink()
    else:
        (folder.root / "CURRENT").write_text("two")
    with pytest.raises(CorruptVersion):
        folder.retention().remove_expired(30)
    assert folder.there == set(range(10))


def test_a_damaged_version_that_names_an_image_counts_as_one_that_needs_it(folder: Folder) -> None:
    samples = folder.store.folder(1) / "samples.json"
    samples.write_bytes(samples.read_bytes()[:-20])
    assert folder.retention().uses(folder.shas[0]).memory == (1,)


def test_a_queue_tells_the_images_of_tasks_that_have_not_ended(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, client_of(server.url) as client:
        queue = TaskQueue(client)
        assert queue.unfinished_images() == {}
        tasks = [queue.submit(make_task(name)).task for name in ("one", "two", "three")]
        queue.cancel(tasks[0].id)
        lease = queue.claim("worker")
        assert lease is not None
        assert queue.unfinished_images() == {
            task.id: {sha for images in task.classes.values() for sha in images} for task in tasks[1:]
        }


# Learning on with what is left


def test_samples_without_deleted_images_keep_their_classes() -> None:
    samples = Samples(
        {"a": ("1", "2"), "b": ("3",)}, (HeldOut("4", "a"), HeldOut("5", "b")), {"a": ("1", "2", "4"), "b": ("3", "5")}
    )
    left = samples.without_missing({"2", "5"})
    assert left == Samples({"a": ("2",), "b": ()}, (HeldOut("5", "b"),), samples.seen)
    assert samples.without_missing(samples.keys) == samples


def accuracy(learner: Learner, learned: Learned, name: str) -> float:
    """Of the class's own name, novel or not, on images that nobody has seen."""

    keys = TinyImages().batch([name], count=20, start=500)[name]
    scores = learned.model.rule.log_scores(learned.model.evidence(learner.features(learned.model, keys)))
    return float(np.mean([learned.model.classes[best] == name for best in scores.argmax(axis=1)]))


def learn_on(learner: Learner, parent: Learned, samples: Samples, images: dict[str, list[str]]) -> Learned:
    return learner.learn(parent.model, samples, images, Checkpoint(None), silent_progress())


BIG = {"replay_size": 40, "epochs": 8, "back_epochs": 10}


@pytest.mark.parametrize("lost", [["class 0"], ["class 0", "class 1"], ["class 0", "class 1", "class 2", "class 3"]])
def test_a_class_whose_images_are_all_deleted_is_still_recognised_after_the_next_task(lost: list[str]) -> None:
    learner = tiny_learner(**BIG)
    *tasks, last = class_tasks([2, 2, 2], images=20)
    parent = learn_tasks(learner, tasks)[-1]
    before = {name: accuracy(learner, parent, name) for name in lost}
    gone = {key for name in lost for key in parent.samples.seen[name]}
    samples = parent.samples.without_missing(parent.samples.keys - gone)
    assert {name for name, keys in samples.memory.items() if not keys} == set(lost)
    child = learn_on(learner, parent, samples, last)
    for task in child.model.tasks:
        assert np.isfinite(task.head.weight).all()
    assert np.isfinite(child.model.calibration.tails).all()
    assert np.isfinite(child.model.calibration.threshold).all()
    whole = learn_on(learner, parent, parent.samples, last)
    for name in lost:
        assert accuracy(learner, child, name) >= min(before[name], accuracy(learner, whole, name)) - 0.25
    # The class comes back with new images, and the next task is learned as ever.
    more = TinyImages().batch(lost, start=100)
    again = learn_on(learner, child, child.samples, more)
    assert all(again.samples.memory[name] for name in lost)


def test_a_head_does_not_unlearn_a_class_whose_images_are_all_deleted() -> None:
    learner = tiny_learner(replay_size=40, epochs=8, back_epochs=60, noise=60)
    first, second = class_tasks([2, 2], images=20)
    parent = learn_tasks(learner, [first])[0]
    gone = set(parent.samples.seen["class 0"])
    child = learn_on(learner, parent, parent.samples.without_missing(parent.samples.keys - gone), second)
    keys = TinyImages(60).batch(["class 0"], count=40, start=500)["class 0"]
    shares = []
    for learned in (parent, child):
        head = learned.model.tasks[0].head
        shares.append((head.logits(learner.features(learned.model, keys).tasks[0]).argmax(axis=1) == 0).mean())
    assert shares[1] >= shares[0] - 0.1


def test_heads_of_tasks_without_memory_are_told_what_is_not_theirs() -> None:
    learner = tiny_learner(**BIG)
    first, second = class_tasks([2, 2], images=20)
    parent = learn_tasks(learner, [first])[0]
    child = learn_on(learner, parent, parent.samples.without_missing(()), second)
    old, new = parent.model.tasks[0], child.model.tasks[0]
    assert not np.array_equal(old.head.weight, new.head.weight)
    z = learner.features(child.model, [key for keys in second.values() for key in keys]).tasks[0]
    ood = [head.logits(z)[:, -1] - head.logits(z)[:, :-1].max(axis=1) for head in (old.head, new.head)]
    assert ood[1].mean() > ood[0].mean()


def test_a_task_whose_judges_are_all_deleted_keeps_its_calibration() -> None:
    learner = tiny_learner()
    first, second = class_tasks([2, 2])
    parent = learn_tasks(learner, [first])[0]
    samples = replace(parent.samples, held_out=())
    child = learn_on(learner, parent, samples, second)
    assert np.array_equal(child.model.calibration.tails[0], parent.model.calibration.tails[0])
    assert child.verdict.tasks[0].images == 0
    # A known class extended by one image brings no judge either: then all constants are the parent's.
    lone = learn_on(learner, parent, samples, {"class 0": ["class 0/900"]})
    assert lone.samples.held_out == ()
    assert lone.model.rule == parent.model.rule
    assert np.array_equal(lone.model.calibration.threshold, parent.model.calibration.threshold)


def test_nothing_changes_for_who_has_lost_nothing() -> None:
    learner = tiny_learner()
    first, second = class_tasks([2, 1])
    parent = learn_tasks(learner, [first])[0]
    one = learn_on(learner, parent, parent.samples, second)
    other = learn_on(learner, parent, parent.samples.without_missing(parent.samples.keys), second)
    for name, tensor in one.model.tensors().items():
        assert np.array_equal(tensor, other.model.tensors()[name])


def test_the_next_task_is_learned_without_the_images_that_were_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backbone, images, store = tiny_backbone(), ImageStore(tmp_path), VersionStore(tmp_path)
    learner = Learner(backbone, TokenCache(backbone, images.read), tiny_settings())
    first, second = (
        {name: [images.put(TinyImages().read(key)) for key in keys] for name, keys in task.items()}
        for task in class_tasks([2, 1])
    )
    learned = learner.learn(learner.empty(), Samples(), first, Checkpoint(None), silent_progress())
    store.publish(
        manifest_of(learned.model, backbone.spec, graphs={}), learned.model.tensors(), learned.samples.to_json()
    )
    assert Parent.load(store).without_deleted(images).samples == learned.samples
    assert caplog.text == ""
    gone = [*learned.samples.memory["class 0"], learned.samples.held_out[-1].key]
    for sha in gone:
        Retention(store).remove(sha)
    parent = Parent.load(store).without_deleted(images)
    assert parent.model is not None
    assert f"{len(gone)} images of version 1 were deleted" in caplog.text
    assert parent.deleted == tuple(sorted(gone))
    assert not parent.samples.keys & set(gone)
    fresh = Learner(backbone, TokenCache(backbone, images.read), tiny_settings())  # that remembers no token of them
    child = fresh.learn(parent.model, parent.samples, second, Checkpoint(None), silent_progress())
    assert child.model.classes == ("class 0", "class 1", "class 2")
    assert not child.samples.keys & set(gone)


def test_an_image_that_was_deleted_counts_as_learned() -> None:
    learner = tiny_learner()
    parent = learn_tasks(learner, class_tasks([2]))[0]
    with pytest.raises(BatchError, match="learned already"):
        learn_on(learner, parent, parent.samples.without_missing(()), TinyImages().batch(["class 0"]))


# Over HTTP


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = learned_folder(tmp_path_factory.mktemp("retention") / "robot")
    with running_server(data, threads=1, poll_seconds=0.1) as running:
        yield running


@pytest.fixture(scope="module")
def shas(server: RunningServer) -> list[str]:
    """Three stored images, all of them old: the current version remembers the first, its parent the second."""
    root = server.log.parent / "robot"
    store, images = VersionStore(root), ImageStore(root)
    shas = [images.put(make_image(n, (64, 48))) for n in range(3)]
    for remembered in (shas[1], shas[0]):
        loaded = store.load()
        samples: dict[str, Any] = {**loaded.samples, "memory": {**loaded.samples["memory"], "class 0": [remembered]}}
        parent = loaded.manifest.version
        manifest = loaded.manifest.model_copy(update={"parent": parent, "task_id": f"edit-{parent}"})
        store.publish(manifest, loaded.tensors, samples)
    for sha in shas:
        os.utime(root / "images" / sha[:2] / sha, (0, 0))
    server.wait_for_version(5)
    return shas


def delete(server: RunningServer, path: str) -> httpx.Response:
    return httpx.delete(f"{server.url}{path}", timeout=30)


def test_an_operator_sees_who_needs_an_image_and_is_warned(server: RunningServer, shas: list[str]) -> None:
    uses = server.get(f"/images/{shas[0]}").json()
    assert (uses["stored"], uses["bytes"], uses["stored_at"]) == (
        *(True, len(make_image(0, (64, 48)))),
        "1970-01-01T00:00:00Z",
    )
    assert (uses["in_memory_of"], uses["held_out_by"], uses["in_use_now"]) == ([5], [], True)
    assert (uses["sha256"], uses["tasks"], uses["inbox"]) == (shas[0], [], False)
    refused = delete(server, f"/images/{shas[0]}")
    assert (refused.status_code, refused.json()["code"]) == (409, "image_in_use")
    assert [error["detail"] for error in refused.json()["errors"]] == ["version 5 has it in its replay memory"]
    assert server.get(f"/images/{shas[0]}").json()["stored"]
    for path in (f"/images/{'0' * 64}", f"/images/{'0' * 64}?force=true"):
        answers = [delete(server, path), server.get(path)]
        assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [(404, "not_found")] * 2
    assert server.get("/images/nonsense").json()["code"] == "invalid"


def test_an_age_below_a_day_or_no_confirmation_removes_nothing(server: RunningServer, shas: list[str]) -> None:
    for query, code in (
        *(("", "invalid"), ("?older_than_days=0.5&confirm=true", "invalid"), ("?older_than_days=nan", "invalid")),
        *(("?older_than_days=30", "bad_request"), ("?older_than_days=30&confirm=false", "bad_request")),
    ):
        assert delete(server, f"/images{query}").json()["code"] == code
    assert all(server.get(f"/images/{sha}").json()["stored"] for sha in shas)


def test_a_deletion_takes_the_image_out_of_the_inbox_too(server: RunningServer, shas: list[str]) -> None:
    # Old images that also lie in the inbox, one of them put there by a person.
    for data, sha in ((make_image(1, (64, 48)), shas[1]), (make_image(2, (64, 48)), shas[2])):
        answer = server.post("/predict", content=data).json()["predictions"][0]
        server.post("/novelties", json={"prediction_ids": [answer["id"]]})
        wait_until(lambda sha=sha: server.get(f"/novelties/{sha}").status_code == 200)
    assert server.get(f"/images/{shas[2]}").json()["inbox"]
    size = len(make_image(1, (64, 48)))
    expired = server.get("/images/expired?older_than_days=30").json()
    assert (expired["older_than_days"], expired["images"], expired["kept"]) == (30, 2, 1)
    assert (expired["bytes"], expired["kept_bytes"]) == (
        size + len(make_image(2, (64, 48))),
        len(make_image(0, (64, 48))),
    )
    assert delete(server, f"/images/{shas[1]}").status_code == 409
    forced = delete(server, f"/images/{shas[1]}?force=true").json()
    assert forced == {"images": 1, "bytes": size, "novelties": 1}
    assert server.get(f"/novelties/{shas[1]}").status_code == 404
    removed = delete(server, "/images?older_than_days=30&confirm=true").json()
    assert removed == {"images": 1, "bytes": len(make_image(2, (64, 48))), "novelties": 1}
    assert server.get(f"/novelties/{shas[2]}").status_code == 404
    assert server.get(f"/images/{shas[0]}").json()["stored"]
    # The version that has lost its memory is still named, and still answers.
    assert server.get(f"/images/{shas[1]}").json()["in_memory_of"] == [4]
    answer = server.post("/predict?version=4", content=make_image(9)).json()["predictions"][0]
    assert answer["version"] == 4


def test_an_image_that_is_only_a_novelty_can_be_removed(server: RunningServer) -> None:
    data = make_image(77, (40, 30))
    answer = server.post("/predict", content=data).json()["predictions"][0]
    server.post("/novelties", json={"prediction_ids": [answer["id"]]})
    sha = sha256_bytes(data)
    uses = server.get(f"/images/{sha}").json()
    assert (uses["stored"], uses["bytes"], uses["inbox"]) == (False, None, True)
    assert delete(server, f"/images/{sha}").json() == {"images": 0, "bytes": 0, "novelties": 1}
    assert server.get(f"/images/{sha}").status_code == 404
