"""`/tasks`: submit labelled batches and follow them until they are learned."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from models.errors import StoreError
from models.versions.data_format import open_data_folder
from models.versions.edits import unusable_labels
from service.container import Container, ContainerDep
from service.http.auth import AnyKey, LabelKey
from service.http.batch_bodies import read_batch
from service.http.openapi import BINARY
from service.http.problems import documented
from service.wire.tasks import Labels, TaskAnswer, TaskPage
from tasks.batch import LabelledBatch
from tasks.errors import BatchError, QueueUnavailable, UnknownTask
from tasks.images import ImageStore
from tasks.queue import STATES, Task, TaskState

log = logging.getLogger(__name__)
router = APIRouter(tags=["labellers"])

EVENT_POLL_SECONDS = 0.5
HEARTBEAT_SECONDS = 15.0  # proxies close a connection that is silent for longer

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
    responses=documented(400, 401, 403, 409, 413, 415, 422, 429, 503),
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
    manifest = await asyncio.to_thread(container.active_version.store.current_manifest)
    known = manifest.active_classes if manifest else []
    async with (
        container.uploads,
        read_batch(request, known, container.batch_limits, container.find_image) as (batch, ids),
    ):
        if manifest and (problems := unusable_labels(manifest, batch.classes)):
            raise BatchError(problems)
        await asyncio.to_thread(_store, container, batch)
    task = Task.of(batch, key.name)
    submitted = await asyncio.to_thread(queue.submit, task, idempotency_key)
    if container.inbox is not None:
        # Also by hash: an image that was uploaded may be in the inbox.
        done = [*ids, *(image.sha256 for image in batch.images)]
        try:
            await asyncio.to_thread(container.inbox.set_state, done, "labelled")
        except StoreError as error:  # the task is accepted all the same
            log.warning("the inbox cannot mark the images of task %s as labelled: %s", submitted.task.id, error)
    response.headers["Location"] = f"/tasks/{submitted.task.id}"
    return TaskAnswer.model_validate(submitted.task).model_copy(
        update={"fresh": submitted.fresh, "warnings": batch.warnings(known)}
    )


def _store(container: Container, batch: LabelledBatch) -> None:
    """Store the images before the task is queued, so that every accepted task has its images."""
    open_data_folder(container.settings.data)
    images = ImageStore(container.settings.data)
    for image in batch.images:
        images.put(batch.read(image.sha256))


@router.get("/tasks", summary="Tasks, newest first", responses=documented(401, 404, 422, 503))
async def tasks(
    container: ContainerDep,
    key: AnyKey,
    state: Annotated[list[TaskState] | None, Query(description="only tasks in these states")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    before: Annotated[str | None, Query(max_length=128, description="the last id of the previous page")] = None,
) -> TaskPage:
    queue = container.queue()
    found = await asyncio.to_thread(queue.list_tasks, limit, before, state or STATES)
    return TaskPage(
        tasks=[TaskAnswer.model_validate(task) for task in found],
        next=found[-1].id if len(found) == limit else None,
        counts=await asyncio.to_thread(queue.counts),
    )


@router.get("/tasks/{task_id}", summary="One task: state, progress, result", responses=documented(401, 404, 503))
async def task(container: ContainerDep, key: AnyKey, task_id: TaskIdPath) -> TaskAnswer:
    return TaskAnswer.model_validate(await asyncio.to_thread(container.queue().get, task_id))


@router.post(
    "/tasks/{task_id}/cancel", summary="Cancel a task that has not ended", responses=documented(401, 403, 404, 409, 503)
)
async def cancel(container: ContainerDep, key: LabelKey, task_id: TaskIdPath) -> TaskAnswer:
    return TaskAnswer.model_validate(await asyncio.to_thread(container.queue().cancel, task_id))


@router.post(
    "/tasks/{task_id}/retry",
    summary="Queue a failed, rejected or cancelled task again",
    responses=documented(401, 403, 404, 409, 429, 503),
)
async def retry(container: ContainerDep, key: LabelKey, task_id: TaskIdPath) -> TaskAnswer:
    return TaskAnswer.model_validate(await asyncio.to_thread(container.queue().retry, task_id))


@router.get(
    "/tasks/{task_id}/events",
    summary="Follow a task (server-sent events, one per change, until it ends)",
    responses={200: {"content": {"text/event-stream": {}}}, **documented(401, 404, 503)},
    response_class=StreamingResponse,
)
async def events(container: ContainerDep, key: AnyKey, task_id: TaskIdPath) -> StreamingResponse:
    first = await asyncio.to_thread(container.queue().get, task_id)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_follow(container, first), media_type="text/event-stream", headers=headers)


async def _follow(container: Container, task: Task) -> AsyncIterator[str]:
    queue = container.queue()
    sent_at, last = 0.0, ""
    while True:
        text = TaskAnswer.model_validate(task).model_dump_json()
        if text != last:
            last, sent_at = text, time.monotonic()
            yield f"event: {task.state}\ndata: {text}\n\n"
        elif time.monotonic() - sent_at > HEARTBEAT_SECONDS:
            sent_at = time.monotonic()
            yield ": heartbeat\n\n"
        if task.ended or container.draining:  # open event streams must not delay a shutdown
            return
        await asyncio.sleep(EVENT_POLL_SECONDS)
        with suppress(QueueUnavailable):  # Redis may come back; until then the last known state stands
            try:
                task = await asyncio.to_thread(queue.get, task.id)
            except UnknownTask:
                return  # removed from the history
