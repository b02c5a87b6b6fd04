"""Erasing all copies of images that a server has, also while Redis or the disk fails."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.errors import StoreError
from models.storage import storage_of
from service import erasure
from service.erasure import Erased, Erasure, clean_up
from service.routes.tasks import _store_again
from tasks.errors import QueueUnavailable
from tasks.images import ImageStore, record_erasure
from tests.support.batches import check_batch
from tests.support.images import make_image
from tests.support.object_stores import memory_storage

SHA256 = "0" * 64


class Copies:
    """Recorder, inbox and thumbnails of a server; `recent` fails if there is an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.erased = error, list[str]()

    def part(self, name: str, **calls: Any) -> Any:
        return SimpleNamespace(**{call: lambda *_, n=name: self.erased.append(n) or 1 for call in calls["calls"]})

    async def recent(self, sha256s: Collection[str]) -> int:
        if self.error is not None:
            raise self.error
        return 2

    def erasure(self, data: Path) -> Erasure:
        recorder = self.part("recorder", calls=["erase", "discard"])
        inbox, thumbnails = self.part("inbox", calls=["erase"]), self.part("thumbnails", calls=["remove"])
        recent: Any = SimpleNamespace(erase=self.recent)
        return Erasure(storage_of(data), recorder, recent, inbox, thumbnails, 60)


def test_all_copies_are_erased_and_counted(tmp_path: Path) -> None:
    assert asyncio.run(Copies().erasure(tmp_path).erase([SHA256])) == Erased(novelties=1, recent=2)


def test_copies_of_this_server_are_erased_although_redis_does_not_answer(tmp_path: Path) -> None:
    copies = Copies(QueueUnavailable("Redis is away"))
    with pytest.raises(QueueUnavailable):
        asyncio.run(copies.erasure(tmp_path).erase([SHA256]))
    assert {"inbox", "thumbnails"} <= set(copies.erased)


def test_an_erasure_that_failed_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasure, "FOLLOW_SECONDS", 0.01)
    copies = Copies()
    following, attempts, done = copies.erasure(tmp_path), list[set[str]](), asyncio.Event()

    async def erase(sha256s: Collection[str]) -> Erased:
        attempts.append(set(sha256s))
        if len(attempts) == 1:
            raise StoreError("the disk is full")
        done.set()
        return Erased(0, 0)

    async def follow() -> None:
        monkeypatch.setattr(following, "erase", erase)
        task = asyncio.create_task(following.follow())
        while not done.is_set():  # the follower reads what is logged after its start
            await asyncio.to_thread(record_erasure, tmp_path, [SHA256], "a test")
            await asyncio.sleep(0.05)
        task.cancel()

    asyncio.run(asyncio.wait_for(follow(), 30))
    assert attempts[:2] == [{SHA256}, {SHA256}]


def test_a_start_completes_interrupted_erasures_but_keeps_images_that_were_submitted_again(tmp_path: Path) -> None:
    images = ImageStore(tmp_path)
    before, after = (images.put(make_image(n, (20, 20))) for n in (1, 2))
    for sha256, seconds in ((before, -60), (after, 60)):
        when = time.time() + seconds
        os.utime(tmp_path / "images" / sha256[:2] / sha256, (when, when))
    record_erasure(tmp_path, [before, after], "a test")
    clean_up(storage_of(tmp_path))
    assert [image.sha256 for image in images] == [after]


def test_the_clock_of_an_object_store_may_be_behind(tmp_path: Path) -> None:
    storage = memory_storage(tmp_path)
    sha256 = ImageStore(storage).put(b"submitted again in the second of its erasure")
    record_erasure(storage, [sha256], "a test")
    clean_up(storage)
    assert sha256 in ImageStore(storage)


def test_a_queued_task_gets_images_back_that_the_end_of_another_one_has_discarded(tmp_path: Path) -> None:
    batch = check_batch([("plum", f"{n}.jpg", make_image(n, (40, 30))) for n in range(3)])
    images = ImageStore(tmp_path)
    images.put_all(batch.read(image.sha256) for image in batch.images)
    gone = batch.images[0].sha256
    images.remove(gone)
    container: Any = SimpleNamespace(images=images)
    _store_again(container, batch)
    assert {image.sha256 for image in images} == {image.sha256 for image in batch.images}
