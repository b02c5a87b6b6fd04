"""The application: parts, routes and handlers put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from service.container import Container
from service.http.middleware import RequestGuard, RequestLog
from service.http.openapi import complete_openapi
from service.http.problems import HANDLERS
from service.routes import (
    api_docs,
    classes,
    console,
    explain,
    health,
    images,
    me,
    novelties,
    predict,
    pulse,
    tasks,
    version_detail,
    versions,
)
from service.settings import ServiceSettings

DESCRIPTION = """\
Recognises what it has learned, says **novel** to the rest, and learns that from people's labels.

Robots and apps send images to `POST /predict`; operators look at `/versions`, `/metrics` and `/readyz`.
Errors have one shape ([RFC 9457](https://www.rfc-editor.org/rfc/rfc9457)) with a stable `code`. When the server has
keys, send yours as `Authorization: Bearer <key>`.
"""


def create_app(settings: ServiceSettings) -> FastAPI:
    """A server's application; its parts start and stop with it."""

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
    app.state.pulse = pulse.Pulse(container.active_version)
    app.state.explainer = explain.Explainer()
    app.add_middleware(RequestGuard, keyring=container.keyring)
    app.add_middleware(RequestLog, metrics=container.metrics, draining=lambda: container.draining)
    for part in (
        predict,
        explain,
        novelties,
        tasks,
        classes,
        versions,
        version_detail,
        images,
        health,
        me,
        pulse,
        api_docs,
        console,
    ):
        app.include_router(part.router)
    app.router.routes.insert(0, predict.PlainPredict())
    complete_openapi(app, keys=bool(settings.keys))
    return app
