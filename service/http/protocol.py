"""uvicorn's HTTP protocol with limits that uvicorn itself does not have: headers, waiting clients, connections.

**A connection that waits for its client never keeps another client out.** If there are too many connections, the one
that has waited longest is closed, first among those that have not sent a request. Only if all of them have a request in
progress is a new connection refused.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from itertools import islice
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.http.middleware import new_id
from service.wire.problems import Problem

log = logging.getLogger("openworld.requests")

MAX_HEADERS = 64 * 2**10  # bytes of headers, and of trailers after a body
LINGER_SECONDS = 30.0  # for the rest of a body, after its request was answered
WRITE_SECONDS = 30.0  # for a client that does not read its response
LAST_SECONDS = 1.0  # for the first request of a new connection, when the server stops
CLOSED_PER_SWEEP = 50
NEVER = math.inf


class Connections:
    """The open connections of a server, by what they wait for; the longest waiting ones come first."""

    def __init__(
        self, limit: int, header_seconds: float, keep_alive_seconds: float, on_close: Callable[[str], None]
    ) -> None:
        self.limit, self.header_seconds, self.keep_alive_seconds = limit, header_seconds, keep_alive_seconds
        self._on_close = on_close
        self.open: set[GuardedProtocol] = set()
        self.new: dict[GuardedProtocol, None] = {}  # no request so far
        self.idle: dict[GuardedProtocol, None] = {}  # its last request is answered
        self.blocked: dict[GuardedProtocol, None] = {}  # the client does not read its response

    def add(self, connection: GuardedProtocol) -> bool:
        """Whether there is room, if necessary in place of a connection that waits."""
        if len(self.open) >= self.limit:
            waiting = next((group for group in (self.new, self.idle, self.blocked) if group), None)
            if waiting is None:
                self._on_close("refused")
                return False
            self.close(next(iter(waiting)), "evicted")
        self.open.add(connection)
        self.new[connection] = None
        return True

    def remove(self, connection: GuardedProtocol) -> None:
        self.open.discard(connection)
        for group in (self.new, self.idle, self.blocked):
            group.pop(connection, None)

    def close(self, connection: GuardedProtocol, reason: str) -> None:
        self._on_close(reason)
        self.remove(connection)
        if connection.write_due == NEVER:
            connection.transport.close()
        else:
            connection.transport.abort()  # without waiting for a client that does not read

    def sweep(self, now: float) -> None:
        """Close connections whose time is over, a few per call: their clients may all connect again at once."""
        late = (one for one in self.open if one.due < now or one.write_due < now)
        for connection in list(islice(late, CLOSED_PER_SWEEP)):
            self.close(connection, "timeout")


class GuardedProtocol(HttpToolsProtocol):
    """Rejects a request with too many bytes of headers or trailers, and reports its state to `Connections`."""

    _seen = 0  # bytes since the last body chunk or request
    _begun = False  # the headers of a request, which are not complete
    _received = True  # all of the request
    due = NEVER  # when the client must have sent what is expected of it
    write_due = NEVER  # when it must have read some of its response

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._connections = connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._connections.add(self):
            self.due = self.loop.time() + self._connections.header_seconds
        else:
            transport.write(_refusal(len(self._connections.open)))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self in self._connections.new:  # its request may be on the way
            self.loop.call_later(LAST_SECONDS, super().shutdown)
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._seen += len(data)
        super().data_received(data)
        if self._seen > MAX_HEADERS and not self.transport.is_closing():
            self.send_400_response(f"the headers have more than {MAX_HEADERS} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun = True
        if self in self._connections.idle:
            self._wait()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEADERS:
            raise ValueError("too large")  # the parser then answers 400
        self._seen, self._begun, self._received, self.due = 0, False, False, NEVER
        self._connections.new.pop(self, None)
        self._connections.idle.pop(self, None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._seen = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._seen, self._received = 0, True
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete:
            self._wait()

    def on_response_complete(self) -> None:
        pipelined = bool(self.pipeline)
        super().on_response_complete()
        if not pipelined:
            self._wait()

    def _wait(self) -> None:
        """Wait for the rest of the body, for the rest of the next headers, or for the next request."""
        if self not in self._connections.open:
            return
        self._connections.idle[self] = None
        seconds = self._connections.header_seconds if self._begun else self._connections.keep_alive_seconds
        self.due = self.loop.time() + (seconds if self._received else LINGER_SECONDS)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._connections.blocked[self] = None
        self.write_due = self.loop.time() + WRITE_SECONDS

    def resume_writing(self) -> None:
        super().resume_writing()
        self._connections.blocked.pop(self, None)
        self.write_due = NEVER


def _refusal(connections: int) -> bytes:
    """A response without a request. It is logged as those of requests are."""
    code, request_id = "too_many_connections", new_id()
    fields = {"status": 503, "code": code, "request_id": request_id}
    log.warning("refused: all %d connections have a request in progress", connections, extra={"fields": fields})
    title, detail = "Too many connections", "try again later"
    body = Problem(title=title, status=503, code=code, detail=detail, request_id=request_id).model_dump_json(
        exclude_none=True
    )
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\ncontent-type: application/problem+json\r\n"
        f"connection: close\r\nx-request-id: {request_id}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()
