"""`/refinement`: whether tasks are learned after their classes answer provisionally."""

from __future__ import annotations

from fastapi import APIRouter, Request

from service.container import Container, ContainerDep
from service.http.audit import audit_detail
from service.http.auth import AnyKey, OperateKey
from service.http.problems import documented
from service.wire.tasks import Refinement, RefinementChange

router = APIRouter(tags=["operators"])


@router.get("/refinement", summary="Whether trainers learn tasks", responses=documented(401, 503))
async def refinement(container: ContainerDep, key: AnyKey) -> Refinement:
    return await _state(container)


@router.put("/refinement", summary="Pause or resume learning", responses=documented(401, 403, 415, 422, 503))
async def change(request: Request, container: ContainerDep, key: OperateKey, wanted: RefinementChange) -> Refinement:
    """While it is paused, submitted classes answer provisionally, and a task that is being learned waits."""
    audit_detail(request, paused=wanted.paused)
    await container.ask_queue(container.queue().pause, wanted.paused)
    return await _state(container)


async def _state(container: Container) -> Refinement:
    queue = container.queue()
    return Refinement(paused=await container.ask_queue(lambda: queue.paused))
