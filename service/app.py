"""The application: container, middleware, routes and error handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from service.container import Container
from service.http.audit import AuditTrail
from service.http.forwarded import ForwardedHeaders
from service.http.inbox_forwarding import InboxForwarding
from service.http.middleware import RequestGuard, RequestLog
from service.http.openapi import complete_openapi
from service.http.origins import OriginGuard
from service.http.problems import HANDLERS
from service.routes import (
    api_docs,
    audit,
    classes,
    console,
    explain,
    health,
    images,
    me,
    novelties,
    predict,
    pulse,
    refinement,
    tasks,
    versions,
)
from service.settings import ServiceSettings

DESCRIPTION = """\
Recognises the classes it has learned, answers **novel** to everything else, and learns new classes from labels.

Robots and apps send images to `POST /predict`; operators use `/versions`, `/metrics` and `/readyz`.
Every error has the same shape ([RFC 9457](https://www.rfc-editor.org/rfc/rfc9457)) with a stable `code`. If the server
has keys, send yours as `Authorization: Bearer <key>`.
"""


def create_app(settings: ServiceSettings) -> FastAPI:
    """The application of one server. Its lifespan starts and stops the container."""
    container = Container(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await container.start()
        try:
            yield
        finally:
            await container.stop()

    app = FastAPI(
        title="openworld",
        version=version("openworld"),
        description=DESCRIPTION,
        lifespan=lifespan,
        exception_handlers=HANDLERS,
        docs_url=None,  # see service/routes/api_docs.py
        redoc_url=None,
    )
    app.state.container = container
    if container.settings.shared:
        app.add_middleware(InboxForwarding, inbox=container.novelties.place)
    app.add_middleware(
        RequestGuard,
        keyring=container.keyring,
        pace=container.upload_pace,
        max_requests_per_key=settings.key_requests,
    )
    app.add_middleware(AuditTrail, audit_log=container.audit_log)
    app.add_middleware(
        OriginGuard,
        hosts=frozenset(settings.trusted_hosts),
        origins=frozenset(settings.trusted_origins),
        # A page of a rebound name has no key, and a server in a network may have many names.
        any_host=lambda: bool(container.keyring) and not settings.trusted_hosts,
    )
    app.add_middleware(ForwardedHeaders, proxies=settings.trusted_proxies)
    app.add_middleware(RequestLog, metrics=container.metrics, draining=lambda: container.draining)
    for module in (
        predict,
        explain,
        novelties,
        tasks,
        refinement,
        classes,
        versions,
        images,
        health,
        me,
        audit,
        pulse,
        api_docs,
        console,
    ):
        app.include_router(module.router)
    app.router.routes.insert(0, predict.FastPredictRoute())
    complete_openapi(app, keys=bool(container.keyring))
    return app
