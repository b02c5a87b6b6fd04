"""`/versions`: what was learned, which version is active, and rolling back and forward."""

from __future__ import annotations

import asyncio
import threading
from typing import Annotated, Any

import numpy as np
from cachetools import TTLCache, cached
from fastapi import APIRouter, Path, Query, Request
from numpy.typing import NDArray

from models.errors import StoreError
from models.inference.novelty import SUMMARIES, Novelty
from models.inference.stored_model import read_novelty
from models.storage import Storage
from models.versions.contents import HEADS, PROVISIONAL, decode_tensors
from models.versions.disk_usage import disk_usage
from models.versions.history import history
from models.versions.keep import recorded_keep, why_discarded
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from service.container import Container, ContainerDep
from service.errors import NotFound
from service.http.audit import audit_detail
from service.http.auth import AnyKey, OperateKey
from service.http.problems import documented
from service.inference.active_version import ActiveVersion
from service.wire.advice import Advice
from service.wire.versions import (
    DiskUsage,
    LoadProblem,
    PromotionEntry,
    TaskReport,
    VersionDetail,
    Versions,
    VersionSummary,
)
from tasks.images import FeatureStore, ImageStore

router = APIRouter(tags=["operators"])

VersionPath = Annotated[int, Path(ge=1, le=10**12)]
DISK_USAGE_SECONDS = 60.0  # measuring reads the size of every file


@router.get("/versions", summary="All versions, and the active one", responses=documented(401))
async def versions(container: ContainerDep, key: AnyKey) -> Versions:
    return await asyncio.to_thread(_versions, container)


@router.post(
    "/versions/{version}/activate",
    summary="Roll back or forward: make this version current and active",
    responses=documented(401, 403, 404, 409, 422, 507),
)
async def activate(
    request: Request,
    container: ContainerDep,
    key: OperateKey,
    version: VersionPath,
    reason: Annotated[str, Query(max_length=500, description="for the history")] = "requested over HTTP",
    replacing: Annotated[
        int | None, Query(ge=1, le=10**12, description="409 if another version than this one is current")
    ] = None,
) -> Versions:
    audit_detail(request, reason=reason)
    await container.active_version.activate(version, "operator", f"{key.name}: {reason}", container.announce, replacing)
    return await asyncio.to_thread(_versions, container)


def _versions(container: Container) -> Versions:
    active = container.active_version
    serving, failure, store = active.model.version, active.failure, active.store
    return Versions(
        serving=serving,
        since=active.since,
        current=_current(active),
        problem=failure,
        keep=container.keep,
        versions=[_summary(entry, serving, failure) for entry in history(store, serving)],
        history=[PromotionEntry(**line.model_dump()) for line in store.log()],
        disk=DiskUsage(**_recent_disk_usage(store.storage, serving)),
    )


def _current(active: ActiveVersion) -> int | None:
    """As the data folder has it: a server may be some seconds behind. If it cannot be read, the last known one."""
    try:
        return active.store.current()
    except (StoreError, OSError):
        failure = active.failure
        return active.model.version or None if failure is None else failure.version


@cached(TTLCache(4, DISK_USAGE_SECONDS), lock=threading.Lock())
def _recent_disk_usage(storage: Storage, serving: int) -> dict[str, int]:
    """Of the last seconds, but not of the time before the served version."""
    return disk_usage(storage)


def _summary(entry: dict[str, Any], serving: int, failure: LoadProblem | None) -> VersionSummary:
    number, reason, discarded = entry["version"], entry.pop("damaged", None), entry.pop("discarded", None)
    if failure is not None and failure.version == number:
        reason = failure.reason
    state = "damaged" if reason else "discarded" if discarded else "available"
    if number == serving:
        state, discarded = "serving", None
    return VersionSummary(**{**entry, "state": state, "reason": reason or discarded})


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
    metrics, novelty = manifest.metrics, None
    if not why_discarded(recorded_keep(store.storage), manifest, store.current_or_logged()):
        novelty = _novelty(store, manifest)
    return VersionDetail(
        version=number,
        parent=manifest.parent,
        task_id=manifest.task_id,
        created=manifest.created,
        stage=manifest.stage,
        pending=[one.task_id for one in manifest.pending],
        tasks=manifest.tasks,
        aliases=manifest.aliases,
        accuracy=metrics.get("accuracy"),
        novelty_auc=metrics.get("novelty_auc"),
        rule=manifest.rule["name"],
        weights=manifest.rule["weights"],
        novelty_weights=dict(zip(SUMMARIES, _finite(novelty.weights), strict=True)) if novelty else {},
        threshold=manifest.threshold,
        novel_above=manifest.novel_above,
        accept=manifest.settings.get("accept"),
        flag=manifest.settings.get("flag"),
        reference=_finite(novelty.known) if novelty else [],
        simulated=_finite(novelty.simulated) if novelty else [],
        networks=metrics.get("networks"),
        # With the present names: an edited version has the report of its parent.
        reports=[TaskReport(**{**row, "classes": manifest.tasks[row["task"]]}) for row in metrics.get("tasks", [])],
        advice=_advice(metrics.get("advice"), store.storage),
        edit=metrics.get("edit"),
        learned=metrics.get("images_per_class", {}),
        capacity=metrics.get("capacity", {}),
        seconds=None if metrics.get("edit") else metrics.get("seconds"),
        backbone=manifest.backbone.get("name"),
        method=manifest.settings.get("method") or "more",
        rotations=manifest.rule.get("rotations", 1),
        drawn=metrics.get("drawn", 0),
        keep=manifest.keep,
    )


def _advice(advice: dict[str, Any] | None, storage: Storage) -> Advice | None:
    """Advice without images that were erased since: their labels do not matter any more."""
    if advice is None:
        return None
    given, images, features = Advice.model_validate(advice), ImageStore(storage), FeatureStore(storage)
    kept = [one for one in given.wrong_labels if one.image in images or one.image in features]
    return given.model_copy(update={"wrong_labels": kept})


def _novelty(store: VersionStore, manifest: Manifest) -> Novelty:
    what = f"version {manifest.version}"
    role = PROVISIONAL if PROVISIONAL in manifest.files else HEADS
    tensors = decode_tensors(store.content(role, manifest.files[role], what), f"{what}: {role}")
    return read_novelty(tensors)


def _finite(values: NDArray[np.floating]) -> list[float]:
    out: list[float] = values[np.isfinite(values)].tolist()
    return out
