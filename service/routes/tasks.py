"""`/tasks`: submit labelled batches and follow them until they are learned."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from models.errors import StoreError
from models.versions.class_ids import learned_labels
from models.versions.data_format import open_data_folder
from models.versions.edits import unusable_labels
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from service.container import Container, ContainerDep
from service.errors import ImagesDiscarded
from service.http.audit import audit_detail
from service.http.auth import AnyKey, LabelKey
from service.http.batch_bodies import ReceivedBatch, receive_batch
from service.http.openapi import BINARY
from service.http.problems import documented
from service.task_events import TaskStream
from service.wire.tasks import Labels, TaskAnswer, TaskPage
from tasks.batch import LabelledBatch, check_summed
from tasks.discarding import discard_task, record_queue, withdraw_batch
from tasks.errors import BatchError, IdempotencyConflict, QueueFull, QueueUnavailable
from tasks.queue import STATES, Task, TaskQueue, TaskState

log = logging.getLogger(__name__)
router = APIRouter(tags=["labellers"])

TaskIdPath = Annotated[str, Path(max_length=128, description="a task's id")]
FORM = {"type": "object", "additionalProperties": {"type": "array", "items": BINARY}}
REQUEST_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "A form with a field per class, a zip with a folder per class, or JSON with ids",
        "content": {
            "multipart/form-data": {"schema": FORM},
            "application/zip": {"schema": BINARY},
            "application/json": {"schema": Labels.model_json_schema()},
        },
    }
}


@router.post(
    "/tasks",
    status_code=202,
    response_model=TaskAnswer,
    summary="Teach: submit labelled images, to be learned as the next task",
    responses=documented(400, 401, 403, 408, 409, 413, 415, 422, 429, 503, 507),
    openapi_extra=REQUEST_BODY,
)
async def submit(
    request: Request,
    response: Response,
    container: ContainerDep,
    key: LabelKey,
    idempotency_key: Annotated[
        str | None, Header(max_length=255, description="a repeated request returns the same task")
    ] = None,
) -> TaskAnswer:
    """202: the task will be learned exactly once, or fail with a reason, even if processes are killed."""
    queue = container.queue()
    with container.uploads.enter(key.name) as permit:
        folder, limits, pace = container.settings.data, container.batch_limits, container.upload_pace
        await asyncio.to_thread(open_data_folder, container.storage)
        async with receive_batch(request, limits, permit, pace, folder, container.find_image) as received:
            checked = await container.uploads.run(key.name, lambda: _check_and_store(container, received))
            batch = checked.batch
            task = Task.of(batch, key.name, checked.version, checked.warnings)
            learned = await asyncio.to_thread(_is_learned, container, task.id)
            try:
                submitted = await container.ask_queue(partial(queue.submit, task, idempotency_key, learned=learned))
            except (QueueFull, IdempotencyConflict):
                await _remove(container, partial(withdraw_batch, task=task, since=task.created.timestamp()))
                raise
            if submitted.task.ended:  # it has ended before, and needs no images
                await _discard(container, submitted.task, time.time())
            elif container.keep != "images":
                await asyncio.to_thread(_store_again, container, batch)
    audit_detail(request, submitted.task.id, images=submitted.task.counts, fresh=submitted.fresh)
    try:
        # Also by hash: an image that was uploaded may be in the inbox.
        done = [*received.ids, *(image.sha256 for image in batch.images)]
        await asyncio.to_thread(container.novelties.mark_labelled, done)
    except (StoreError, QueueUnavailable) as error:  # the task is accepted all the same
        log.warning("the inbox cannot mark the images of task %s as labelled: %s", submitted.task.id, error)
    response.headers["Location"] = f"/tasks/{submitted.task.id}"
    return TaskAnswer.model_validate(submitted.task).model_copy(update={"fresh": submitted.fresh})


class _Checked(NamedTuple):
    batch: LabelledBatch
    version: int  # the current one, 0 before the first
    warnings: list[str]


def _check_and_store(container: Container, received: ReceivedBatch) -> _Checked:
    """The batch, whose images are stored: every accepted task has its images."""
    store = container.active_version.store
    manifest = store.current_manifest()
    known = manifest.active_classes if manifest else []
    batch = received.check(known)
    if manifest and (problems := unusable_labels(manifest, batch.classes)):
        raise BatchError(problems)
    if container.keep == "statistics":
        check_summed({name: len(keys) for name, keys in batch.keys.items()}, {}, {})
    record_queue(container.storage, container.queue())
    _store(container, batch)
    learned = _learned_labels(store, manifest, batch) if manifest else {}
    return _Checked(batch, manifest.version if manifest else 0, batch.warnings(known, learned))


def _learned_labels(store: VersionStore, manifest: Manifest, batch: LabelledBatch) -> dict[str, str]:
    """The label of each image of the batch that the version knows; none if it cannot be read."""
    try:
        samples = store.samples(manifest.version, manifest)
    except StoreError as error:
        log.warning("images of a batch that were learned under another label are not reported: %s", error)
        return {}
    return learned_labels(samples, manifest, {image.sha256 for image in batch.images})


def _is_learned(container: Container, task_id: str) -> bool:
    """Whether the current version or one of its ancestors has learned the task; after a roll back it may not have."""
    return container.active_version.store.find_task(task_id) is not None


def _store(container: Container, batch: LabelledBatch) -> None:
    container.images.put_all(batch.read(image.sha256) for image in batch.images)


def _store_again(container: Container, batch: LabelledBatch) -> None:
    """Store what the end of another task with the same images has discarded before this one was queued."""
    found = container.images.find_all([image.sha256 for image in batch.images])
    container.images.put_all(batch.read(image.sha256) for image in batch.images if image.sha256 not in found)


def _check_images(container: Container, queue: TaskQueue, task_id: str, learned: bool) -> None:
    """ImagesDiscarded if the task has ended, could be retried, and has lost images to its end."""
    task = queue.get(task_id)
    if not task.ended or (task.state == "published" and learned):
        return
    images = task.images
    if lost := len(images - container.images.find_all(images).keys()):
        raise ImagesDiscarded(
            f"{lost} of {len(images)} images of task {task_id} are gone: this data folder keeps {container.keep}, so "
            "images are discarded when their task ends; submit the images again"
        )


async def _discard(container: Container, task: Task, since: float) -> None:
    """Discard the images of a task that will not use them; a trainer searches for what an error leaves."""
    await _remove(container, partial(discard_task, task=task, since=since))


async def _remove(container: Container, remove: Callable[[VersionStore, TaskQueue], None]) -> None:
    if container.keep == "images":
        return
    try:
        await container.ask_queue(remove, container.active_version.store, container.queue())
    except (OSError, StoreError, QueueUnavailable) as error:
        log.error("images of a task remain for now: %s", error)


@router.get("/tasks", summary="Tasks, newest first", responses=documented(401, 404, 422, 503))
async def tasks(
    container: ContainerDep,
    key: AnyKey,
    state: Annotated[list[TaskState] | None, Query(description="only tasks in these states")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    before: Annotated[str | None, Query(max_length=128, description="the last id of the previous page")] = None,
) -> TaskPage:
    queue = container.queue()
    found = await container.ask_queue(queue.list_tasks, limit, before, state or STATES)
    return TaskPage(
        tasks=[TaskAnswer.model_validate(task) for task in found],
        next=found[-1].id if len(found) == limit else None,
        counts=await container.ask_queue(queue.counts),
        paused=await container.ask_queue(lambda: queue.paused),
    )


@router.get("/tasks/{task_id}", summary="One task: state, progress, result", responses=documented(401, 404, 503))
async def task(container: ContainerDep, key: AnyKey, task_id: TaskIdPath) -> TaskAnswer:
    return TaskAnswer.model_validate(await container.ask_queue(container.queue().get, task_id))


@router.post(
    "/tasks/{task_id}/cancel", summary="Cancel a task that has not ended", responses=documented(401, 403, 404, 409, 503)
)
async def cancel(container: ContainerDep, key: LabelKey, task_id: TaskIdPath) -> TaskAnswer:
    cancelled = await container.ask_queue(container.queue().cancel, task_id)
    if cancelled.ended:  # otherwise its worker ends it
        # Images that were stored since may be of a batch with the right labels, which is about to be queued.
        await _discard(container, cancelled, cancelled.created.timestamp())
    return TaskAnswer.model_validate(cancelled)


@router.post(
    "/tasks/{task_id}/retry",
    summary="Queue a failed, rejected or cancelled task again, or one that a roll back removed",
    responses=documented(401, 403, 404, 409, 410, 429, 503),
)
async def retry(container: ContainerDep, key: LabelKey, task_id: TaskIdPath) -> TaskAnswer:
    queue, learned = container.queue(), await asyncio.to_thread(_is_learned, container, task_id)
    if container.keep != "images":
        await container.ask_queue(_check_images, container, queue, task_id, learned)
    return TaskAnswer.model_validate(await container.ask_queue(partial(queue.retry, task_id, learned=learned)))


@router.get(
    "/tasks/{task_id}/events",
    summary="Follow a task (server-sent events, one per change, until it ends)",
    responses={
        200: {"content": {"text/event-stream": {}}},
        204: {"description": "The task has ended with the event that Last-Event-ID names"},
        **documented(401, 404, 429, 503),
    },
    response_class=StreamingResponse,
)
async def events(
    container: ContainerDep,
    key: AnyKey,
    task_id: TaskIdPath,
    last_event_id: Annotated[
        str | None, Header(max_length=64, description="the last event that the client knows: resume after it")
    ] = None,
) -> Response:
    """Every event contains the whole task. A client that reads slowly skips events, but never the last one."""
    stream = await container.task_events.open(container.queue(), task_id, key.name)
    if stream.has_nothing_after(last_event_id):
        stream.close()
        return Response(status_code=204)
    return _EventStream(stream, last_event_id)


class _EventStream(StreamingResponse):
    """Closes its stream also if the client disconnects before the first event."""

    def __init__(self, stream: TaskStream, last_id: str | None) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(stream.follow(last_id), media_type="text/event-stream", headers=headers)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()
