"""Stored images over HTTP, for privacy: who needs one, and removing one or all beyond an age.

Images that tasks brought are kept because later tasks replay them. They go only when an operator says so.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Path, Query

from service.container import Container, ContainerDep
from service.erasure import forget
from service.errors import BadRequest, ImageInUse, NoQueue, NotFound
from service.http.auth import OperateKey
from service.http.problems import documented
from service.wire.images import ExpiredImages, ImageUses, RemovedImages
from tasks.images.retention import Removed, Retention, Uses

log = logging.getLogger(__name__)
router = APIRouter(tags=["operators"])

ShaPath = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="the sha256 of the image's bytes")]
# Not less than a day: a batch that is being handed in just now is named by no task yet.
DaysQuery = Annotated[float, Query(ge=1, le=36500, allow_inf_nan=False, description="since a task last brought it")]


@router.get(
    "/images/expired",
    summary="What a deletion by age would remove, and what it would keep",
    responses=documented(401, 403, 409, 422, 503),
)
async def expired(container: ContainerDep, key: OperateKey, older_than_days: DaysQuery) -> ExpiredImages:
    found = await asyncio.to_thread(_retention(container).expired, older_than_days)
    return ExpiredImages(
        older_than_days=older_than_days,
        images=len(found.removable),
        bytes=found.bytes,
        kept=found.kept,
        kept_bytes=found.kept_bytes,
    )


@router.delete(
    "/images",
    summary="Remove images beyond an age that neither the current version nor an unfinished task needs",
    responses=documented(400, 401, 403, 409, 422, 503),
)
async def delete_expired(
    container: ContainerDep,
    key: OperateKey,
    older_than_days: DaysQuery,
    confirm: Annotated[bool, Query(description="yes, remove them")] = False,
) -> RemovedImages:
    """Older versions go on answering without them; a later task is learned with what is left."""
    if not confirm:
        raise BadRequest("this cannot be undone: look at GET /images/expired first, then add confirm=true")
    removed = await asyncio.to_thread(_retention(container).remove_expired, older_than_days)
    novelties = await forget(container, removed.sha256s)
    log.info(
        "%s removed %d images older than %g days, and %d novelties",
        *(key.name, len(removed.sha256s), older_than_days, novelties),
    )
    return _removed(removed, novelties)


@router.get(
    "/images/{sha256}",
    summary="Where an image is kept, and who needs it",
    responses=documented(401, 403, 404, 422, 503),
)
async def image(container: ContainerDep, key: OperateKey, sha256: ShaPath) -> ImageUses:
    uses, novel = await asyncio.to_thread(_look, container, sha256)
    if not (uses.stored or novel or uses.dependents):
        raise _unknown(sha256)
    return ImageUses(
        sha256=uses.sha256,
        stored=uses.stored is not None,
        bytes=uses.stored.bytes if uses.stored else None,
        stored_at=datetime.fromtimestamp(uses.stored.time, UTC) if uses.stored else None,
        in_memory_of=list(uses.memory),
        held_out_by=list(uses.held_out),
        in_use_now=uses.current,
        tasks=list(uses.tasks),
        inbox=novel,
    )


@router.delete(
    "/images/{sha256}",
    summary="Remove an image, from the inbox as well",
    responses=documented(401, 403, 404, 409, 422, 503),
)
async def delete(
    container: ContainerDep,
    key: OperateKey,
    sha256: ShaPath,
    force: Annotated[bool, Query(description="even if versions or unfinished tasks need it")] = False,
) -> RemovedImages:
    """A version that has lost an image goes on answering; an unfinished task that has lost one fails."""
    uses, novel = await asyncio.to_thread(_look, container, sha256)
    if not (uses.stored or novel):
        raise _unknown(sha256)
    if uses.dependents and not force:
        raise ImageInUse("others need this image: add force=true to remove it all the same", uses.dependents)
    removed = await asyncio.to_thread(_retention(container).remove, sha256)
    novelties = await forget(container, [sha256])
    log.info("%s removed the image %s, which %d needed", key.name, sha256, len(uses.dependents))
    return _removed(removed, novelties)


def _removed(removed: Removed, novelties: int) -> RemovedImages:
    return RemovedImages(images=len(removed.sha256s), bytes=removed.bytes, novelties=novelties)


def _look(container: Container, sha256: str) -> tuple[Uses, bool]:
    novel = container.inbox is not None and container.inbox.get(sha256) is not None
    return _retention(container).uses(sha256), novel


def _retention(container: Container) -> Retention:
    try:
        queue = container.queue()
    except NoQueue:  # nobody can hand in a task here; one that cannot be reached is another matter, and an error
        return Retention(container.active_version.store)
    return Retention(container.active_version.store, queue.unfinished_images)


def _unknown(sha256: str) -> NotFound:
    return NotFound(f"image {sha256} is not kept here: it was removed, or never brought by a task")
