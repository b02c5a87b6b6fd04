"""`/classes`: list, rename, merge, retire and restore learned classes."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Request

from models.errors import ClassConflict, StaleParent
from models.versions.edits import Edit, label_of, publish_edit
from models.versions.manifest import Manifest
from service.container import Container, ContainerDep
from service.errors import InvalidName
from service.http.audit import audit_detail
from service.http.auth import AnyKey, LabelKey
from service.http.problems import documented
from service.wire.classes import ClassEdit, ClassEntry, Classes
from tasks.batch import canonical, confusion_problems, name_problems

router = APIRouter(tags=["labellers"])


@router.get("/classes", summary="All learned classes, with those merged or retired", responses=documented(401))
async def classes(container: ContainerDep, key: AnyKey) -> Classes:
    return _classes(await asyncio.to_thread(container.active_version.store.current_manifest))


@router.patch(
    "/classes/{name}",
    summary="Rename a class, merge it into another, retire it, or restore it",
    responses=documented(401, 403, 404, 409, 422, 507),
)
async def edit(
    request: Request,
    container: ContainerDep,
    key: LabelKey,
    name: Annotated[str, Path(max_length=200)],
    change: ClassEdit,
) -> Classes:
    """Publishes a new version without training. It can be rolled back like any other."""
    audit_detail(request, **change.model_dump(exclude_none=True))
    edit = _edit(name, change)
    manifest = await asyncio.to_thread(_publish, container, edit, key.name)
    await container.active_version.refresh()
    container.announce(manifest.version)
    return _classes(manifest)


def _edit(name: str, change: ClassEdit) -> Edit:
    if change.rename is not None:
        return Edit("rename", name, canonical(change.rename))
    if change.merge_into is not None:
        return Edit("merge", name, change.merge_into)
    return Edit("retire" if change.retired else "restore", name)


def _publish(container: Container, edit: Edit, author: str) -> Manifest:
    store = container.active_version.store
    manifest = store.current_manifest()
    if manifest is not None and edit.kind == "rename" and edit.to is not None:
        known = set(manifest.classes) - {edit.name}
        if problems := [*name_problems(edit.to), *confusion_problems([edit.to], known)]:
            raise InvalidName("; ".join(problems))
    try:
        return publish_edit(store, edit, "operator", author)
    except StaleParent as error:
        raise ClassConflict("another version was published at the same time: look at it, and try again") from error


def _classes(manifest: Manifest | None) -> Classes:
    if manifest is None:
        return Classes(version=0, classes=[])
    entries = []
    for task, names in enumerate(manifest.tasks):
        for name in names:
            goal = label_of(name, manifest.aliases)
            state = "active" if goal == name else "retired" if goal is None else "merged"
            merged_into, pending = goal if state == "merged" else None, task >= manifest.learned_tasks
            entries.append(ClassEntry(name=name, task=task, state=state, merged_into=merged_into, provisional=pending))
    return Classes(version=manifest.version, classes=entries)
