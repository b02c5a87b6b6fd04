"""Three ways to hand in a labelled batch: a form with a field a class, a zip with a folder a class, ids with labels.

All end in one `LabelledBatch`, or in one `BatchError` that lists every problem. Uploads go to temporary files; the
batch reads its images from there, one at a time.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect

from service.errors import Abandoned, BodyTooLarge, UnsupportedBody
from service.http.forms import read_form
from service.http.json_bodies import parse
from service.wire.tasks import Labels
from tasks.batch.check import BatchCheck, BatchLimits, LabelledBatch
from tasks.batch.sources import open_batch

MAX_JSON = 32 * 2**20
Find = Callable[[str], bytes | None]  # the image of a novelty's or a prediction's id


@asynccontextmanager
async def read_batch(
    request: Request, known: Collection[str], limits: BatchLimits, find: Find
) -> AsyncGenerator[tuple[LabelledBatch, list[str]], None]:
    """Yield the checked batch and the ids that it names. Its uploads are deleted when the context ends."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    async with AsyncExitStack() as stack:
        ids: list[str] = []
        try:
            if kind == "multipart/form-data":
                batch = await _form(request, known, limits, stack)
            elif kind in ("application/zip", "application/x-zip-compressed", "application/octet-stream"):
                batch = await _zip(request, known, limits, stack)
            elif kind == "application/json":
                batch, ids = await _labels(request, known, limits, find)
            else:
                raise UnsupportedBody(
                    "send a form with one field per class (-F cat=@1.jpg), a zip (Content-Type: application/zip), "
                    "or JSON with ids"
                )
        except ClientDisconnect as error:
            raise Abandoned("the client went away while it sent the batch") from error
        yield batch, ids


async def _form(request: Request, known: Collection[str], limits: BatchLimits, stack: AsyncExitStack) -> LabelledBatch:
    chunks = _bounded(request, limits.max_bytes + 2**20 + 512 * limits.max_images)
    form = await read_form(request, chunks, max_files=limits.max_images, in_memory=False)
    stack.push_async_callback(form.close)
    return await asyncio.to_thread(_check_form, form.multi_items(), known, limits)


def _check_form(
    items: list[tuple[str, UploadFile | str]], known: Collection[str], limits: BatchLimits
) -> LabelledBatch:
    check = BatchCheck(known, limits)
    for place, (label, value) in enumerate(items, start=1):
        if isinstance(value, str):
            check.problem(f"field {label[:80]!r} is text, not a file: in curl, write -F {label[:80]}=@photo.jpg")
        else:
            check.add(label, value.filename or f"file {place}", partial(_read_upload, value))
    return check.finish()


def _read_upload(upload: UploadFile) -> bytes:
    upload.file.seek(0)
    return upload.file.read()


async def _zip(request: Request, known: Collection[str], limits: BatchLimits, stack: AsyncExitStack) -> LabelledBatch:
    file = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".zip"))  # noqa: SIM115 (the stack closes it)
    async for chunk in _bounded(request, limits.max_bytes):
        await asyncio.to_thread(file.write, chunk)
    file.flush()
    opened = open_batch(Path(file.name), known, limits, name="the zip")
    return await asyncio.to_thread(stack.enter_context, opened)


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
                check.add(label, id, partial(_read_by_id, find, id))
            except LookupError as error:
                check.problem(str(error))
    return check.finish()


def _read_by_id(find: Find, id: str) -> bytes:
    data = find(id)
    if data is None:
        raise LookupError(f"no image is kept for the id {id[:80]!r}: leave it out, or send the image itself")
    return data


async def _bounded(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    seen = 0
    async for chunk in request.stream():
        seen += len(chunk)
        if seen > limit:
            raise BodyTooLarge(f"the batch has more than {limit} bytes: split it")
        yield chunk
