"""`/images`: what depends on a stored image, and erasure of one image or of all above an age.

Submitted images are stored because later tasks replay them. Only an operator removes them. A data folder that does not
keep images has them until their task ends, and features in their place after that, which are erased in the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from service.container import Container, ContainerDep
from service.erasure import Erased
from service.errors import BadRequest, ImageInUse, ImagesDiscarded, NoQueue, NotFound
from service.http.audit import audit_detail
from service.http.auth import LabelKey, OperateKey
from service.http.image_responses import CACHE_SECONDS
from service.http.problems import documented
from service.routes.thumbnails import DEFAULT_SIZE, RESPONSES, SizeQuery, thumbnail_response
from service.wire.images import ExpiredImages, ImageUses, RemovedImages
from service.wire.times import utc_time
from tasks.images import ImageReferences, Retention, StoredImage, record_erasure

log = logging.getLogger(__name__)
router = APIRouter(tags=["operators"])

ShaPath = Annotated[str, Path(pattern=r"^[0-9a-f]{64}$", description="the sha256 of the image's bytes")]
# At least a day: the images of a batch are stored before its task exists.
DaysQuery = Annotated[float, Query(ge=1, le=36500, allow_inf_nan=False, description="since a task last submitted it")]


@router.get(
    "/images/expired",
    summary="What a deletion by age would remove, and what it would keep",
    responses=documented(401, 403, 409, 422, 503),
)
async def expired(container: ContainerDep, key: OperateKey, older_than_days: DaysQuery) -> ExpiredImages:
    found = await container.ask_queue(_retention(container).expired, older_than_days)
    return ExpiredImages(
        older_than_days=older_than_days,
        images=len(found.removable),
        bytes=_total_bytes(found.removable),
        kept=len(found.needed),
        kept_bytes=_total_bytes(found.needed),
    )


@router.delete(
    "/images",
    summary="Remove images above an age that neither the current version nor an unfinished task uses",
    responses=documented(400, 401, 403, 409, 422, 503),
)
async def delete_expired(
    request: Request,
    container: ContainerDep,
    key: OperateKey,
    older_than_days: DaysQuery,
    confirm: Annotated[bool, Query(description="must be true")] = False,
) -> RemovedImages:
    """Older versions keep answering without them; later tasks train on the remaining images."""
    if not confirm:
        raise BadRequest("this cannot be undone: look at GET /images/expired first, then add confirm=true")
    async with container.erasure.counting:
        removed = await container.ask_queue(_retention(container).remove_expired, older_than_days, key.name)
        erased = await container.erasure.erase([image.sha256 for image in removed])
    audit_detail(request, older_than_days=older_than_days, images=len(removed), novelties=erased.novelties)
    log.info(
        "'%s' removed %d images older than %g days and %d novelties",
        *(key.name, len(removed), older_than_days, erased.novelties),
    )
    return _removed(removed, erased, [LISTED, *LATER])


@router.get(
    "/images/{sha256}",
    summary="Where an image is stored, and what depends on it",
    responses=documented(401, 403, 404, 410, 422, 503),
)
async def image(container: ContainerDep, key: OperateKey, sha256: ShaPath) -> ImageUses:
    references, novel = await container.ask_queue(_references, container, sha256)
    if not (references.stored or references.features or novel or references.dependents):
        raise _not_stored(container, sha256, references)
    return ImageUses(
        sha256=sha256,
        stored=references.stored is not None,
        features=references.features is not None,
        bytes=references.stored.bytes if references.stored else None,
        stored_at=utc_time(references.stored.time) if references.stored else None,
        in_memory_of=list(references.replayed_by),
        held_out_by=list(references.held_out_by),
        in_use_now=references.in_current,
        tasks=list(references.tasks),
        inbox=novel,
    )


@router.get(
    "/images/{sha256}/thumbnail",
    summary="A small JPEG of an image that a task submitted, upright",
    response_class=Response,
    responses={**RESPONSES, **documented(410)},
)
async def thumbnail(
    request: Request, container: ContainerDep, key: LabelKey, sha256: ShaPath, size: SizeQuery = DEFAULT_SIZE
) -> Response:
    images = container.images
    # Even when the client or this server has it cached: an erased image must not be shown.
    if await asyncio.to_thread(images.find, sha256) is None:
        if container.keep != "images":
            raise ImagesDiscarded(f"image {sha256} is not kept in this mode: the data folder keeps {container.keep}")
        raise _unknown(sha256)
    return await thumbnail_response(request, container, sha256, size, images.read)


@router.delete(
    "/images/{sha256}",
    summary="Erase an image: every copy on this machine",
    responses=documented(401, 403, 404, 409, 410, 422, 503),
)
async def delete(
    request: Request,
    container: ContainerDep,
    key: OperateKey,
    sha256: ShaPath,
    force: Annotated[bool, Query(description="even if versions or unfinished tasks use it")] = False,
) -> RemovedImages:
    """Removes every copy on this machine, in all servers of the data folder. `remains` names what cannot be removed.

    A version without the image keeps answering; an unfinished task without it fails.
    """
    references, novel = await container.ask_queue(_references, container, sha256)
    if (references.stored or references.features) and references.dependents and not force:
        raise ImageInUse("this image is in use: add force=true to remove it", references.dependents)
    async with container.erasure.counting:
        if references.stored is None and references.features is None and container.storage.root.exists():
            # The inbox or the memory of another server may have it: that server follows the log.
            await asyncio.to_thread(record_erasure, container.storage, [sha256], key.name)
        removed = await container.ask_queue(_retention(container).remove, sha256, key.name)
        erased = (await container.erasure.erase([sha256]))._replace(novelties=int(novel))
    if not (removed or novel or erased.recent):
        raise _not_stored(container, sha256, references)
    audit_detail(request, force=force, images=len(removed), novelties=erased.novelties)
    log.info("'%s' removed image %s with %d dependents", key.name, sha256, len(references.dependents))
    return _removed(removed, erased, [*_remains(references), *LATER])


INFLUENCE = "weights and statistics keep its influence, also in versions that are learned from now on"
LISTED = f"versions and rejected results that were trained with it: {INFLUENCE}, lists of samples its hash"
LATER = (
    "its hash: in the audit log, the log of erasures and the records of tasks that contained it",
    "memory of other servers of this data folder: for a few seconds",
    "a training that has begun: until it ends",
    f"browsers that showed it: for up to {CACHE_SECONDS} seconds",
    "backups that were made before: restore them with --erasures",
)


def _remains(references: ImageReferences) -> list[str]:
    """What cannot be erased of one image."""
    remains = []
    if versions := references.learned_by:
        named = f"version {versions[0]}" if len(versions) == 1 else f"versions {', '.join(map(str, versions))}"
        remains.append(f"{named}, trained with it: {INFLUENCE}, the list of samples its hash")
    for task in references.rejected_by:
        remains.append(
            f"rejected/{task}, trained with it: weights and statistics keep its influence; `openworld prune` removes it"
        )
    return remains


def _removed(removed: list[StoredImage], erased: Erased, remains: list[str]) -> RemovedImages:
    return RemovedImages(images=len(removed), bytes=_total_bytes(removed), **erased._asdict(), remains=remains)


def _total_bytes(images: Iterable[StoredImage]) -> int:
    return sum(image.bytes for image in images)


def _references(container: Container, sha256: str) -> tuple[ImageReferences, bool]:
    # The files tell it also of the inbox of another server.
    novel = container.novelties.images.find(sha256) is not None
    return _retention(container).references(sha256), novel


def _retention(container: Container) -> Retention:
    try:
        queue = container.queue()
    except NoQueue:  # this server accepts no tasks; a queue that is unreachable is an error
        return Retention(container.active_version.store)
    return Retention(container.active_version.store, queue.unfinished_images)


def _not_stored(container: Container, sha256: str, references: ImageReferences) -> ImagesDiscarded | NotFound:
    if container.keep == "statistics" and references.learned_by:
        return ImagesDiscarded(
            f"nothing of image {sha256} is stored but its hash; the sums of version {references.learned_by[-1]} "
            "contain it and cannot be changed without it: to remove its influence, teach its class again without it, "
            "in a new data folder"
        )
    return _unknown(sha256)


def _unknown(sha256: str) -> NotFound:
    return NotFound(f"image {sha256} is not stored: it was removed, or never submitted")
