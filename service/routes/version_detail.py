"""GET /versions/{version}: everything that one version says of itself, for people who compare versions."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Path
from safetensors import SafetensorError, safe_open

from models.errors import CorruptVersion
from models.versions.store import TENSORS, VersionStore
from service.container import ContainerDep
from service.errors import NotFound
from service.http.auth import AnyKey
from service.http.problems import documented
from service.wire.versions import TaskReport, VersionDetail

router = APIRouter(tags=["operators"])


@router.get(
    "/versions/{version}",
    summary="One version: the gate's reports, and the scores that its threshold was set on",
    responses=documented(401, 404, 409, 422),
)
async def version(
    container: ContainerDep, key: AnyKey, version: Annotated[int, Path(ge=1, le=10**12)]
) -> VersionDetail:
    return await asyncio.to_thread(detail, container.active_version.store, version)


def detail(store: VersionStore, number: int) -> VersionDetail:
    if number not in store.versions():
        raise NotFound(f"there is no version {number}: see GET /versions")
    manifest = store.manifest(number)
    metrics, settings = manifest.metrics, manifest.settings
    return VersionDetail(
        version=number,
        parent=manifest.parent,
        task_id=manifest.task_id,
        created=manifest.created,
        tasks=manifest.tasks,
        aliases=manifest.aliases,
        rule=manifest.rule["name"],
        constants=manifest.rule.get("constants", {}),
        threshold=manifest.threshold,
        accept=settings.get("accept"),
        reference=_reference(store, number),
        reports=[_report(row) for row in metrics.get("tasks", [])],
        edit=metrics.get("edit"),
        learned=metrics.get("images_per_class", {}),
        capacity=metrics.get("capacity", {}),
        seconds=metrics.get("seconds"),
        backbone=manifest.backbone.get("name"),
    )


def _report(row: dict[str, Any]) -> TaskReport:
    return TaskReport(**{name: row[name] for name in TaskReport.model_fields if name in row})


def _reference(store: VersionStore, number: int) -> list[float]:
    """One tensor of many megabytes of them. Its hash is not checked: it is looked at here, and answers nobody."""
    path = store.folder(number) / TENSORS
    try:
        with safe_open(path, framework="numpy") as tensors:
            scores = np.asarray(tensors.get_tensor("calibration.reference"), np.float64)
    except (OSError, SafetensorError) as error:
        raise CorruptVersion(f"version {number}: {TENSORS} cannot be read: {error}", "missing") from error
    return [float(score) for score in scores[np.isfinite(scores)]]
