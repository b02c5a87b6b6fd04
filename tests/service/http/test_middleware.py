"""Middleware: request ids, the log line, 500 responses, and the limit of JSON bodies."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from service.http.middleware import MAX_BODY, RequestLog
from service.inference.metrics import Metrics
from tests.support.metrics import series
from tests.support.servers import RunningServer, running_server


def call_logged(app: Any) -> tuple[Metrics, list[Message]]:
    metrics, sent = Metrics(), list[Message]()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"x-request-id", b"mine")]}
    asyncio.run(RequestLog(app, metrics, lambda: False)(scope, receive, send))
    return metrics, sent


def test_an_unexpected_error_is_answered_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise LookupError("a secret detail")

    with caplog.at_level(logging.INFO, "openworld.requests"):
        metrics, (start, body) = call_logged(app)
    problem = json.loads(body["body"])
    assert (start["status"], problem["status"], problem["code"], problem["request_id"]) == (
        500,
        500,
        "internal",
        "mine",
    )
    assert "a secret detail" not in problem["detail"]
    assert (b"x-request-id", b"mine") in start["headers"]
    assert series(metrics.text().decode(), "openworld_requests_total") == {("500", "unmatched"): 1}
    [line] = caplog.records
    assert line.levelno == logging.ERROR
    assert line.exc_info is not None
    fields = line.__dict__["fields"]
    assert (fields["request_id"], fields["status"], fields["error"]) == ("mine", 500, "LookupError: a secret detail")


def test_an_error_in_the_middle_of_a_response_does_not_start_another() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise LookupError("a secret detail")

    metrics, sent = call_logged(app)
    assert [message["type"] for message in sent] == ["http.response.start"]
    assert series(metrics.text().decode(), "openworld_requests_total") == {("200", "unmatched"): 1}


# Bodies of JSON routes


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("middleware") / "robot", threads=1) as running:
        yield running


def chunks(size: int) -> Iterator[bytes]:
    """A body without Content-Length."""
    for start in range(0, size, 2**16):
        yield b" " * min(2**16, size - start)


@pytest.mark.parametrize("announced", [True, False], ids=["with Content-Length", "chunked"])
def test_a_json_body_above_the_limit_is_refused(server: RunningServer, announced: bool) -> None:
    body: Any = b" " * (MAX_BODY + 1) if announced else chunks(MAX_BODY + 1)
    headers = {"Content-Type": "application/json"}
    refused = server.post("/novelties/dismiss", content=body, headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (413, "body_too_large")
    assert str(MAX_BODY) in refused.json()["detail"]


def test_a_json_body_at_the_limit_is_read(server: RunningServer) -> None:
    headers = {"Content-Type": "application/json"}
    read = server.post("/novelties/dismiss", content=chunks(MAX_BODY), headers=headers)
    assert (read.status_code, read.json()["code"]) == (422, "invalid")
