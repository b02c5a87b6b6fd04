"""The novelty inbox over HTTP: what labellers look at, put aside, and bring back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import AwareDatetime

from service.container import Container, ContainerDep
from service.erasure import forget
from service.errors import NotFound
from service.http.auth import LabelKey
from service.http.image_responses import picture_response, unchanged
from service.http.problems import documented
from service.inbox import Group, Inbox, Kept, Novelty, Only, Sighting
from service.inbox.thumbnails import LARGEST, SMALLEST
from service.wire.novelties import (
    Changed,
    GroupOrder,
    KeptPrediction,
    KeptPredictions,
    Novelties,
    NoveltyAnswer,
    NoveltyGroup,
    NoveltyGroups,
    NoveltyIds,
    NoveltyState,
    WrongPredictions,
)
from service.wire.predictions import Nearest

router = APIRouter(tags=["labellers"])

IdPath = Annotated[str, Path(max_length=128, description="a novelty's id")]
StateQuery = Annotated[NoveltyState, Query(description="what people did with them")]
LimitQuery = Annotated[int, Query(ge=1, le=200)]
_PICTURE: dict[str, Any] = {"content": {"image/jpeg": {}, "image/png": {}, "image/webp": {}}}


def inbox_of(container: Container) -> Inbox:
    if container.inbox is None:
        raise NotFound(
            "this server keeps no novel images: OPENWORLD_SERVE_INBOX turns it off, or another server of this data "
            "folder has the inbox"
        )
    return container.inbox


@router.get("/novelties", summary="Novel images, last seen first", responses=documented(401, 403, 404, 422))
async def novelties(
    container: ContainerDep,
    key: LabelKey,
    state: StateQuery = "new",
    limit: LimitQuery = 50,
    before: Annotated[int | None, Query(ge=0, le=2**63 - 1, description="`next_cursor` of the page before")] = None,
    group: Annotated[str | None, Query(max_length=128, description="only those that look alike")] = None,
    version: Annotated[int | None, Query(ge=0, le=10**12, description="only those it answered")] = None,
    client: Annotated[str | None, Query(max_length=64, description="only those that this key sent")] = None,
    since: Annotated[AwareDatetime | None, Query(description="only those last seen since, with its time zone")] = None,
) -> Novelties:
    """A cursor stays good while others come and go; one that is seen again moves to the front."""
    inbox = inbox_of(container)
    only = Only(group, version, client, None if since is None else since.timestamp())
    page = await asyncio.to_thread(inbox.list, state, limit, before, only)
    return Novelties.model_construct(items=[_novelty(one) for one in page.items], next_cursor=page.next_cursor)


@router.get("/novelties/groups", summary="Novel images by likeness", responses=documented(401, 403, 404, 422))
async def groups(
    container: ContainerDep,
    key: LabelKey,
    state: StateQuery = "new",
    order: Annotated[GroupOrder, Query(description="largest (then newest) first, or newest first")] = "largest",
    limit: LimitQuery = 50,
    before: Annotated[
        str | None, Query(pattern=r"^[0-9]{1,18}\.[0-9]{1,18}$", description="`next_cursor` of the page before")
    ] = None,
) -> NoveltyGroups:
    """A group does not reshuffle while somebody labels it: what is in it stays, and new ones join."""
    inbox = inbox_of(container)
    page = await asyncio.to_thread(inbox.groups, state, limit, before, order)
    return NoveltyGroups.model_construct(items=[_group(one) for one in page.items], next_cursor=page.next_cursor)


@router.post(
    "/novelties/dismiss", summary="Put novelties aside: new to dismissed", responses=documented(400, 401, 403, 404, 422)
)
async def dismiss(container: ContainerDep, key: LabelKey, body: NoveltyIds) -> Changed:
    """More of the same folds into them silently. 404 when not one of them is there."""
    return await _move(container, body.ids, "new", "dismissed")


@router.post(
    "/novelties/restore",
    summary="Bring novelties back: dismissed to new",
    responses=documented(400, 401, 403, 404, 422),
)
async def restore(container: ContainerDep, key: LabelKey, body: NoveltyIds) -> Changed:
    """404 when not one of them is there."""
    return await _move(container, body.ids, "dismissed", "new")


async def _move(container: Container, ids: Sequence[str], was: NoveltyState, state: NoveltyState) -> Changed:
    moved = await asyncio.to_thread(inbox_of(container).move, ids, was, state)
    if len(moved.missing) == len(set(ids)):
        raise NotFound("not one of these novelties is in the inbox: they were deleted, or have aged out")
    return Changed(changed=list(moved.moved), missing=list(moved.missing))


@router.post(
    "/novelties",
    summary="That answer is wrong, or that is novel: put recent predictions into the inbox",
    responses=documented(400, 401, 403, 404, 422),
)
async def keep(container: ContainerDep, key: LabelKey, body: WrongPredictions) -> KeptPredictions:
    """The image itself is kept as new, whatever it was answered. 404 when this server has not one of them any more."""
    inbox = inbox_of(container)
    ids = list(dict.fromkeys(body.prediction_ids))
    found = [replace(one, note=body.note) for id in ids if (one := container.recent.get(id)) is not None]
    if not found:
        raise NotFound(
            "this server has none of these predictions any more: only the last ones are kept, by the server that "
            "answered (OPENWORLD_SERVE_RECENT_BYTES)"
        )
    kept = await asyncio.to_thread(_keep, inbox, found)
    had = {one.prediction_id for one in found}
    answers = [
        KeptPrediction(
            prediction_id=one.prediction_id, novelty_id=result.id, outcome=result.outcome, reason=result.reason
        )
        for one, result in zip(found, kept, strict=True)
    ]
    return KeptPredictions(kept=answers, missing=[id for id in ids if id not in had])


def _keep(inbox: Inbox, sightings: Sequence[Sighting]) -> list[Kept]:
    return [inbox.add(sighting, asked=True) for sighting in sightings]


@router.get("/novelties/{id}", summary="One novelty", responses=documented(401, 403, 404, 422))
async def novelty(container: ContainerDep, key: LabelKey, id: IdPath) -> NoveltyAnswer:
    found = await asyncio.to_thread(inbox_of(container).get, id)
    if found is None:
        raise _unknown(id)
    return _novelty(found)


@router.delete(
    "/novelties/{id}",
    status_code=204,
    summary="Forget a novelty, its image too",
    responses=documented(401, 403, 404, 422),
)
async def delete(container: ContainerDep, key: LabelKey, id: IdPath) -> None:
    """Also out of the recent predictions. A copy that was handed in with a task stays: see DELETE /images/{sha256}."""
    inbox_of(container)
    if not await forget(container, [id]):
        raise _unknown(id)


@router.get(
    "/novelties/{id}/image",
    summary="The image as it was sent",
    response_class=Response,
    responses={200: _PICTURE, 304: {"description": "unchanged"}, **documented(401, 403, 404, 422)},
)
async def image(request: Request, container: ContainerDep, key: LabelKey, id: IdPath) -> Response:
    data = await asyncio.to_thread(inbox_of(container).read_image, id)
    etag = f'"{id}"'
    return unchanged(request, etag) or picture_response(data, id[:12], etag)


@router.get(
    "/novelties/{id}/thumbnail",
    summary="A small JPEG of it, upright",
    response_class=Response,
    responses={
        200: {"content": {"image/jpeg": {}}},
        304: {"description": "unchanged"},
        **documented(401, 403, 404, 413, 422),
    },
)
async def thumbnail(
    request: Request,
    container: ContainerDep,
    key: LabelKey,
    id: IdPath,
    size: Annotated[int, Query(ge=SMALLEST, le=LARGEST, description="pixels of the longer side, at most")] = 256,
) -> Response:
    inbox = inbox_of(container)
    # Whatever is cached here or there: what was deleted is gone.
    if await asyncio.to_thread(inbox.get, id) is None:
        raise _unknown(id)
    etag = f'"{id}-{size}"'
    if (same := unchanged(request, etag)) is not None:
        return same
    data = await container.thumbnails.get(id, size, inbox.read_image)
    return picture_response(data, f"{id[:12]}-{size}", etag)


def _unknown(id: str) -> NotFound:
    return NotFound(f"novelty {id[:80]!r} is not in the inbox: it may have been deleted or have aged out")


def _novelty(novelty: Novelty) -> NoveltyAnswer:
    """Without validation, which is slow for a page of 200."""
    converted = {"first_seen", "last_seen", "nearest"}
    return NoveltyAnswer.model_construct(
        first_seen=_time(novelty.first_seen),
        last_seen=_time(novelty.last_seen),
        nearest=[Nearest.model_construct(label=name, share=share) for name, share in novelty.nearest],
        **{name: getattr(novelty, name) for name in NoveltyAnswer.model_fields if name not in converted},
    )


def _group(group: Group) -> NoveltyGroup:
    return NoveltyGroup.model_construct(
        id=group.id,
        size=group.size,
        newest_seen=_time(group.newest_seen),
        ids=list(group.ids),
        samples=[_novelty(sample) for sample in group.samples],
    )


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
