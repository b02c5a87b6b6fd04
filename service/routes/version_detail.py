"""GET /versions/{version}: everything that one version says of itself, for people who compare versions."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Path
from pydantic import BaseModel, Field
from safetensors import SafetensorError, safe_open

from models.errors import CorruptVersion
from models.versions.store import TENSORS, VersionStore
from service.container import ContainerDep
from service.errors import NotFound
from service.http.auth import AnyKey
from service.http.problems import documented

router = APIRouter(tags=["operators"])


class TaskReport(BaseModel):
    """What the gate found of one task, on held-out images, under the parent and under this version."""

    task: int
    classes: list[str]
    images: int = Field(description="held out")
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    auc_before: float | None = None
    auc_after: float | None = None


class VersionDetail(BaseModel):
    """One version, with the scores that its threshold was set on."""

    version: int
    parent: int | None
    task_id: str
    created: datetime
    tasks: list[list[str]] = Field(description="all classes, by task")
    aliases: dict[str, str | None] = Field(description="merged classes, and retired ones (null)")
    rule: str
    constants: dict[str, float] = Field(description="what was fitted for the rule")
    threshold: float | None = Field(description="a score below it is novel")
    accept: float | None = Field(None, description="the share of known images that it was set to accept")
    reference: list[float] = Field(description="sorted scores of held-out known images, at most 256 of them")
    reports: list[TaskReport] = Field(description="what the gate found, task by task; empty: there was no gate")
    edit: str | None = Field(None, description="what people changed in its parent, when nothing was learned")
    learned: dict[str, int] = Field(default_factory=dict, description="images a class that its task brought")
    capacity: dict[str, float] = Field(default_factory=dict, description="share of the adapters that is taken")
    seconds: float | None = Field(None, description="that learning took")
    backbone: str | None = None


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
