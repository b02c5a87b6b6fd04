"""The labelled batch of a request: a form with a field per class, a zip with a folder per class, or JSON with ids.

A batch is received first and checked later: its body, and the images that ids name, are spooled to an unnamed file.
The check makes it a `LabelledBatch`, which reads its images from there, one at a time, or a `BatchError` that lists
every problem.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from starlette.datastructures import UploadFile
from starlette.requests import Request

from models.errors import OpenWorldError
from service.errors import BodyTooLarge, UnsupportedBody
from service.http.bodies import Pace, SpooledPart, body_chunks, content_type, parse_json_body, read_form
from service.http.limits import Permit
from service.wire.tasks import Labels
from tasks.batch import BatchCheck, BatchLimits, LabelledBatch, open_zip

ADVICE = "split the batch"
ZIP_TYPES = ("application/zip", "application/x-zip-compressed", "application/octet-stream")
MAX_JSON = 32 * 2**20
MAX_FORM_OVERHEAD, MAX_PART_OVERHEAD = 2**20, 512  # bytes
FindImage = Callable[[str], bytes | None]  # by the id of a novelty or of a recent prediction
FormItems = list[tuple[str, UploadFile | str]]


def form_overhead(limits: BatchLimits) -> int:
    """The bytes that a multipart form may add to its images."""
    return MAX_FORM_OVERHEAD + MAX_PART_OVERHEAD * limits.max_images


class ReceivedBatch:
    """The body of a request, spooled to a file. `check` reads it; call it in a thread, once."""

    def __init__(self, content: FormItems | Labels | None, spool: BinaryIO, limits: BatchLimits, find: FindImage):
        self._content, self._spool, self._limits, self._find_image = content, spool, limits, find
        self._stack = ExitStack()

    @property
    def ids(self) -> list[str]:
        """The ids that the batch names."""
        labels = self._content
        return [id for ids in labels.classes.values() for id in ids] if isinstance(labels, Labels) else []

    def check(self, known: Collection[str]) -> LabelledBatch:
        """The batch, which can be read until the request ends; BatchError lists all problems."""
        if self._content is None:
            return self._stack.enter_context(open_zip(self._spool, known, self._limits, "the zip"))
        check = BatchCheck(known, self._limits)
        if isinstance(self._content, Labels):
            self._add_labels(check, self._content)
        else:
            _add_form(check, self._content)
        return check.finish()

    def _add_labels(self, check: BatchCheck, labels: Labels) -> None:
        copies = dict[str, SpooledPart]()
        for label, ids in labels.classes.items():
            check.declare(label)
            for id in ids:
                try:
                    check.add(label, id, partial(self._read_by_id, id, copies))
                except LookupError as error:
                    check.problem(str(error), label)

    def _read_by_id(self, id: str, copies: dict[str, SpooledPart]) -> bytes:
        """Find an image once and copy it: the inbox or the recent predictions may drop it before it is read again."""
        if id in copies:
            return copies[id].read()
        data = self._find_image(id)
        if data is None:
            raise LookupError(f"the image of id {id[:80]!r} is not kept: leave it out, or send the image itself")
        part = SpooledPart(self._spool)
        try:
            part.write(data)
        except OSError as error:  # not a problem of the batch
            raise OpenWorldError(f"the image of id {id[:80]!r} cannot be spooled: {error}") from error
        copies[id] = part
        return data


def _add_form(check: BatchCheck, items: FormItems) -> None:
    for position, (label, value) in enumerate(items, start=1):
        if isinstance(value, str):
            check.problem(f"field {label[:80]!r} is text, not a file: in curl, write -F {label[:80]}=@photo.jpg")
        else:
            check.add(label, value.filename or f"file {position}", value.file.read)


@asynccontextmanager
async def receive_batch(
    request: Request, limits: BatchLimits, permit: Permit, pace: Pace, folder: Path, find_image: FindImage
) -> AsyncGenerator[ReceivedBatch, None]:
    """Spool the body to a file in `folder`, which no crash leaves behind: it has no name."""
    kind = content_type(request)
    if kind not in ("multipart/form-data", "application/json", *ZIP_TYPES):
        raise UnsupportedBody(
            "send a form with one field per class (-F cat=@1.jpg), a zip (Content-Type: application/zip), "
            "or JSON with ids"
        )
    with cast(BinaryIO, tempfile.TemporaryFile(dir=folder)) as spool:
        content: FormItems | Labels | None = None
        if kind == "multipart/form-data":
            chunks = body_chunks(request, limits.max_bytes + form_overhead(limits), ADVICE, permit, pace)
            form = await read_form(request, chunks, max_files=limits.max_images, spool=spool)
            content = form.multi_items()
        elif kind == "application/json":
            content = await _receive_labels(request, limits, permit, pace)
        else:
            async for chunk in body_chunks(request, limits.max_bytes, ADVICE, permit, pace):
                await asyncio.to_thread(spool.write, chunk)
        yield ReceivedBatch(content, spool, limits, find_image)


async def _receive_labels(request: Request, limits: BatchLimits, permit: Permit, pace: Pace) -> Labels:
    body = b"".join([chunk async for chunk in body_chunks(request, MAX_JSON, ADVICE, permit, pace)])
    if body.count(b",") > limits.max_images + limits.max_classes:
        raise BodyTooLarge(f"a batch may have {limits.max_images} images: {ADVICE}")
    return await asyncio.to_thread(parse_json_body, Labels, body, '{"classes": {"cat": ["<id>", ...]}}')
