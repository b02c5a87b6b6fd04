"""The Python client, for programs and for asyncio: against the real server, and against one that behaves badly."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import pytest

from service.client import ApiError, AsyncClient, Client, ClientError, Unreachable
from service.wire.predictions import Failure, Prediction, Predictions
from tests.support.servers import (
    RunningServer,
    known_image,
    learned_folder,
    novel_image,
    running_server,
    wait_until,
)

KEY = "a-secret-of-the-tests-0123456789"
EXAMPLE = json.dumps(Predictions.model_json_schema()["examples"][0]).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = learned_folder(tmp_path_factory.mktemp("client") / "robot")
    with running_server(data, threads=1, keys=f"robot:predict+operate:{KEY}") as running:
        yield running


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def call(kind: str, url: str, method: str, *arguments: Any, **named: Any) -> Any:
    """One call of one client or the other; `key` and `client_timeout` are the client's own."""
    own = (url, named.pop("key", KEY), named.pop("client_timeout", 30.0))
    if kind == "sync":
        with Client(*own) as client:
            return getattr(client, method)(*arguments, **named)

    async def with_asyncio() -> Any:
        async with AsyncClient(*own) as client:
            return await getattr(client, method)(*arguments, **named)

    return asyncio.run(with_asyncio())


# The real server


def test_an_image_is_named_whether_it_comes_as_bytes_or_as_a_path(
    server: RunningServer, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(known_image("class 1"))
    for image in (known_image("class 1"), path):
        answer = call(kind, server.url, "predict", image)
        assert isinstance(answer, Prediction)
        assert (answer.label, answer.novel, answer.version) == ("class 1", False, 3)
        assert answer.nearest[0].label == "class 1"


def test_a_stranger_is_novel(server: RunningServer, kind: str) -> None:
    answer = call(kind, server.url, "predict", novel_image(1))
    assert (answer.novel, answer.label) == (True, None)


def test_among_many_a_bad_image_has_a_failure_in_its_place(server: RunningServer, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(known_image("class 2"))
    images = [known_image("class 0"), b"no image", path, known_image("class 4")[:60], novel_image(2), b""]
    answers = call(kind, server.url, "predict_many", images)
    told = [answer.error.code if isinstance(answer, Failure) else answer.label for answer in answers]
    assert told == ["class 0", "unsupported_image", "class 2", "broken_image", None, "unsupported_image"]
    assert all(answer.error.detail for answer in answers if isinstance(answer, Failure))


def test_a_pinned_version_answers(server: RunningServer, kind: str) -> None:
    assert call(kind, server.url, "predict", known_image("class 4")).label == "class 4"
    pinned = call(kind, server.url, "predict", known_image("class 4"), version=1)
    assert (pinned.version, pinned.novel) == (1, True)  # it had not learned that class yet
    many = call(kind, server.url, "predict_many", [known_image("class 0"), known_image("class 2")], version=2)
    assert [answer.version for answer in many] == [2, 2]


def test_an_error_carries_status_code_detail_and_request_id(server: RunningServer, kind: str) -> None:
    with pytest.raises(ApiError) as found:
        call(kind, server.url, "predict", known_image("class 0"), version=99)
    error = found.value
    assert (error.status, error.code) == (404, "not_found")
    assert "99" in error.detail
    assert error.detail in str(error)
    assert "404 not_found" in str(error)
    # The line is written after the answer is sent.
    wait_until(lambda: error.request_id in {line.get("request_id") for line in server.log_lines()})
    assert isinstance(error, ClientError)


@pytest.mark.parametrize(
    ("image", "status", "code"),
    [
        (b"text", 415, "unsupported_image"),
        (b"", 415, "unsupported_image"),
        (known_image("class 0")[:50], 422, "broken_image"),
    ],
)
def test_a_single_bad_image_is_an_error(server: RunningServer, kind: str, image: bytes, status: int, code: str) -> None:
    with pytest.raises(ApiError) as found:
        call(kind, server.url, "predict", image)
    assert (found.value.status, found.value.code) == (status, code)


def test_too_many_images_are_an_error_that_is_not_tried_again(server: RunningServer, kind: str) -> None:
    before = server.metric("openworld_requests_total", route="/predict", code="413")
    with pytest.raises(ApiError) as found:
        call(kind, server.url, "predict_many", [known_image("class 0")] * 65)
    assert (found.value.status, found.value.code) == (413, "body_too_large")
    assert server.metric("openworld_requests_total", route="/predict", code="413") == before + 1


def test_without_its_key_a_client_is_told_so(server: RunningServer, kind: str) -> None:
    for key in (None, "another-secret-0123456789"):
        with pytest.raises(ApiError) as found:
            call(kind, server.url, "predict", known_image("class 0"), key=key)
        assert (found.value.status, found.value.code) == (401, "unauthorized")
        assert "another-secret" not in str(found.value)


def test_versions_are_listed_and_activated(server: RunningServer, kind: str) -> None:
    try:
        assert [one.version for one in call(kind, server.url, "versions").versions] == [1, 2, 3]
        rolled_back = call(kind, server.url, "activate", 2, "a test of the client")
        assert (rolled_back.serving, rolled_back.history[-1].version) == (2, 2)
        assert "a test of the client" in rolled_back.history[-1].reason
        assert call(kind, server.url, "predict", known_image("class 0")).version == 2
    finally:
        assert call(kind, server.url, "activate", 3).serving == 3


def test_a_file_that_is_not_there_is_said_before_anything_is_sent(kind: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        call(kind, "http://127.0.0.1:9", "predict", tmp_path / "nothing.jpg")


PICTURES = [known_image(f"class {number % 5}", 200 + number) for number in range(40)]


@pytest.fixture(scope="module")
def labels(server: RunningServer) -> list[str | None]:
    """Of the pictures above, asked for one after the other."""
    with Client(server.url, KEY) as client:
        return [client.predict(picture).label for picture in PICTURES]


def test_several_threads_share_one_client(server: RunningServer, labels: list[str | None]) -> None:
    assert len(set(labels)) >= 5
    with Client(server.url, KEY) as client, ThreadPoolExecutor(8) as pool:
        assert [answer.label for answer in pool.map(client.predict, PICTURES)] == labels


def test_several_tasks_share_one_async_client(server: RunningServer, labels: list[str | None]) -> None:
    async def all_at_once() -> list[Prediction]:
        async with AsyncClient(server.url, KEY) as client:
            return await asyncio.gather(*map(client.predict, PICTURES))

    assert [answer.label for answer in asyncio.run(all_at_once())] == labels


# A server that behaves badly


@dataclass
class Received:
    """A request that the scripted server got, and when."""

    head: str
    body: bytes
    when: float

    def header(self, name: str) -> str | None:
        lines = (line.partition(":") for line in self.head.splitlines()[1:])
        return next((value.strip() for key, _, value in lines if key.lower() == name.lower()), None)


@dataclass
class Scripted:
    """Answers one request after the other with the next entry: bytes as they are, or seconds to wait and then hang up.

    Runs in a thread, so that the client under test may block.
    """

    script: list[bytes | float]
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
        # Cancelled at the end, or left alone by a client that has given up: neither is of interest here.
        with closing(writer), suppress(asyncio.CancelledError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            request = Received(head, b"", time.monotonic())
            request.body = await reader.readexactly(int(request.header("content-length") or 0))
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


def response(status: int, body: bytes = EXAMPLE, *headers: str, kind: str = "application/json") -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", f"Content-Type: {kind}", "Connection: close"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def busy(status: int, *headers: str, code: str = "queue_full") -> bytes:
    problem = {"title": "Busy", "status": status, "code": code, "detail": "come back", "request_id": "r-1"}
    return response(status, json.dumps(problem).encode(), *headers, kind="application/problem+json")


@pytest.mark.parametrize("status", [429, 503])
def test_it_waits_as_long_as_the_server_says_and_tries_again(kind: str, status: int) -> None:
    with Scripted([busy(status, "Retry-After: 1"), response(200)]) as server:
        assert call(kind, server.url, "predict", b"image").label == "apple"
    (pause,) = server.pauses
    assert 1.0 <= pause < 2.5
    assert [request.body for request in server.received] == [b"image", b"image"]


def test_it_waits_longer_and_longer_when_the_server_does_not_say(kind: str) -> None:
    with Scripted([busy(429), busy(503, "Retry-After: soon"), busy(429), response(200)]) as server:
        call(kind, server.url, "predict", b"image")
    assert len(server.pauses) == 3
    for pause, least in zip(server.pauses, (0.1, 0.2, 0.4), strict=True):
        assert least <= pause < least * 1.25 + 0.5


def test_it_gives_up_at_once_when_the_wait_would_outlast_the_timeout(kind: str) -> None:
    with Scripted([busy(429, "Retry-After: 60")]) as server:
        started = time.monotonic()
        with pytest.raises(ApiError) as found:
            call(kind, server.url, "predict", b"image", timeout=5)
        assert time.monotonic() - started < 3
    error = found.value
    assert (error.status, error.code, error.detail, error.request_id) == (429, "queue_full", "come back", "r-1")
    assert len(server.received) == 1


def test_a_server_that_stays_busy_is_an_error_when_the_time_is_over(kind: str) -> None:
    with Scripted([busy(503, code="not_ready")] * 20) as server:
        started = time.monotonic()
        with pytest.raises(ApiError) as found:
            call(kind, server.url, "predict", b"image", timeout=1)
        assert time.monotonic() - started < 2
    assert (found.value.status, found.value.code) == (503, "not_ready")
    assert len(server.received) >= 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 415, 422, 500, 504])
def test_what_will_not_be_better_next_time_is_not_tried_again(kind: str, status: int) -> None:
    with Scripted([busy(status, "Retry-After: 1", code="some_code")]) as server, pytest.raises(ApiError) as found:
        call(kind, server.url, "predict", b"image")
    assert (found.value.status, found.value.code) == (status, "some_code")
    assert len(server.received) == 1


BROKEN: dict[str, bytes | float] = {
    "closed without an answer": 0.0,
    "in the middle of the headers": b"HTTP/1.1 200 OK\r\nContent-",
    "in the middle of the body": response(200)[:-50],
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_connection_is_tried_again(kind: str, broken: bytes | float) -> None:
    with Scripted([broken, broken, response(200)]) as server:
        assert call(kind, server.url, "predict", b"image").label == "apple"
    assert len(server.received) == 3


def test_a_form_is_sent_again_as_a_whole(kind: str) -> None:
    with Scripted([busy(429), response(200)]) as server:
        answers = call(kind, server.url, "predict_many", [b"first image", b"second image", b"third image"])
    assert [type(answer) for answer in answers] == [Prediction, Prediction, Failure]
    for request in server.received:
        places = [request.body.index(image) for image in (b"first image", b"second image", b"third image")]
        assert places == sorted(places)


def test_nobody_there_is_unreachable_and_says_so(kind: str) -> None:
    with Scripted([]) as server:
        gone = server.url
    started = time.monotonic()
    with pytest.raises(Unreachable, match="is the server running"):
        call(kind, gone, "predict", b"image", timeout=0.7)
    assert time.monotonic() - started < 2


def test_a_server_that_never_answers_is_given_up_after_the_clients_timeout(kind: str) -> None:
    with Scripted([30.0] * 5) as server:
        started = time.monotonic()
        with pytest.raises(Unreachable):
            call(kind, server.url, "predict", b"image", client_timeout=0.5)
        assert 0.4 < time.monotonic() - started < 1.5


def test_a_server_that_never_answers_is_given_up_after_the_calls_timeout(kind: str) -> None:
    with Scripted([30.0] * 5) as server:
        started = time.monotonic()
        with pytest.raises(Unreachable):
            call(kind, server.url, "predict", b"image", timeout=0.5, client_timeout=4.0)
        assert 0.4 < time.monotonic() - started < 1.5


def test_all_attempts_together_take_no_longer_than_the_timeout(kind: str) -> None:
    with Scripted([0.7, 30.0, 30.0]) as server:
        started = time.monotonic()
        with pytest.raises(Unreachable):
            call(kind, server.url, "predict", b"image", client_timeout=1.0)
        assert time.monotonic() - started < 1.4


@pytest.mark.parametrize("status", [200, 302, 502])
def test_a_page_of_somebody_in_between_is_an_error_of_ours(kind: str, status: int) -> None:
    page = b"<html><title>Log in to the network of the hotel</title></html>"
    answer = response(status, page, "Location: http://127.0.0.1:9/", kind="text/html")
    with Scripted([answer]) as server, pytest.raises(ApiError) as found:
        call(kind, server.url, "predict", b"image")
    assert (found.value.status, found.value.code, found.value.request_id) == (status, "unknown", None)
    assert "Log in" in found.value.detail


def test_the_key_the_version_and_the_time_go_with_the_request(kind: str) -> None:
    with Scripted([response(200), response(200)]) as server:
        call(kind, server.url, "predict", b"image", key="my-secret", version=7, timeout=2.5)
        call(kind, server.url, "predict", b"image", key=None)
    first, second = server.received
    assert first.head.startswith("POST /predict?version=7 HTTP/1.1")
    assert (first.header("Authorization"), first.header("X-Request-Timeout")) == ("Bearer my-secret", "2.5")
    assert second.head.startswith("POST /predict HTTP/1.1")
    assert (second.header("Authorization"), second.header("X-Request-Timeout")) == (None, "30")
