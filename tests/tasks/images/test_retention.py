"""Stored images: what refers to them, and their removal by key and by age."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import pytest

from models.errors import CorruptVersion, StoreError
from models.versions.store import VersionStore
from tasks.errors import QueueUnavailable
from tasks.images import ImageStore, Retention
from tasks.images.retention import UnfinishedImages
from tests.support.images import make_image
from tests.support.manifests import make_manifest
from trainer.learning.memory import HeldOut, Samples

DAY = 86400.0


class Folder:
    """A data folder with ten images. Version 1 replays 0 and 1 and holds out 2, version 2 replays 1 and 3."""

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

    def retention(self, unfinished_images: UnfinishedImages = dict) -> Retention:
        return Retention(self.store, unfinished_images)

    @property
    def there(self) -> set[int]:
        return {n for n, sha in enumerate(self.shas) if sha in self.images}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


# References


def test_references_name_versions_and_unfinished_tasks(folder: Folder) -> None:
    retention = folder.retention(lambda: {"task-a": {folder.shas[3]}, "task-b": [folder.shas[4]]})
    found = [retention.references(sha) for sha in folder.shas]
    assert [references.replayed_by for references in found[:5]] == [(1,), (1, 2), (), (2,), ()]
    assert [references.held_out_by for references in found[:5]] == [(), (), (1,), (), ()]
    assert [references.tasks for references in found[:5]] == [(), (), (), ("task-a",), ("task-b",)]
    assert [references.in_current for references in found[:5]] == [False, True, False, True, False]
    assert [len(references.dependents) for references in found] == [1, 2, 1, 2, 1, 0, 0, 0, 0, 0]
    stored = found[5].stored
    assert stored is not None
    assert stored.bytes == len(make_image(5))
    assert time.time() - stored.time < 60
    assert retention.references("0" * 64).stored is None


def test_a_removed_image_is_gone_and_others_are_not(folder: Folder) -> None:
    removed = folder.retention().remove(folder.shas[5], "operator")
    assert [(image.sha256, image.bytes) for image in removed] == [(folder.shas[5], len(make_image(5)))]
    assert folder.there == set(range(10)) - {5}
    assert folder.retention().remove(folder.shas[5], "operator") == []


@pytest.mark.parametrize("sha", ["", "../../CURRENT", "A" * 64, "0" * 63])
def test_a_key_that_is_not_a_hash_never_becomes_a_path(folder: Folder, sha: str) -> None:
    with pytest.raises(StoreError, match="not the sha256"):
        folder.retention().remove(sha, "operator")


# By age


def test_only_old_images_that_are_not_needed_now_are_removed(folder: Folder) -> None:
    for number in range(8):
        folder.age(number, days=100)
    folder.age(8, days=29)
    retention = folder.retention(lambda: {"task-a": [folder.shas[4]]})
    expired = retention.expired(30)
    # Only version 1 needs 0 and 2, and it is not current: it keeps answering without them.
    assert {one.sha256 for one in expired.removable} == {folder.shas[n] for n in (0, 2, 5, 6, 7)}
    assert sum(one.bytes for one in expired.removable) == sum(len(make_image(n)) for n in (0, 2, 5, 6, 7))
    assert {one.sha256 for one in expired.needed} == {folder.shas[n] for n in (1, 3, 4)}
    assert sum(one.bytes for one in expired.needed) == sum(len(make_image(n)) for n in (1, 3, 4))
    assert folder.there == set(range(10))
    removed = retention.remove_expired(30, "operator")
    assert set(removed) == set(expired.removable)
    assert folder.there == {1, 3, 4, 8, 9}
    assert retention.remove_expired(30, "operator") == []


def test_a_resubmitted_image_is_not_expired(folder: Folder) -> None:
    folder.age(5, days=100)
    assert folder.images.put(make_image(5)) == folder.shas[5]
    assert folder.retention().expired(30).removable == ()


def test_before_the_first_version_only_age_and_tasks_count(tmp_path: Path) -> None:
    retention = Retention(VersionStore(tmp_path))
    assert retention.expired(30).removable == ()
    sha = ImageStore(tmp_path).put(make_image(1))
    os.utime(tmp_path / "images" / sha[:2] / sha, (0, 0))
    assert Retention(VersionStore(tmp_path), lambda: {"t": [sha]}).expired(30).needed[0].sha256 == sha
    assert [one.sha256 for one in retention.expired(30).removable] == [sha]


def unreachable() -> Mapping[str, Collection[str]]:
    raise QueueUnavailable("Redis cannot be reached")


def test_nothing_is_removed_when_the_queue_is_unreachable(folder: Folder) -> None:
    folder.age(5, days=100)
    for ask in (lambda r: r.remove_expired(30, "operator"), lambda r: r.references(folder.shas[5])):
        with pytest.raises(QueueUnavailable):
            ask(folder.retention(unreachable))
    assert folder.there == set(range(10))


@pytest.mark.parametrize("damage", ["changed", "missing", "CURRENT"])
def test_nothing_is_removed_when_the_current_version_is_damaged(folder: Folder, damage: str) -> None:
    folder.age(5, days=100)
    samples = folder.store.content_path(2, "samples")
    if damage == "changed":
        samples.write_bytes(folder.store.content_path(1, "samples").read_bytes())
    elif damage == "missing":
        samples.unlink()
    else:
        (folder.root / "CURRENT").write_text("two")
    with pytest.raises(CorruptVersion):
        folder.retention().remove_expired(30, "operator")
    assert folder.there == set(range(10))


def test_a_version_with_damaged_samples_counts_as_a_reference(folder: Folder) -> None:
    samples = folder.store.content_path(1, "samples")
    samples.write_bytes(samples.read_bytes()[:-20])
    assert folder.retention().references(folder.shas[0]).replayed_by == (1,)
