"""A server follows the erasures of other servers, also through an outage of the object store."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from models.errors import StoreError
from models.files import sha256_bytes
from models.storage import Storage, StoreUnavailable
from service import container as module
from service.container import Container
from tasks.images import ImageStore, record_erasure
from tests.support.object_stores import memory_storage


class FollowingServer:
    """What `Container._follow_erasures` uses; the first calls of `erase_images` fail with the given errors."""

    def __init__(self, storage: Storage, errors: list[Exception]) -> None:
        self.storage, self._errors = storage, errors
        self.novelties = SimpleNamespace(images=ImageStore(storage, "novelties/"))
        self.calls: list[set[str]] = []
        self.erased = asyncio.Event()

    async def erase_images(self, sha256s: Collection[str]) -> None:
        self.calls.append(set(sha256s))
        if self._errors:
            raise self._errors.pop(0)
        self.erased.set()

    async def follow_until_erased(self, sha256: str) -> None:
        task = asyncio.create_task(Container._follow_erasures(cast(Any, self)))
        await asyncio.sleep(0.1)  # it has read the end of the log
        record_erasure(self.storage, [sha256], "another server")
        await asyncio.wait_for(self.erased.wait(), 20)
        await asyncio.sleep(0.1)  # local copies follow
        task.cancel()


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
    monkeypatch.setattr(module, "ERASURE_SECONDS", 0.01)
    storage = memory_storage(tmp_path)
    data, images = b"a face", ImageStore(storage)
    sha256 = images.put(data)
    assert images.read(sha256) == data  # a local copy is kept now
    copies = tmp_path / "objects"
    assert [path for path in copies.rglob("*") if path.is_file()]
    storage._client.delete(images._key(sha256))  # by the other server

    async def follow() -> list[set[str]]:
        server = FollowingServer(storage, [error, error])
        await server.follow_until_erased(sha256)
        return server.calls

    assert asyncio.run(follow()) == [{sha256}] * 3
    assert sha256 == sha256_bytes(data)
    assert [path for path in copies.rglob("*") if path.is_file()] == []
