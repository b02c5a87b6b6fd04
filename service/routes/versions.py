"""GET /versions and POST /versions/{n}/activate: what was learned, what answers, roll back and forward."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Path, Query

from models.versions.lineage import lineage
from service.container import Container, ContainerDep
from service.http.auth import AnyKey, OperateKey
from service.http.problems import documented
from service.inference.active_version import LoadFailure
from service.wire.versions import LoadProblem, PromotionEntry, Versions, VersionSummary

router = APIRouter(tags=["operators"])


@router.get("/versions", summary="All versions, which one answers, and why", responses=documented(401))
async def versions(container: ContainerDep, key: AnyKey) -> Versions:
    return await asyncio.to_thread(_versions, container)


@router.post(
    "/versions/{version}/activate",
    summary="Roll back or forward: this version answers from now on",
    responses=documented(401, 403, 404, 409, 422),
)
async def activate(
    container: ContainerDep,
    key: OperateKey,
    version: Annotated[int, Path(ge=1, le=10**12)],
    reason: Annotated[str, Query(max_length=500, description="for the history")] = "asked for over HTTP",
) -> Versions:
    await container.active_version.activate(version, "operator", f"{key.name}: {reason}", container.announce)
    return await asyncio.to_thread(_versions, container)


def _versions(container: Container) -> Versions:
    active = container.active_version
    serving, failure, store = active.model.version, active.failure, active.store
    return Versions(
        serving=serving,
        since=active.since,
        current=serving or None if failure is None else failure.version,
        problem=_problem(failure),
        versions=[_summary(entry, serving, failure) for entry in lineage(store, serving)],
        history=[PromotionEntry(**line.model_dump()) for line in store.log()],
    )


def _problem(failure: LoadFailure | None) -> LoadProblem | None:
    if failure is None:
        return None
    fields = asdict(failure)
    return LoadProblem(code=fields.pop("damage"), **fields)


def _summary(entry: dict[str, object], serving: int, failure: LoadFailure | None) -> VersionSummary:
    number, reason = entry["version"], entry.pop("damaged", None)
    if failure is not None and failure.version == number:
        reason = failure.reason
    state = "serving" if number == serving else "damaged" if reason else "available"
    fields = {name: value for name, value in entry.items() if name in VersionSummary.model_fields}
    return VersionSummary(**{**fields, "state": state, "reason": reason})
