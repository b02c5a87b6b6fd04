"""A server learns from the data folder what that keeps, also if the record cannot be read at first."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from models.storage import Storage, StoreUnavailable
from models.versions.keep import RECORD, Keep, recorded_keep
from service import container as module
from service.container import Container
from tests.support.object_stores import memory_storage


def test_a_record_that_cannot_be_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, used = memory_storage(tmp_path), list[Keep]()
    storage.put(RECORD, b"features\n")
    errors = [StoreUnavailable("does not answer")]

    def read(folder: Storage) -> Keep:
        if errors:
            raise errors.pop()
        return recorded_keep(folder)

    monkeypatch.setattr(module, "recorded_keep", read)
    server = SimpleNamespace(
        storage=storage,
        keep="images",
        settings=SimpleNamespace(poll_seconds=0.01),
        active_version=SimpleNamespace(model=SimpleNamespace(version=1)),
        novelties=SimpleNamespace(use_keep=used.append),
        recent=SimpleNamespace(rewrite=False),
    )
    asyncio.run(asyncio.wait_for(Container._follow_keep(cast(Any, server)), 20))
    assert (server.keep, used, server.recent.rewrite) == ("features", ["features"], True)
