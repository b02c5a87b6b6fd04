"""Batches that arrive slowly, or too many of them, delay no other batch."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.learning_loop import Loop, batch, loop
from tests.support.stalled import answer_of, stalled_request

ANN, BOB = "ann-secret-0123456789", "bob-secret-0123456789"
KEYS = f"ann:predict+label:{ANN},bob:predict+label:{BOB}"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    with loop(tmp_path_factory.mktemp("slow")) as started:
        started.start("serve")
        yield started


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    """Four uploads at once, of which a key may have two. A body may pause for two seconds, and one more per byte."""
    settings = {"keys": KEYS, "uploads": "4", "key_share": "0.5", "body_grace": "2", "min_body_rate": "1"}
    with loop(tmp_path_factory.mktemp("limited"), **settings) as started:
        started.start("serve")
        yield started


def stalled_upload(url: str, key: str = "", **more: Any) -> AbstractContextManager[socket.socket]:
    """A POST /tasks that has sent a part of its body."""
    return stalled_request(url, "POST", "/tasks", key=key, **{"kind": "application/zip", **more})


def submit(running: Loop, name: str, key: str = "") -> httpx.Response | None:
    """Submit a small batch; None if there is no answer within some seconds."""
    headers = {"X-API-Key": key}
    try:
        return httpx.post(f"{running.url}/tasks", files=batch(name), headers=headers, timeout=30)
    except httpx.TimeoutException:
        return None


def test_stalled_uploads_do_not_stop_teaching(running: Loop) -> None:
    with ExitStack() as stack:
        for kind in ("application/zip", "multipart/form-data; boundary=b", "application/json"):
            stack.enter_context(stalled_upload(running.url, kind=kind))
        response = submit(running, "plum")
        assert response is not None
        assert response.status_code == 202


def test_a_key_with_too_many_uploads_gets_429_and_another_key_is_served(limited: Loop) -> None:
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(stalled_upload(limited.url, ANN))
        refused, other = submit(limited, "plum", ANN), submit(limited, "plum", BOB)
        assert refused is not None
        assert (refused.status_code, refused.json()["code"]) == (429, "key_busy")
        assert int(refused.headers["retry-after"]) >= 1
        assert other is not None
        assert other.status_code == 202


def test_more_uploads_than_the_limit_get_429(limited: Loop) -> None:
    with ExitStack() as stack:
        for key in (ANN, ANN, BOB, BOB):
            stack.enter_context(stalled_upload(limited.url, key))
        refused = submit(limited, "fig", ANN)
        assert refused is not None
        assert (refused.status_code, refused.json()["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1


def test_a_body_that_stalls_is_refused_and_releases_its_permit(limited: Loop) -> None:
    with (
        stalled_upload(limited.url, ANN, sent=b"abc") as first,
        stalled_upload(limited.url, ANN, sent=b"abc") as second,
    ):
        assert answer_of(first) == answer_of(second) == (408, "body_too_slow")
        accepted = submit(limited, "cherry", ANN)
        assert accepted is not None
        assert accepted.status_code == 202
