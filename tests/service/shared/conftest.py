"""Servers that share an inbox, and look at it often."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from service.inbox import InboxLimits
from service.shared import RedisState, inbox_owner
from service.shared import inbox as shared_inbox
from tasks.images import ImageStore
from tests.support.redis_servers import PREFIX, RedisServer
from tests.support.shared_inboxes import SECONDS, NewServer, Server


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_inbox, "LEASE_SECONDS", SECONDS)
    monkeypatch.setattr(inbox_owner, "POLL_SECONDS", 0.1)


@pytest.fixture
def new_server(redis_server: RedisServer, redis_state: RedisState, tmp_path: Path) -> Iterator[NewServer]:
    names = (f"http://server-{number}" for number in itertools.count(1))
    with ExitStack() as stack:

        def new(*, start: bool = True, **limits: float) -> Server:
            state = stack.enter_context(closing(RedisState(redis_server.url, PREFIX)))
            server = Server(state, ImageStore(tmp_path / "novelties"), next(names), InboxLimits(**limits))  # type: ignore[arg-type]
            if start:
                server.owner.start()
                stack.callback(server.owner.stop)
            return server

        yield new
