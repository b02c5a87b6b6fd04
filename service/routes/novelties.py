"""`/novelties`: list, show, dismiss, restore and delete the inbox's novelties, and report wrong predictions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated

from cachetools import LRUCache, cached
from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import AwareDatetime

from models.errors import StoreError
from models.files import sha256_bytes
from models.versions.class_ids import changed_labels
from models.versions.store import VersionStore
from service.container import Container, ContainerDep
from service.errors import NotFound
from service.http.audit import audit_detail
from service.http.auth import LabelKey
from service.http.image_responses import image_response, not_modified
from service.http.openapi import IMAGE_CONTENT
from service.http.problems import documented
from service.inbox import Group, Inbox, Novelty, NoveltyFilter
from service.routes.thumbnails import DEFAULT_SIZE, RESPONSES, SizeQuery, thumbnail_response
from service.wire.novelties import (
    ChangedNovelties,
    GroupOrder,
    Novelties,
    NoveltyAnswer,
    NoveltyGroup,
    NoveltyGroups,
    NoveltyIds,
    NoveltyState,
    ReportedPredictions,
    ReportResult,
    ReportResults,
)
from service.wire.predictions import Nearest
from service.wire.times import utc_time
from tasks.images import record_erasure

router = APIRouter(tags=["labellers"])

AUDITED_IDS = 20


async def get_inbox(container: ContainerDep) -> Inbox:
    if container.inbox is None:
        raise NotFound(
            "this server has no inbox: OPENWORLD_SERVE_INBOX turns it off, or another server of this data folder has "
            "it open; then this server takes it over when the other one ends"
        )
    return container.inbox


InboxDep = Annotated[Inbox, Depends(get_inbox)]
IdPath = Annotated[str, Path(max_length=128, description="a novelty's id")]
StateQuery = Annotated[NoveltyState, Query(description="only novelties in this state")]
LimitQuery = Annotated[int, Query(ge=1, le=200)]


@router.get("/novelties", summary="Novel images, last seen first", responses=documented(401, 403, 404, 422, 503))
async def novelties(
    container: ContainerDep,
    key: LabelKey,
    inbox: InboxDep,
    state: StateQuery = "new",
    limit: LimitQuery = 50,
    before: Annotated[int | None, Query(ge=0, le=2**63 - 1, description="`next_cursor` of the previous page")] = None,
    group: Annotated[str | None, Query(max_length=128, description="only novelties of this group")] = None,
    version: Annotated[int | None, Query(ge=0, le=10**12, description="only answers of this version")] = None,
    client: Annotated[str | None, Query(max_length=64, description="only images that this key sent")] = None,
    since: Annotated[AwareDatetime | None, Query(description="only last seen since then, with a time zone")] = None,
) -> Novelties:
    """A cursor stays valid while novelties come and go; a novelty that is seen again moves to the front."""
    only = NoveltyFilter(group, version, client, None if since is None else since.timestamp())
    page = await asyncio.to_thread(inbox.list, state, limit, before, only)
    labels = await asyncio.to_thread(_present_labels, container, page.items)
    return Novelties.model_construct(items=[_novelty(one, labels) for one in page.items], next_cursor=page.next_cursor)


@router.get(
    "/novelties/groups", summary="Novel images, grouped by similarity", responses=documented(401, 403, 404, 422, 503)
)
async def groups(
    container: ContainerDep,
    key: LabelKey,
    inbox: InboxDep,
    state: StateQuery = "new",
    order: Annotated[GroupOrder, Query(description="largest (then newest) first, or newest first")] = "largest",
    limit: LimitQuery = 50,
    before: Annotated[
        str | None, Query(pattern=r"^[0-9]{1,18}\.[0-9]{1,18}$", description="`next_cursor` of the previous page")
    ] = None,
) -> NoveltyGroups:
    """Groups do not change while a person labels them: their members stay, and new ones join."""
    page = await asyncio.to_thread(inbox.groups, state, limit, before, order)
    samples = [sample for group in page.items for sample in group.samples]
    labels = await asyncio.to_thread(_present_labels, container, samples)
    return NoveltyGroups.model_construct(
        items=[_group(one, labels) for one in page.items], next_cursor=page.next_cursor
    )


@router.post(
    "/novelties/dismiss",
    summary="Dismiss novelties: new to dismissed",
    responses=documented(400, 401, 403, 404, 422, 503, 507),
)
async def dismiss(request: Request, key: LabelKey, inbox: InboxDep, body: NoveltyIds) -> ChangedNovelties:
    """Similar images fold into them and do not appear again. 404 when none of the novelties exists."""
    return await _set_state(request, inbox, body.ids, "new", "dismissed")


@router.post(
    "/novelties/restore",
    summary="Restore novelties: dismissed to new",
    responses=documented(400, 401, 403, 404, 422, 503, 507),
)
async def restore(request: Request, key: LabelKey, inbox: InboxDep, body: NoveltyIds) -> ChangedNovelties:
    """404 when none of the novelties exists."""
    return await _set_state(request, inbox, body.ids, "dismissed", "new")


async def _set_state(
    request: Request, inbox: Inbox, ids: Sequence[str], was: NoveltyState, state: NoveltyState
) -> ChangedNovelties:
    change = await asyncio.to_thread(inbox.set_state, ids, state, was)
    _audit_ids(request, change.changed)
    if len(change.missing) == len(set(ids)):
        raise NotFound("none of these novelties is in the inbox: they were deleted or have aged out")
    return ChangedNovelties(changed=list(change.changed), missing=list(change.missing))


@router.post(
    "/novelties",
    summary="Report recent predictions as wrong or novel: put their images into the inbox",
    responses=documented(400, 401, 403, 404, 422, 503, 507),
)
async def report(
    request: Request, container: ContainerDep, key: LabelKey, inbox: InboxDep, body: ReportedPredictions
) -> ReportResults:
    """The image becomes a new novelty, whatever the answer was. 404 when this server has none of the predictions."""
    ids = list(dict.fromkeys(body.prediction_ids))
    predictions = await asyncio.to_thread(lambda: [container.recent.get(id) for id in ids])
    found = [replace(one, note=body.note) for one in predictions if one is not None]
    if not found:
        raise NotFound(
            "this server has none of these predictions: only the last ones are kept (OPENWORLD_SERVE_RECENT_BYTES), by "
            "the server that answered unless servers share them (OPENWORLD_SERVE_SHARED)"
        )
    _audit_ids(request, [one.prediction_id for one in found])
    results = await asyncio.to_thread(lambda: [inbox.add(one, requested=True) for one in found])
    if erased := [sha256_bytes(one.data) for one in found if container.recorder.is_erased(one.data)]:
        await container.erasure.erase(erased)  # while they were added
    kept = [
        ReportResult(
            prediction_id=one.prediction_id, novelty_id=result.id, outcome=result.outcome, reason=result.reason
        )
        for one, result in zip(found, results, strict=True)
    ]
    existing = {one.prediction_id for one in found}
    return ReportResults(kept=kept, missing=[id for id in ids if id not in existing])


@router.get("/novelties/{id}", summary="One novelty", responses=documented(401, 403, 404, 422, 503))
async def novelty(container: ContainerDep, key: LabelKey, inbox: InboxDep, id: IdPath) -> NoveltyAnswer:
    found = await asyncio.to_thread(inbox.get, id)
    if found is None:
        raise _unknown(id)
    return _novelty(found, await asyncio.to_thread(_present_labels, container, [found]))


@router.delete(
    "/novelties/{id}",
    status_code=204,
    summary="Delete a novelty and its image",
    responses=documented(401, 403, 404, 422, 503),
)
async def delete(container: ContainerDep, key: LabelKey, inbox: InboxDep, id: IdPath) -> None:
    """Also from the recent predictions. A copy that a task submitted stays: see DELETE /images/{sha256}."""
    if await asyncio.to_thread(inbox.get, id) is None:
        raise _unknown(id)
    await asyncio.to_thread(record_erasure, container.storage, [id], key.name)
    await container.erasure.erase([id])


@router.get(
    "/novelties/{id}/image",
    summary="The image as it was sent",
    response_class=Response,
    responses={
        200: {"content": IMAGE_CONTENT},
        304: {"description": "unchanged"},
        **documented(401, 403, 404, 422, 503),
    },
)
async def image(request: Request, key: LabelKey, inbox: InboxDep, id: IdPath) -> Response:
    data = await asyncio.to_thread(inbox.read_image, id)
    etag = f'"{id}"'
    return not_modified(request, etag) or image_response(data, id[:12], etag)


@router.get(
    "/novelties/{id}/thumbnail",
    summary="A small JPEG of the image, upright",
    response_class=Response,
    responses=RESPONSES,
)
async def thumbnail(
    request: Request,
    container: ContainerDep,
    key: LabelKey,
    inbox: InboxDep,
    id: IdPath,
    size: SizeQuery = DEFAULT_SIZE,
) -> Response:
    # Even when the client or this server has it cached: a deleted image must not be shown.
    if await asyncio.to_thread(inbox.get, id) is None:
        raise _unknown(id)
    return await thumbnail_response(request, container, id, size, inbox.read_image)


def _audit_ids(request: Request, ids: Sequence[str]) -> None:
    """At most `AUDITED_IDS` of them: a request may have thousands."""
    audit_detail(request, count=len(ids), ids=list(ids[:AUDITED_IDS]))


def _unknown(id: str) -> NotFound:
    return NotFound(f"novelty {id[:80]!r} is not in the inbox: it may have been deleted or have aged out")


# From a version to the present labels of its classes that are renamed or merged since.
PresentLabels = Mapping[int, Mapping[str, str]]


def _present_labels(container: Container, novelties: Iterable[Novelty]) -> PresentLabels:
    """Without versions that are removed or cannot be read now: the names of their classes stay."""
    store, active = container.active_version.store, container.active_version.model.version
    labels: dict[int, Mapping[str, str]] = {}
    for version in {novelty.version for novelty in novelties} - {0, active} if active else ():
        with suppress(StoreError, OSError):
            labels[version] = _labels_since(store, version, active)
    return labels


@cached(LRUCache(1024), lock=threading.Lock())  # a version never changes
def _labels_since(store: VersionStore, version: int, active: int) -> Mapping[str, str]:
    return changed_labels(store.manifest(version), store.manifest(active))


def _novelty(novelty: Novelty, labels: PresentLabels) -> NoveltyAnswer:
    """Without validation, which is slow for a page of 200."""
    converted = {"first_seen", "last_seen", "nearest", "label"}
    present = labels.get(novelty.version, {})
    nearest: dict[str, float] = {}
    for name, share in novelty.nearest:  # classes that are merged since count together
        label = present.get(name, name)
        nearest[label] = nearest.get(label, 0.0) + share
    return NoveltyAnswer.model_construct(
        first_seen=utc_time(novelty.first_seen),
        last_seen=utc_time(novelty.last_seen),
        nearest=[
            Nearest.model_construct(label=name, share=share)
            for name, share in sorted(nearest.items(), key=lambda entry: -entry[1])
        ],
        label=None if novelty.label is None else present.get(novelty.label, novelty.label),
        **{name: getattr(novelty, name) for name in NoveltyAnswer.model_fields if name not in converted},
    )


def _group(group: Group, labels: PresentLabels) -> NoveltyGroup:
    return NoveltyGroup.model_construct(
        id=group.id,
        size=group.size,
        newest_seen=utc_time(group.newest_seen),
        ids=list(group.ids),
        samples=[_novelty(sample, labels) for sample in group.samples],
    )
