"""The application: parts, routes and handlers put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI

from service.container import Service
from service.http.body_guard import Gate
from service.http.openapi import complete_openapi
from service.http.problems import HANDLERS
from service.http.request_log import Observe
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

    service = Service(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(
        title="openworld",
        version=version("openworld"),
        description=DESCRIPTION,
        lifespan=lifespan,
        exception_handlers=HANDLERS,
        docs_url=None,  # see service/routes/api_docs.py
        redoc_url=None,
    )
    app.state.service = service
    app.state.pulse = pulse.Pulse(service.live)
    app.state.explainer = explain.Explainer()
    app.add_middleware(Gate, keyring=service.keyring)
    app.add_middleware(Observe, metrics=service.metrics, draining=lambda: service.draining)
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
