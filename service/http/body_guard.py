"""At the door: who has no key is turned away before a byte of the body is read, and no body is without end.

The framework reads a JSON body before it asks for the key. The routes that take images ask first, and count what they
read by themselves.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import BodyTooLarge, Unauthorized
from service.http.keys import Keyring, secret_of
from service.http.problems import problem_of, respond

MAX_BODY = 2**20  # bytes: of everything that is neither an image nor a batch
COUNT_THEMSELVES = {"/predict", "/tasks", "/explain"}
WITH_BODY = {"POST", "PUT", "PATCH", "DELETE"}


class Gate:
    """Only for what changes something or sends something: looking is checked by the routes."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app, self._keyring = app, keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in WITH_BODY or scope["path"] in COUNT_THEMSELVES:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        error: Unauthorized | BodyTooLarge | None = None
        if self._keyring.holder(secret_of(request)) is None:
            error = Unauthorized("send a key that this server knows: Authorization: Bearer <key>")
        elif _announced(request) > MAX_BODY:
            error = BodyTooLarge(f"the request has more than {MAX_BODY} bytes")
        if error is not None:
            scope["error"] = error
            await respond(problem_of(error), request, error)(scope, receive, send)
        else:
            await self._app(scope, _bounded(receive), send)


def _announced(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def _bounded(receive: Receive) -> Receive:
    seen = 0

    async def bounded() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY:
            # An HTTPException: the framework takes every other error in a body for a malformed one.
            raise HTTPException(413, f"the request has more than {MAX_BODY} bytes")
        return message

    return bounded
