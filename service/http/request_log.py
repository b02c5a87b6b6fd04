"""Around every request: an id, a line in the log, the metrics, and an answer even when a bug strikes."""

from __future__ import annotations

import logging
import random
import re
import secrets
import time
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import Abandoned
from service.http.problems import INTERNAL, problem_of, respond
from service.inference.metrics import REJECTED, Metrics

log = logging.getLogger("openworld.requests")

_random = random.Random(secrets.randbits(128))  # an id is no secret, and asking the kernel for each is slow
_GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def new_id() -> str:
    """Ordered by time, so that ids sort as they were given; unique without asking anybody."""
    return f"{time.time_ns() // 1_000_000:012x}{_random.getrandbits(48):012x}"


class Observe:
    """The outermost layer."""

    def __init__(self, app: ASGIApp, metrics: Metrics, draining: Any) -> None:
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

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = message.setdefault("headers", [])
                headers.append((b"x-request-id", request_id.encode()))
                if self._draining():
                    # So that the client's next request goes to a server that stays.
                    headers.append((b"connection", b"close"))
            try:
                await send(message)
            except (OSError, RuntimeError) as error:  # the connection is closed: uvloop says so with the latter
                log.debug("nobody to answer: %s", error)
                scope["error"], status = Abandoned("the client went away before its answer"), 0

        try:
            await self._app(scope, receive, observed)
        except Exception as error:
            scope["error"] = error
            log.exception("a bug: the request was answered with 500", extra={"fields": {"request_id": request_id}})
            if status == 0:
                await respond(INTERNAL, request)(scope, receive, observed)
        finally:
            self._record(scope, status, time.perf_counter() - started)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        code = str(status or 499)
        self._metrics.requests.labels(route, code).inc()
        self._metrics.request_seconds.labels(route).observe(seconds)
        error = scope.get("error")
        reason = problem_of(error).code if error is not None else None
        if reason in REJECTED:
            self._metrics.rejected.labels(reason).inc()
        # Who only looks, looks often: probes, a page that follows a task. Failures are worth a line whoever asks.
        level = logging.DEBUG if scope["method"] in ("GET", "HEAD") and status < 400 else logging.INFO
        if log.isEnabledFor(level):
            fields = {
                "request_id": scope["request_id"],
                "method": scope["method"],
                "route": route,
                "status": status or 499,
                "ms": round(seconds * 1000, 2),
                **scope.get("log_fields", {}),
            }
            if reason:
                fields["code"] = reason
            log.log(level, "request", extra={"fields": fields})
