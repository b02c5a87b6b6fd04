"""Three ways to hand in a labelled batch: a form with a field a class, a zip with a folder a class, ids with labels.

All end in one `LabelledBatch`, or in one `BatchError` that lists everything that is wrong. Uploads go to temporary
files while they come; a batch is in memory while it is checked and stored, in a thread, so that few are taken at once.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Collection
from pathlib import Path
from typing import Annotated

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect

from models.errors import StoreError
from service.errors import Abandoned, BodyTooLarge, UnsupportedBody
from service.http.forms import read_form
from service.http.json_bodies import parse
from tasks.batch.check import BatchCheck, BatchLimits, LabelledBatch
from tasks.batch.class_names import shown
from tasks.batch.sources import load_batch
from tasks.errors import BatchError

MAX_JSON = 32 * 2**20
Find = Callable[[str], bytes | None]  # the image of a novelty's or a prediction's id


class Labels(BaseModel):
    """Images that the server has seen, by the ids of their novelties or predictions, under the names of classes."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"classes": {"kiwi": ["0193f1c2a4b7c0ffee120002", "9f2c...64 digits"]}}]},
    )

    classes: dict[str, Annotated[list[str], Field(max_length=20_000)]]


async def read_batch(
    request: Request, known: Collection[str], limits: BatchLimits, find: Find
) -> tuple[LabelledBatch, list[str]]:
    """The checked batch, and the ids that it named."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if kind == "multipart/form-data":
            return await _form(request, known, limits), []
        if kind in ("application/zip", "application/x-zip-compressed", "application/octet-stream"):
            return await _zip(request, known, limits), []
        if kind == "application/json":
            return await _labels(request, known, limits, find)
    except ClientDisconnect as error:
        raise Abandoned("the client went away while it sent the batch") from error
    raise UnsupportedBody(
        "send a form with a field a class (-F cat=@1.jpg), a zip (Content-Type: application/zip), or JSON with ids"
    )


async def _form(request: Request, known: Collection[str], limits: BatchLimits) -> LabelledBatch:
    chunks = _bounded(request, limits.max_bytes + 2**20 + 512 * limits.max_images)
    form = await read_form(request, chunks, max_files=limits.max_images, in_memory=False)
    try:
        return await asyncio.to_thread(_check_form, form.multi_items(), known, limits)
    finally:
        await form.close()


def _check_form(
    items: list[tuple[str, UploadFile | str]], known: Collection[str], limits: BatchLimits
) -> LabelledBatch:
    check = BatchCheck(known, limits)
    for place, (label, value) in enumerate(items, start=1):
        if isinstance(value, str):
            check.problem(f"field {label[:80]!r} is text, not a file: in curl, write -F {label[:80]}=@photo.jpg")
        else:
            check.add(label, value.filename or f"file {place}", value.file.read())
    return check.finish()


async def _zip(request: Request, known: Collection[str], limits: BatchLimits) -> LabelledBatch:
    with tempfile.NamedTemporaryFile(suffix=".zip") as file:
        async for chunk in _bounded(request, limits.max_bytes):
            await asyncio.to_thread(file.write, chunk)
        file.flush()
        try:
            return await asyncio.to_thread(load_batch, Path(file.name), known, limits)
        except BatchError as error:
            # Where the server keeps its files is nobody's business.
            raise BatchError([line.replace(shown(file.name), "the zip") for line in error.problems]) from error


async def _labels(
    request: Request, known: Collection[str], limits: BatchLimits, find: Find
) -> tuple[LabelledBatch, list[str]]:
    body = b"".join([chunk async for chunk in _bounded(request, MAX_JSON)])
    if body.count(b",") > limits.max_images + limits.max_classes:
        raise BodyTooLarge(f"a batch may have {limits.max_images} images: split it")
    labels = parse(Labels, body, '{"classes": {"cat": ["<id>", ...]}}')
    batch = await asyncio.to_thread(_check_labels, labels, known, limits, find)
    return batch, [id for ids in labels.classes.values() for id in ids]


def _check_labels(labels: Labels, known: Collection[str], limits: BatchLimits, find: Find) -> LabelledBatch:
    check = BatchCheck(known, limits)
    for label, ids in labels.classes.items():
        check.declare(label)
        for id in ids:
            try:
                data = find(id)
            except StoreError as error:
                check.unreadable(label, id[:80], str(error))
                continue
            if data is None:
                check.problem(f"no image is kept for the id {id[:80]!r}: leave it out, or send the image itself")
            else:
                check.add(label, id, data)
    return check.finish()


async def _bounded(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    seen = 0
    async for chunk in request.stream():
        seen += len(chunk)
        if seen > limit:
            raise BodyTooLarge(f"the batch has more than {limit} bytes: split it")
        yield chunk
