"""Records every change in the audit log, by its route."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.audit import AuditLog
from service.keys import Key
from service.wire.audit import AuditEntry

log = logging.getLogger(__name__)

# Every route of an unsafe method, except for POST /predict and POST /explain, which change nothing.
ACTIONS = {
    "POST /tasks": "task.submit",
    "POST /tasks/{task_id}/cancel": "task.cancel",
    "POST /tasks/{task_id}/retry": "task.retry",
    "PUT /refinement": "refinement.pause",
    "PATCH /classes/{name}": "class.edit",
    "POST /versions/{version}/activate": "version.activate",
    "POST /novelties": "novelty.report",
    "POST /novelties/dismiss": "novelty.dismiss",
    "POST /novelties/restore": "novelty.restore",
    "DELETE /novelties/{id}": "novelty.erase",
    "DELETE /images": "image.erase_expired",
    "DELETE /images/{sha256}": "image.erase",
}


def audit_detail(request: Request, target: str | None = None, **detail: Any) -> None:
    """Add to the entry of this request; its target is by default the parameter in the path."""
    noted = request.scope.setdefault("audit", {"target": None, "detail": {}})
    noted["target"] = target or noted["target"]
    noted["detail"].update(detail)


class AuditTrail:
    """Appends an entry before a change is answered. Refused requests (4xx) have changed nothing.

    If the entry cannot be written, the change, which has been made, is answered, and the entry goes to the log: an
    erasure must be possible on a full disk.
    """

    def __init__(self, app: ASGIApp, audit_log: AuditLog) -> None:
        self._app, self._log = app, audit_log
        self._executor = ThreadPoolExecutor(1, "audit")  # its own: entries must not wait for a hanging Redis

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD") or scope["path"] == "/predict":
            await self._app(scope, receive, send)
            return
        started = False

        async def record(status: int) -> None:
            route = getattr(scope.get("route"), "path", "")
            action = ACTIONS.get(f"{scope['method']} {route}")
            key: Key | None = scope.get("key")
            if action is None or key is None or 400 <= status < 500:
                return
            entry = _entry(scope, action, key.name, status)
            try:
                await asyncio.get_running_loop().run_in_executor(self._executor, self._log.record, entry)
            except OSError as error:
                fields = {"audit": entry.model_dump(mode="json", exclude_none=True)}
                log.error("the audit log cannot be written: %s", error, extra={"fields": fields})

        async def send_recorded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                await record(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_recorded)
        except Exception:
            if not started:
                await record(500)
            raise


def _entry(scope: Scope, action: str, by: str, status: int) -> AuditEntry:
    noted = scope.get("audit", {"target": None, "detail": {}})
    parameter = next(iter(scope.get("path_params", {}).values()), None)
    client = scope.get("client")
    return AuditEntry(
        time=datetime.now(UTC),
        by=by,
        action=action,
        target=noted["target"] or (None if parameter is None else str(parameter)),
        detail=noted["detail"],
        address=client[0] if client else None,
        request_id=scope.get("request_id"),
        status=status,
    )
