"""A server follows the erasures of other servers, also through an outage of the object store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from models.errors import StoreError
from models.files import sha256_bytes
from models.storage import DataFolder, Storage, StoreUnavailable
from service import erasure
from service.erasure import Erased, Erasure
from tasks.images import ErasureFollower, ImageStore, record_erasure
from tests.support.object_stores import memory_storage


class FollowingServer(Erasure):
    """A server without copies; the first calls of `erase` fail with the given errors."""

    def __init__(self, storage: Storage, errors: list[Exception]) -> None:
        nothing: Any = None
        novelties: Any = SimpleNamespace(images=ImageStore(storage, "novelties/"))
        super().__init__(storage, nothing, nothing, novelties, nothing, 60)
        self._errors, self.calls = errors, list[set[str]]()
        self.erased = asyncio.Event()

    async def erase(self, sha256s: Collection[str]) -> Erased:
        self.calls.append(set(sha256s))
        if self._errors:
            raise self._errors.pop(0)
        self.erased.set()
        return Erased(0, 0)

    async def follow_until(self, sha256: str, is_erased: Callable[[], bool]) -> None:
        """Follow an erasure that is logged after the follower has read the end of the log."""
        loop, made = asyncio.get_running_loop(), asyncio.Event()

        def make_follower(folder: DataFolder) -> ErasureFollower:
            follower = ErasureFollower(folder)
            loop.call_soon_threadsafe(made.set)
            return follower

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(erasure, "ErasureFollower", make_follower)
            async with asyncio.timeout(60):
                task = asyncio.create_task(self.follow())
                await made.wait()
                record_erasure(self._storage, [sha256], "another server")
                await self.erased.wait()
                while not is_erased():
                    await asyncio.sleep(0.01)
        task.cancel()


class WatchedLock(asyncio.Lock):
    """`awaited` is set when a task waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited = asyncio.Event()

    async def acquire(self) -> Literal[True]:
        if self.locked():
            self.awaited.set()
        return await super().acquire()


def caused(error: OSError) -> StoreError:
    found = StoreError("the log cannot be read")
    found.__cause__ = error
    return found


@pytest.mark.parametrize(
    "error",
    [
        StoreUnavailable("does not answer"),
        caused(StoreUnavailable("does not answer")),
        PermissionError("credentials have expired"),
    ],
)
def test_an_erasure_is_repeated_until_the_object_store_answers(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "FOLLOW_SECONDS", 0.01)
    storage = memory_storage(tmp_path)
    data, images = b"a face", ImageStore(storage)
    sha256 = images.put(data)
    assert images.read(sha256) == data  # a local copy is kept now

    def copies() -> list[Path]:
        return [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]

    assert copies()
    storage._client.delete(images._key(sha256))  # by the other server

    async def follow() -> list[set[str]]:
        server = FollowingServer(storage, [error, error])
        await server.follow_until(sha256, lambda: not copies())
        return server.calls

    assert asyncio.run(follow()) == [{sha256}] * 3
    assert sha256 == sha256_bytes(data)
    assert copies() == []


def test_an_erasure_waits_while_a_request_counts_the_copies_that_it_erases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "FOLLOW_SECONDS", 0.01)

    async def follow() -> tuple[int, int]:
        server = FollowingServer(memory_storage(tmp_path), [])
        server.counting = lock = WatchedLock()
        async with lock, asyncio.timeout(60):
            following = asyncio.create_task(server.follow_until("0" * 64, lambda: True))
            ends = [asyncio.create_task(event.wait()) for event in (lock.awaited, server.erased)]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            during = len(server.calls)
        await following
        return during, len(server.calls)

    assert asyncio.run(follow()) == (0, 1)
