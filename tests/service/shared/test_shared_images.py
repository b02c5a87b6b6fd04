"""The images of the shared inbox: kept while a row refers to them, removed and erased with their novelties."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from service.shared import Lease, SharedInbox
from service.shared import inbox as shared_inbox
from tests.support.inbox import sighting
from tests.support.novelties import block_image
from tests.support.shared_inboxes import NewServer, Server


@contextmanager
def owned(server: Server, token: str = "token") -> Iterator[SharedInbox]:
    """The inbox of a server that owns it, without its thread."""
    lease = Lease(token, server.name)
    server.state.client.delete(f"{server.state.prefix}:inbox-owner")
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
