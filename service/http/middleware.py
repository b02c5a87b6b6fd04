"""ASGI middleware around every request: `RequestLog` outside, `RequestGuard` inside, `origins.py` between them."""

from __future__ import annotations

import logging
import random
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ClientDisconnected, KeyBusy, ServiceError, Unauthorized, UnsupportedBody
from service.http.auth import ANONYMOUS, UNAUTHORIZED, Keyring
from service.http.bodies import Pace, bounded_receive, content_type
from service.http.problems import on_openworld_error, problem_of, respond
from service.inference.metrics import REJECTED, Metrics

log = logging.getLogger("openworld.requests")

MAX_BODY = 2**20  # bytes of a body that is neither an image nor a batch
OWN_LIMITS = {"/predict", "/tasks", "/explain"}  # routes that check the key and limit the body themselves
WITH_BODY = {"POST", "PUT", "PATCH", "DELETE"}

_random = random.Random(secrets.randbits(128))  # an id is not secret, and os.urandom is slow
_GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def new_id() -> str:
    """A unique id; ids sort by the time they were made."""
    return f"{time.time_ns() // 1_000_000:012x}{_random.getrandbits(48):012x}"


class RequestLog:
    """Gives every request an id, a log line and its metrics, and answers unexpected exceptions with a 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics, draining: Callable[[], bool]) -> None:
        self._app, self._metrics, self._draining = app, metrics, draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request = Request(scope, receive)
        given = request.headers.get("x-request-id", "")
        scope["request_id"] = request_id = given if _GIVEN_ID.fullmatch(given) else new_id()
        status = 0

        async def send_logged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message.setdefault("headers", [])
                headers.append((b"x-request-id", request_id.encode()))
                if self._draining():
                    # The client's next request then opens a connection to another server.
                    headers.append((b"connection", b"close"))
            try:
                await send(message)
            except (OSError, RuntimeError) as error:  # the connection is closed; uvloop raises RuntimeError
                log.debug("the response could not be sent: %s", error)
                scope["error"], status = ClientDisconnected("the client disconnected before the response"), 0

        try:
            await self._app(scope, receive, send_logged)
        except Exception as error:
            scope["error"], scope["unexpected"] = error, True
            if status == 0:
                await respond(problem_of(error), request)(scope, receive, send_logged)
        finally:
            self._record(scope, status, time.perf_counter() - started)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        self._metrics.count_request(route, status or 499, seconds)
        error = scope.get("error")
        code = problem_of(error).code if error is not None else None
        if code in REJECTED:
            self._metrics.rejected.labels(code).inc()
        level = logging.ERROR if "unexpected" in scope else _level(scope["method"], status)
        if log.isEnabledFor(level):
            fields = {
                "request_id": scope["request_id"],
                "method": scope["method"],
                "route": route,
                "status": status or 499,
                "ms": round(seconds * 1000, 2),
                **scope.get("log_fields", {}),
            }
            if code:
                fields["code"] = code
            if status >= 500 and error is not None:
                fields["error"] = f"{type(error).__name__}: {error}"
            log.log(level, "request", exc_info=error if "unexpected" in scope else None, extra={"fields": fields})


def _level(method: str, status: int) -> int:
    if status in (500, 507):
        return logging.ERROR
    if status >= 500:  # the server has no answer now, and says when to ask again
        return logging.WARNING
    # Successful reads are frequent (probes, a console that polls), so they are logged at debug level.
    return logging.DEBUG if method in ("GET", "HEAD") and status < 400 else logging.INFO


class RequestGuard:
    """Authenticates every request, bounds its body, and requires that the body is declared as JSON.

    One key may have a limited number of requests in progress, so that it cannot use all connections. Without keys, only
    requests whose bodies are read here are limited: routes with limits of their own, probes and reads stay available.

    FastAPI reads a JSON body before it runs the dependencies of a route. A request with a body is therefore refused
    here if it has no valid key.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, pace: Pace, max_requests_per_key: int) -> None:
        self._app, self._keyring, self._pace = app, keyring, pace
        self._max_requests = max_requests_per_key
        self._requests: Counter[str] = Counter()  # in progress, by key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        scope["key"] = key = self._keyring.authenticate(request.headers)
        bounded = scope["method"] in WITH_BODY and scope["path"].rstrip("/") not in OWN_LIMITS
        name = key.name if key is not None and (bounded or key is not ANONYMOUS) else None
        try:
            if bounded:
                if key is None:
                    raise Unauthorized(UNAUTHORIZED)
                _require_json(request)
                receive = bounded_receive(request, MAX_BODY, "send less", self._pace)
            if name is not None and self._requests[name] >= self._max_requests:
                raise KeyBusy(f"key {name!r} has {self._max_requests} requests in progress: wait for answers", 1)
        except ServiceError as error:
            response = await on_openworld_error(request, error)
            await response(scope, receive, send)
            return
        if name is None:
            await self._app(scope, receive, send)
            return
        self._requests[name] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests[name] -= 1


def _require_json(request: Request) -> None:
    """Refuse a body of another type; a page may send `text/plain` and forms to another site without asking."""
    headers = request.headers
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    if (has_body or "content-type" in headers) and (kind := content_type(request)) != "application/json":
        raise UnsupportedBody(f"content type {kind[:80]!r} is not read here: send application/json")
