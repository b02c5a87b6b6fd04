"""Liveness, readiness and metrics; the first two also under the paths of the Open Inference Protocol."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from service.container import ContainerDep
from service.errors import NotReady
from service.http.problems import documented
from service.keys import Key
from service.wire.health import Health

router = APIRouter(tags=["operators"])


@router.get("/livez", summary="The process is alive")
@router.get("/v2/health/live", include_in_schema=False)
async def livez() -> Health:
    return Health(status="alive")


@router.get(
    "/readyz", summary="A version is loaded and computes, and the server is not draining", responses=documented(503)
)
@router.get("/v2/health/ready", include_in_schema=False)
async def readyz(container: ContainerDep) -> Health:
    if (why := container.not_ready) is not None:
        raise NotReady(why, 1)
    return Health(status="ready", version=container.active_version.model.version)


@router.get("/metrics", summary="Metrics in Prometheus' text format", response_class=Response)
async def metrics(request: Request, container: ContainerDep) -> Response:
    """Waits neither for Redis nor for a disk.

    Without the names of keys, unless the key of the request has the role `monitor` or `operate`.
    """
    key: Key | None = request.scope["key"]
    names = key is not None and bool(key.roles & {"monitor", "operate"})
    await container.novelties.count()
    loop = asyncio.get_running_loop()
    text = await loop.run_in_executor(container.metrics_thread, lambda: container.metrics.text(client_names=names))
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
