"""`GET /pulse`: the last minutes of this server, for the console."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from service.container import ContainerDep
from service.http.auth import AnyKey
from service.http.problems import documented
from service.inference.pulse import INTERVALS, SECONDS
from service.wire.health import PulseAnswer

router = APIRouter(tags=["people"])

MAX_MINUTES = INTERVALS * SECONDS // 60


@router.get("/pulse", summary="The last minutes: traffic, novelty, latency, scores", responses=documented(401, 422))
async def pulse(
    container: ContainerDep,
    key: AnyKey,
    minutes: Annotated[int, Query(ge=1, le=MAX_MINUTES, description="length of the period")] = MAX_MINUTES,
) -> PulseAnswer:
    """Of this server only, since it started. Prometheus has the history of all servers."""
    return container.pulse.read(minutes)
