"""Both Python clients against a server that is busy, slow, broken or absent."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
import tracemalloc
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import httpx2 as httpx
import pytest

from service.client import ApiError, Unreachable, calls
from service.wire.predictions import Failure, Prediction, Predictions
from service.wire.tasks import TaskAnswer
from tests.support.clients import call

EXAMPLE = json.dumps(Predictions.model_json_schema()["examples"][0]).encode()
NOW = datetime.now(UTC)
TASK = TaskAnswer(id="abc", state="queued", created=NOW, updated=NOW, submitted_by="ann", attempts=0, counts={})


@dataclass
class Received:
    """A request that the scripted server received, and when."""

    head: str
    body: bytes
    when: float

    def header(self, name: str) -> str | None:
        lines = (line.partition(":") for line in self.head.splitlines()[1:])
        return next((value.strip() for key, _, value in lines if key.lower() == name.lower()), None)


@dataclass
class ScriptedServer:
    """Answers each request with the next entry: bytes to send, or seconds to wait before closing the connection.

    Runs in a thread, so that the client under test may block.
    """

    script: list[bytes | float]
    keep_bodies: bool = True  # or their sha256
    received: list[Received] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._answer, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *details: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _close(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Cancelled at the end, or the client has closed the connection.
        with closing(writer), suppress(asyncio.CancelledError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            request = Received(head, b"", time.monotonic())
            size = int(request.header("content-length") or 0)
            request.body = await (reader.readexactly(size) if self.keep_bodies else _sha256(reader, size))
            self.received.append(request)
            step = self.script.pop(0)
            if isinstance(step, bytes):
                writer.write(step)
            else:
                await asyncio.sleep(step)

    @property
    def pauses(self) -> list[float]:
        times = [request.when for request in self.received]
        return [after - before for before, after in pairwise(times)]


async def _sha256(reader: asyncio.StreamReader, size: int) -> bytes:
    digest = hashlib.sha256()
    while size:
        chunk = await reader.read(min(size, 2**16))
        digest.update(chunk)
        size -= len(chunk)
    return digest.digest()


def response(status: int, body: bytes = EXAMPLE, *headers: str, kind: str = "application/json") -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", f"Content-Type: {kind}", "Connection: close"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def busy(status: int, *headers: str, code: str = "queue_full") -> bytes:
    problem = {"title": "Busy", "status": status, "code": code, "detail": "come back", "request_id": "r-1"}
    return response(status, json.dumps(problem).encode(), *headers, kind="application/problem+json")


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_after_its_retry_after(kind: str, status: int) -> None:
    with ScriptedServer([busy(status, "Retry-After: 1"), response(200)]) as server:
        assert call(kind, server.url, "predict", b"image").label == "apple"
    (pause,) = server.pauses
    assert pause >= 1.0
    assert [request.body for request in server.received] == [b"image", b"image"]


def test_without_a_retry_after_the_pauses_grow(kind: str) -> None:
    with ScriptedServer([busy(429), busy(503, "Retry-After: soon"), busy(429), response(200)]) as server:
        call(kind, server.url, "predict", b"image")
    assert len(server.pauses) == 3
    for pause, least in zip(server.pauses, (0.1, 0.2, 0.4), strict=True):
        assert pause >= least


def test_a_retry_after_beyond_the_timeout_is_an_error_at_once(kind: str) -> None:
    with ScriptedServer([busy(429, "Retry-After: 600")]) as server, pytest.raises(ApiError) as found:
        call(kind, server.url, "predict", b"image", timeout=500)
    error = found.value
    assert (error.status, error.code, error.detail, error.request_id) == (429, "queue_full", "come back", "r-1")
    assert len(server.received) == 1


def test_a_server_that_stays_busy_is_an_error_after_the_timeout(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ScriptedServer([busy(503, code="not_ready")] * 20)
    # By the clock of the client, each answer takes 20 seconds.
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: 20.0 * len(server.received)))
    with server, pytest.raises(ApiError) as found:
        call(kind, server.url, "predict", b"image", timeout=60)
    assert (found.value.status, found.value.code) == (503, "not_ready")
    assert len(server.received) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 415, 422, 500, 504])
def test_other_statuses_are_errors_without_a_second_attempt(kind: str, status: int) -> None:
    with ScriptedServer([busy(status, "Retry-After: 1", code="some_code")]) as server, pytest.raises(ApiError) as found:
        call(kind, server.url, "predict", b"image")
    assert (found.value.status, found.value.code) == (status, "some_code")
    assert len(server.received) == 1


BROKEN: dict[str, bytes | float] = {
    "closed without an answer": 0.0,
    "in the middle of the headers": b"HTTP/1.1 200 OK\r\nContent-",
    "in the middle of the body": response(200)[:-50],
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_request_is_repeated_after_a_broken_connection(kind: str, broken: bytes | float) -> None:
    with ScriptedServer([broken, broken, response(200)]) as server:
        assert call(kind, server.url, "predict", b"image").label == "apple"
    assert len(server.received) == 3


def test_a_repeated_form_is_sent_completely(kind: str) -> None:
    with ScriptedServer([busy(429), response(200)]) as server:
        answers = call(kind, server.url, "predict_many", [b"first image", b"second image", b"third image"])
    assert [type(answer) for answer in answers] == [Prediction, Prediction, Failure]
    for request in server.received:
        places = [request.body.index(image) for image in (b"first image", b"second image", b"third image")]
        assert places == sorted(places)


def test_a_repeated_file_is_sent_completely_and_in_chunks(kind: str, tmp_path: Path) -> None:
    zipped = tmp_path / "batch.zip"
    zipped.write_bytes(bytes(range(256)) * (64 * 2**12))  # 64 MiB
    tracemalloc.start()
    try:
        with ScriptedServer([busy(429), response(202, TASK.model_dump_json().encode())], keep_bodies=False) as server:
            assert call(kind, server.url, "teach_zip", zipped) == TASK
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()
    whole = hashlib.sha256(zipped.read_bytes()).digest()
    assert [request.body for request in server.received] == [whole, whole]
    assert {request.header("content-length") for request in server.received} == {str(64 * 2**20)}


def test_without_a_server_the_error_is_unreachable(kind: str) -> None:
    with ScriptedServer([]) as server:
        gone = server.url
    with pytest.raises(Unreachable, match="is the server running"):
        call(kind, gone, "predict", b"image", timeout=0.7)


@pytest.mark.parametrize("timeouts", [{"client_timeout": 0.5}, {"timeout": 0.5, "client_timeout": 60.0}])
def test_a_server_that_never_answers_is_unreachable_after_the_timeout(kind: str, timeouts: dict[str, float]) -> None:
    with ScriptedServer([30.0] * 5) as server:
        started = time.monotonic()
        with pytest.raises(Unreachable):
            call(kind, server.url, "predict", b"image", **timeouts)
        assert 0.4 < time.monotonic() - started < 20


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(calls, "time", clock)
    monkeypatch.setattr(calls, "random", SimpleNamespace(uniform=lambda least, most: most))
    return clock


def test_all_attempts_together_take_no_longer_than_the_timeout(clock: Clock) -> None:
    attempts = calls.versions(timeout=1.0).attempts()
    assert next(attempts) == (0.0, 1.0)
    clock.now += 0.5
    assert attempts.send(httpx.ConnectError("refused")) == pytest.approx((0.125, 0.375))
    clock.now += 0.25
    with pytest.raises(Unreachable):  # the next pause, 0.25 seconds, would end after the timeout
        attempts.send(httpx.ConnectError("refused"))


def test_pauses_double_up_to_five_seconds_or_last_as_the_server_asks(clock: Clock) -> None:
    attempts = calls.versions(timeout=1000).attempts()
    next(attempts)
    pauses = [attempts.send(httpx.Response(503))[0] for _ in range(8)]
    assert pauses == pytest.approx([1.25 * pause for pause in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0)])
    assert attempts.send(httpx.Response(429, headers={"Retry-After": "20"}))[0] == pytest.approx(25)


@pytest.mark.parametrize("status", [200, 302, 502])
def test_a_page_of_a_proxy_is_an_api_error(kind: str, status: int) -> None:
    page = b"<html><title>Log in to the network of the hotel</title></html>"
    answer = response(status, page, "Location: http://127.0.0.1:9/", kind="text/html")
    with ScriptedServer([answer]) as server, pytest.raises(ApiError) as found:
        call(kind, server.url, "predict", b"image")
    assert (found.value.status, found.value.code, found.value.request_id) == (status, "unknown", None)
    assert "Log in" in found.value.detail


def test_key_version_and_timeout_are_sent_with_the_request(kind: str) -> None:
    with ScriptedServer([response(200), response(200)]) as server:
        call(kind, server.url, "predict", b"image", key="my-secret", version=7, timeout=2.5)
        call(kind, server.url, "predict", b"image", key=None)
    first, second = server.received
    assert first.head.startswith("POST /predict?version=7 HTTP/1.1")
    assert (first.header("Authorization"), first.header("X-Request-Timeout")) == ("Bearer my-secret", "2.5")
    assert second.head.startswith("POST /predict HTTP/1.1")
    assert (second.header("Authorization"), second.header("X-Request-Timeout")) == (None, "30")
