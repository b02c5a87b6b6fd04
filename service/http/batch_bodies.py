"""The labelled batch of a request: a form with a field per class, a zip with a folder per class, or JSON with ids.

Each becomes a `LabelledBatch`, or a `BatchError` that lists every problem. Uploads, and the images that ids
name, are spooled to temporary files; the batch reads its images from there, one at a time.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from starlette.datastructures import UploadFile
from starlette.requests import Request

from models.errors import OpenWorldError
from service.errors import BodyTooLarge, UnsupportedBody
from service.http.bodies import SpooledPart, body_chunks, content_type, parse_json_body, read_form
from service.wire.tasks import Labels
from tasks.batch import BatchCheck, BatchLimits, LabelledBatch, open_batch

ADVICE = "split the batch"
MAX_JSON = 32 * 2**20
MAX_FORM_OVERHEAD, MAX_PART_OVERHEAD = 2**20, 512  # bytes that a multipart form adds to its images
FindImage = Callable[[str], bytes | None]  # by the id of a novelty or of a recent prediction


@asynccontextmanager
async def read_batch(
    request: Request, known: Collection[str], limits: BatchLimits, find_image: FindImage
) -> AsyncGenerator[tuple[LabelledBatch, list[str]], None]:
    """Yield the checked batch and the ids that it names. Its uploads are deleted when the context ends."""
    kind, ids = content_type(request), list[str]()
    async with AsyncExitStack() as stack:
        if kind == "multipart/form-data":
            batch = await _read_form(request, known, limits, stack)
        elif kind in ("application/zip", "application/x-zip-compressed", "application/octet-stream"):
            batch = await _read_zip(request, known, limits, stack)
        elif kind == "application/json":
            batch, ids = await _read_labels(request, known, limits, find_image, stack)
        else:
            raise UnsupportedBody(
                "send a form with one field per class (-F cat=@1.jpg), a zip (Content-Type: application/zip), "
                "or JSON with ids"
            )
        yield batch, ids


async def _read_form(
    request: Request, known: Collection[str], limits: BatchLimits, stack: AsyncExitStack
) -> LabelledBatch:
    overhead = MAX_FORM_OVERHEAD + MAX_PART_OVERHEAD * limits.max_images
    chunks = body_chunks(request, limits.max_bytes + overhead, ADVICE)
    spool = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (the stack closes it)
    form = await read_form(request, chunks, max_files=limits.max_images, spool=spool)
    return await asyncio.to_thread(_check_form, form.multi_items(), known, limits)


def _check_form(
    items: list[tuple[str, UploadFile | str]], known: Collection[str], limits: BatchLimits
) -> LabelledBatch:
    check = BatchCheck(known, limits)
    for position, (label, value) in enumerate(items, start=1):
        if isinstance(value, str):
            check.problem(f"field {label[:80]!r} is text, not a file: in curl, write -F {label[:80]}=@photo.jpg")
        else:
            check.add(label, value.filename or f"file {position}", value.file.read)
    return check.finish()


async def _read_zip(
    request: Request, known: Collection[str], limits: BatchLimits, stack: AsyncExitStack
) -> LabelledBatch:
    file = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".zip"))  # noqa: SIM115 (the stack closes it)
    async for chunk in body_chunks(request, limits.max_bytes, ADVICE):
        await asyncio.to_thread(file.write, chunk)
    file.flush()
    opened = open_batch(Path(file.name), known, limits, name="the zip")
    return await asyncio.to_thread(stack.enter_context, opened)


async def _read_labels(
    request: Request, known: Collection[str], limits: BatchLimits, find_image: FindImage, stack: AsyncExitStack
) -> tuple[LabelledBatch, list[str]]:
    body = b"".join([chunk async for chunk in body_chunks(request, MAX_JSON, ADVICE)])
    if body.count(b",") > limits.max_images + limits.max_classes:
        raise BodyTooLarge(f"a batch may have {limits.max_images} images: {ADVICE}")
    labels = parse_json_body(Labels, body, '{"classes": {"cat": ["<id>", ...]}}')
    spool = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (the stack closes it)
    batch = await asyncio.to_thread(_check_labels, labels, known, limits, find_image, spool)
    return batch, [id for ids in labels.classes.values() for id in ids]


def _check_labels(
    labels: Labels, known: Collection[str], limits: BatchLimits, find_image: FindImage, spool: BinaryIO
) -> LabelledBatch:
    check, copies = BatchCheck(known, limits), dict[str, SpooledPart]()
    for label, ids in labels.classes.items():
        check.declare(label)
        for id in ids:
            try:
                check.add(label, id, partial(_read_by_id, find_image, id, copies, spool))
            except LookupError as error:
                check.problem(str(error))
    return check.finish()


def _read_by_id(find_image: FindImage, id: str, copies: dict[str, SpooledPart], spool: BinaryIO) -> bytes:
    """Find an image once and copy it: the inbox or the recent predictions may drop it before it is read again."""
    if id in copies:
        return copies[id].read()
    data = find_image(id)
    if data is None:
        raise LookupError(f"the image of id {id[:80]!r} is not kept: leave it out, or send the image itself")
    part = SpooledPart(spool)
    try:
        part.write(data)
    except OSError as error:  # not a problem of the batch
        raise OpenWorldError(f"the image of id {id[:80]!r} cannot be spooled: {error}") from error
    copies[id] = part
    return data
