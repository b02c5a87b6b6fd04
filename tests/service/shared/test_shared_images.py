"""The images of the shared inbox: kept while a row refers to them, removed and erased with their novelties."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr

from service.container import Container
from service.errors import InboxMoved
from service.settings import ServiceSettings
from service.shared import Lease, RedisState, SharedInbox, inbox_owner
from service.shared import inbox as shared_inbox
from tests.support.inbox import sighting
from tests.support.novelties import block_image
from tests.support.redis_servers import RedisServer
from tests.support.shared_inboxes import NewServer, Server
from tests.support.waiting import wait_until


@contextmanager
def owned(server: Server, token: str = "token") -> Iterator[SharedInbox]:
    """The inbox of a server that owns it, without its thread."""
    lease = Lease(token, server.name)
    server.expire_lease()
    server.state.run("inbox_lease", *lease.arguments)
    with closing(server.open(lease)) as inbox:
        yield inbox


def add(inbox: SharedInbox, number: int) -> str:
    id = inbox.add(sighting(block_image(number)), requested=True).id
    assert id is not None
    return id


def stored(server: Server) -> set[str]:
    return {image.sha256 for image in server.images}


@pytest.mark.parametrize("ends", ["closed", "lost"])
def test_an_inbox_that_ends_while_images_are_compared_removes_none(
    new_server: NewServer, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    server = new_server(start=False)
    with owned(server) as inbox:
        id = add(inbox, 1)
        monkeypatch.setattr(shared_inbox, "ORPHAN_SECONDS", -1.0)
        orphan = server.images.put(block_image(2))

        def waiting() -> set[str]:
            inbox.close() if ends == "closed" else setattr(inbox, "lost", True)
            return set()

        inbox._is_new = False
        inbox.match_images(waiting)
    assert stored(server) == {id, orphan}


def test_images_whose_erasure_was_interrupted_are_neither_kept_nor_adopted(
    new_server: NewServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_inbox, "ADOPT_SECONDS", -1.0)
    server = new_server(start=False)
    with owned(server) as inbox:
        applied, later = add(inbox, 1), add(inbox, 2)
        orphan = server.images.put(block_image(3))
        server.erased_at |= {applied: time.time() + 1, orphan: time.time() + 1, later: time.time() - 3600}
        inbox.match_images(set)
        assert inbox.get(applied) is None
        assert inbox.get(later) is not None, "it was seen after the erasure"
    assert stored(server) == {later}


def test_an_erasure_removes_an_image_whose_record_waits(
    redis_server: RedisServer, redis_state: RedisState, tmp_path: Path
) -> None:
    settings = ServiceSettings(data=tmp_path, redis_url=SecretStr(redis_server.url), shared=("recent", "inbox"))

    async def erase() -> None:
        container = Container(settings)
        try:
            id = container.novelties.images.put(block_image(1))
            other = container.novelties.images.put(block_image(2))
            await container.erasure.erase([id])
            assert container.novelties.images.find(id) is None
            assert container.novelties.images.find(other) is not None
        finally:
            await container.stop()

    asyncio.run(erase())


def test_the_next_owner_adopts_what_a_killed_one_did_not(
    new_server: NewServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a Redis that has lost its rows."""
    monkeypatch.setattr(shared_inbox, "ADOPT_SECONDS", -1.0)
    server = new_server(start=False)
    ids = {server.images.put(block_image(number)) for number in (1, 2, 3)}
    adopt = SharedInbox._adopt_image

    def adopt_one_and_die(self: SharedInbox, id: str) -> None:
        adopt(self, id)
        raise KeyboardInterrupt

    with owned(server, "first") as inbox, monkeypatch.context() as patch:
        patch.setattr(SharedInbox, "_adopt_image", adopt_one_and_die)
        with pytest.raises(KeyboardInterrupt):
            inbox.match_images(set)
    monkeypatch.setattr(shared_inbox, "ORPHAN_SECONDS", -1.0)
    with owned(server, "second") as inbox:
        inbox.match_images(set)
        assert {id for id in ids if inbox.get(id) is not None} == ids
    assert stored(server) == ids


def test_a_former_owner_removes_no_image_of_the_next_owner(new_server: NewServer) -> None:
    first, second = new_server(start=False), new_server(start=False)
    with owned(first, "first") as former:
        id = add(former, 1)
        with owned(second, "second") as inbox:
            with pytest.raises(InboxMoved):
                former.delete([id])
            assert inbox.read_image(id) == block_image(1)
            inbox.delete([id])
            assert stored(second) == set()


def test_the_owner_removes_images_without_a_row_while_it_runs(
    new_server: NewServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_owner, "MATCH_SECONDS", 0.2)
    server = new_server()
    wait_until(lambda: server.inbox is not None and not server.inbox._is_new)
    monkeypatch.setattr(shared_inbox, "ORPHAN_SECONDS", -1.0)
    server.images.put(block_image(1))
    wait_until(lambda: stored(server) == set())
