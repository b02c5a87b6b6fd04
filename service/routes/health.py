"""Liveness, readiness and metrics; the first two also under the paths of the Open Inference Protocol."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response

from service.container import Container, ContainerDep
from service.errors import NotReady
from service.http.problems import documented
from service.wire.health import Health

router = APIRouter(tags=["operators"])


@router.get("/livez", summary="The process is alive")
@router.get("/v2/health/live", include_in_schema=False)
async def livez() -> Health:
    return Health(status="alive")


@router.get("/readyz", summary="A version is loaded, and the server is not draining", responses=documented(503))
@router.get("/v2/health/ready", include_in_schema=False)
async def readyz(container: ContainerDep) -> Health:
    if not container.ready:
        failure = container.active_version.failure
        why = "shutting down" if container.draining else f"no version: {failure.reason}" if failure else "loading"
        raise NotReady(why, 1)
    return Health(status="ready", version=container.active_version.model.version)


@router.get("/metrics", summary="Metrics in Prometheus' text format", response_class=Response)
async def metrics(container: ContainerDep) -> Response:
    return Response(
        await asyncio.to_thread(_metrics_text, container), media_type="text/plain; version=0.0.4; charset=utf-8"
    )


def _metrics_text(container: Container) -> bytes:
    """Call it in a thread: the inbox may wait for its disk."""
    if container.inbox is not None:
        for state, count in container.inbox.counts().items():
            container.metrics.novelties.labels(state).set(count)
        container.metrics.novelties_bytes.set(container.inbox.bytes_used)
    return container.metrics.text()
