"""Forwards requests for `/novelties` to the server that owns the shared inbox.

The request is sent as the caller sent it, with the caller's key, which the owner checks as well. It is forwarded once:
a server that gets a forwarded request and does not own the inbox either answers 503, and the caller tries again.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import InboxMoved, Overloaded, ServiceError
from service.http.problems import on_openworld_error
from service.threads import BoundedThreads

FORWARDED = "x-openworld-forwarded"
SECONDS = 10.0  # to connect, and between two parts of the answer
THREADS, CALLS = 8, 64

# Host is kept, so that the owner checks the same name. Origin is not sent: this server has checked it.
SENT = ("host", "authorization", "x-api-key", "content-type", "accept", "if-none-match", "user-agent")
NOT_RETURNED = {
    "connection", "keep-alive", "transfer-encoding", "content-length", "date", "server", "x-request-id",
}  # fmt: skip


class InboxPlace(NamedTuple):
    """Where the inbox is, as this server knows it."""

    here: bool
    owner: str | None  # the address of its owner


class InboxForwarding:
    """Middleware inside of `RequestGuard`, which has authenticated the request and bounds its body."""

    def __init__(self, app: ASGIApp, inbox: Callable[[], InboxPlace | None]) -> None:
        """`inbox` returns None if servers do not share the inbox."""
        self._app, self._inbox = app, inbox
        self._threads = BoundedThreads("forward", THREADS, CALLS, _busy)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        inbox = self._inbox() if scope["type"] == "http" and _is_novelties(scope["path"]) else None
        # A request without a key is refused by its route.
        if inbox is None or inbox.here or scope["key"] is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        scope.setdefault("log_fields", {}).update(client=scope["key"].name, forwarded=inbox.owner)
        try:
            if inbox.owner is None or FORWARDED in request.headers:
                raise InboxMoved("the inbox moves to another server: send the request again", 1)
            response = await self._forward(request, inbox.owner)
        except ServiceError as error:
            response = await on_openworld_error(request, error)
        await response(scope, receive, send)

    async def _forward(self, request: Request, owner: str) -> Response:
        headers = {name: request.headers[name] for name in SENT if name in request.headers}
        headers |= {FORWARDED: "1", "x-request-id": request.scope["request_id"]}
        if request.client is not None:
            headers["x-forwarded-for"] = request.client.host
        target = request.scope["raw_path"].decode() + (f"?{request.url.query}" if request.url.query else "")
        body = await request.body()
        return await self._threads.run(_send, owner, request.method, target, headers, body)


def _send(owner: str, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Response:
    parts = urlsplit(owner)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=SECONDS)
    try:
        connection.request(method, target, body or None, dict(headers))
        answer = connection.getresponse()
        data = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise InboxMoved(
            f"the server that has the inbox does not answer ({error}): send the request again", 2
        ) from error
    finally:
        connection.close()
    returned = Headers({name: value for name, value in answer.getheaders() if name.lower() not in NOT_RETURNED})
    return Response(data, answer.status, returned)


def _is_novelties(path: str) -> bool:
    return path == "/novelties" or path.startswith("/novelties/")


def _busy() -> Overloaded:
    return Overloaded(f"{CALLS} requests wait for the server that has the inbox: try again later", 1)
