"""`/versions`: what was learned, which version is active, and rolling back and forward."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Path, Query
from safetensors import SafetensorError, safe_open

from models.errors import CorruptVersion
from models.versions.lineage import lineage
from models.versions.store import TENSORS, VersionStore
from service.container import ContainerDep
from service.errors import NotFound
from service.http.auth import AnyKey, OperateKey
from service.http.problems import documented
from service.inference.active_version import ActiveVersion
from service.wire.versions import LoadProblem, PromotionEntry, TaskReport, VersionDetail, Versions, VersionSummary

router = APIRouter(tags=["operators"])

VersionPath = Annotated[int, Path(ge=1, le=10**12)]


@router.get("/versions", summary="All versions, and the active one", responses=documented(401))
async def versions(container: ContainerDep, key: AnyKey) -> Versions:
    return await asyncio.to_thread(_versions, container.active_version)


@router.post(
    "/versions/{version}/activate",
    summary="Roll back or forward: make this version current and active",
    responses=documented(401, 403, 404, 409, 422),
)
async def activate(
    container: ContainerDep,
    key: OperateKey,
    version: VersionPath,
    reason: Annotated[str, Query(max_length=500, description="for the history")] = "requested over HTTP",
) -> Versions:
    await container.active_version.activate(version, "operator", f"{key.name}: {reason}", container.announce)
    return await asyncio.to_thread(_versions, container.active_version)


def _versions(active: ActiveVersion) -> Versions:
    serving, failure, store = active.model.version, active.failure, active.store
    return Versions(
        serving=serving,
        since=active.since,
        current=serving or None if failure is None else failure.version,
        problem=failure,
        versions=[_summary(entry, serving, failure) for entry in lineage(store, serving)],
        history=[PromotionEntry(**line.model_dump()) for line in store.log()],
    )


def _summary(entry: dict[str, Any], serving: int, failure: LoadProblem | None) -> VersionSummary:
    number, reason = entry["version"], entry.pop("damaged", None)
    if failure is not None and failure.version == number:
        reason = failure.reason
    state = "serving" if number == serving else "damaged" if reason else "available"
    return VersionSummary(**{**entry, "state": state, "reason": reason})


@router.get(
    "/versions/{version}",
    summary="One version: the gate's reports, and the scores that its threshold was fitted on",
    responses=documented(401, 404, 409, 422),
)
async def version(container: ContainerDep, key: AnyKey, version: VersionPath) -> VersionDetail:
    return await asyncio.to_thread(version_detail, container.active_version.store, version)


def version_detail(store: VersionStore, number: int) -> VersionDetail:
    if number not in store.versions():
        raise NotFound(f"there is no version {number}: see GET /versions")
    manifest = store.manifest(number)
    metrics = manifest.metrics
    return VersionDetail(
        version=number,
        parent=manifest.parent,
        task_id=manifest.task_id,
        created=manifest.created,
        tasks=manifest.tasks,
        aliases=manifest.aliases,
        rule=manifest.rule["name"],
        constants=manifest.rule.get("weights", {}),
        threshold=manifest.threshold,
        accept=manifest.settings.get("accept"),
        reference=_reference_scores(store, number),
        reports=[TaskReport(**row) for row in metrics.get("tasks", [])],
        edit=metrics.get("edit"),
        learned=metrics.get("images_per_class", {}),
        capacity=metrics.get("capacity", {}),
        seconds=metrics.get("seconds"),
        backbone=manifest.backbone.get("name"),
    )


def _reference_scores(store: VersionStore, number: int) -> list[float]:
    """Read one small tensor of a large file. The file's hash is not checked: these scores are only displayed."""
    path = store.folder(number) / TENSORS
    try:
        with safe_open(path, framework="numpy") as tensors:
            scores = np.asarray(tensors.get_tensor("novelty.known"), np.float64)
    except (OSError, SafetensorError) as error:
        raise CorruptVersion(f"version {number}: {TENSORS} cannot be read: {error}", "missing") from error
    return [float(score) for score in scores[np.isfinite(scores)]]
