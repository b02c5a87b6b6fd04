"""Three ways to send images: raw bytes, a multipart form, base64 in JSON. All end as a list of bytes.

Bytes are counted against the request's permit as they arrive, so that what is held in memory is bounded before it is
held. What is wrong with one image of several (base64 that is none) takes its place in the list.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect

from models.errors import ImageError
from service.errors import Abandoned, BadBase64, BadRequest, BodyTooLarge, NoImages
from service.http.admission import Permit
from service.http.forms import read_form
from service.http.json_bodies import parse
from service.wire.predictions import Base64Images

FIELDS = {"images", "image"}
LARGE = 2**18  # bytes of JSON that take long enough to parse to be worth a thread
# Base64 has no comma, and pydantic reports every wrong entry: a body of `1,1,1,...` would cost 400 times its size.
MORE_COMMAS = 1000
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.ASCII)

Sent = bytes | ImageError


@dataclass(frozen=True)
class BodyLimits:
    """What one request may hold."""

    body: int
    images: int
    image: int


async def read_images(request: Request, limits: BodyLimits, permit: Permit) -> Sequence[Sent]:
    """The images of a request, at least one; the permit then holds as many."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise BadRequest("a compressed body is not read: images are compressed already, send them as they are")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if kind == "multipart/form-data":
            images = await _multipart(request, limits, permit)
        elif kind == "application/json":
            images = await _json(await _body(request, limits.body, permit), limits)
        else:
            # Whatever it calls itself: the image reader looks at the bytes, and curl calls everything a form.
            images = [await _body(request, min(limits.body, limits.image), permit)]
    except ClientDisconnect as error:
        raise Abandoned("the client went away while it sent the request") from error
    if not images:
        raise NoImages("no image was sent: add at least one")
    permit.grow(images=len(images) - 1)  # one was counted at the door
    return images


async def _chunks(request: Request, limit: int, permit: Permit) -> AsyncGenerator[bytes, None]:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    seen = 0
    async for chunk in request.stream():
        seen += len(chunk)
        if seen > limit:
            raise _too_large(limit)
        permit.grow(size=len(chunk))
        yield chunk


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request has more than {limit} bytes: send fewer or smaller images")


async def _body(request: Request, limit: int, permit: Permit) -> bytes:
    return b"".join([chunk async for chunk in _chunks(request, limit, permit)])


async def _multipart(request: Request, limits: BodyLimits, permit: Permit) -> list[Sent]:
    chunks = _chunks(request, limits.body, permit)
    form = await read_form(request, chunks, max_files=limits.images, in_memory=True)
    images: list[Sent] = []
    for name, value in form.multi_items():
        if not isinstance(value, UploadFile):
            raise BadRequest(f"the form field {name[:80]!r} is not a file: in curl, write -F images=@photo.jpg")
        if name not in FIELDS:
            raise BadRequest(f"the form field {name[:80]!r} is not known: call it `images`")
        images.append(value.file.read())  # in memory: does not block
    return images


async def _json(body: bytes, limits: BodyLimits) -> list[Sent]:
    if len(body) > LARGE:
        return await asyncio.to_thread(_parse_json, body, limits)
    return _parse_json(body, limits)


def _parse_json(body: bytes, limits: BodyLimits) -> list[Sent]:
    if body.count(b",") > 4 * limits.images + MORE_COMMAS:
        raise _too_many(limits)
    document = parse(Base64Images, body, '{"images": ["<base64>", ...]}')
    if len(document.images) > limits.images:
        raise _too_many(limits)
    return [_decode(text) for text in document.images]


def _decode(text: str) -> Sent:
    match = _DATA_URL.match(text)
    try:
        return base64.b64decode(text[match.end() :] if match else text, validate=True)
    except (binascii.Error, ValueError) as error:
        return BadBase64(f"not base64 ({error}): send the image's bytes as standard base64")


def _too_many(limits: BodyLimits) -> BodyTooLarge:
    return BodyTooLarge(f"a request may have {limits.images} images: send the rest in another one")
