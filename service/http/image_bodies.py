"""The images of a request: raw bytes, a multipart form, or base64 in JSON."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Sequence

from starlette.datastructures import UploadFile
from starlette.requests import Request

from models.errors import ImageError
from service.errors import BadBase64, BadRequest, BodyTooLarge, NoImages, UnsupportedBody
from service.http.bodies import body_chunks, content_type, parse_json_body, read_form
from service.http.limits import Permit, RequestLimits
from service.wire.predictions import Base64Images

ADVICE = "send fewer or smaller images"
FORM_FIELDS = {"images", "image"}
# Types of one raw image besides image/*: none, and the type that `curl --data-binary` declares unless told otherwise.
RAW_TYPES = {"", "application/octet-stream", "application/x-www-form-urlencoded"}
PARSE_IN_THREAD = 2**18  # bytes of JSON that would block the event loop for too long
# Base64 contains no comma, and pydantic reports every wrong entry: a body of `1,1,1,...` would take 400 times its size.
EXTRA_COMMAS = 1000
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.ASCII)

ReceivedImage = bytes | ImageError  # the error of an image whose base64 cannot be decoded


async def read_images(request: Request, limits: RequestLimits, permit: Permit) -> Sequence[ReceivedImage]:
    """The images of a request, at least one. Every byte and image is reserved in the permit."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise BadRequest("a compressed body is not read: images are compressed already, send them as they are")
    kind = content_type(request)
    images: Sequence[ReceivedImage]
    if kind == "multipart/form-data":
        images = await _read_form(request, limits, permit)
    elif kind == "application/json":
        body = await _read_body(request, limits.body, permit)
        if len(body) > PARSE_IN_THREAD:
            images = await asyncio.to_thread(_parse_base64, body, limits)
        else:
            images = _parse_base64(body, limits)
    elif kind.startswith("image/") or kind in RAW_TYPES:
        # The decoder looks at the bytes, whatever kind of image is declared.
        images = [await _read_body(request, min(limits.body, limits.image), permit)]
    else:
        raise UnsupportedBody(f"content type {kind[:80]!r} is not read here: send an image, a form or JSON")
    if not images:
        raise NoImages("no image was sent: add at least one")
    permit.grow(images=len(images) - 1)  # the permit was entered with one image
    return images


async def _read_body(request: Request, limit: int, permit: Permit) -> bytes:
    return b"".join([chunk async for chunk in body_chunks(request, limit, ADVICE, permit)])


async def _read_form(request: Request, limits: RequestLimits, permit: Permit) -> list[ReceivedImage]:
    chunks = body_chunks(request, limits.body, ADVICE, permit)
    form = await read_form(request, chunks, max_files=limits.images)
    images: list[ReceivedImage] = []
    for name, value in form.multi_items():
        if not isinstance(value, UploadFile):
            raise BadRequest(f"the form field {name[:80]!r} is not a file: in curl, write -F images=@photo.jpg")
        if name not in FORM_FIELDS:
            raise BadRequest(f"the form field {name[:80]!r} is not known: call it `images`")
        images.append(value.file.read())  # in memory: does not block
    return images


def _parse_base64(body: bytes, limits: RequestLimits) -> list[ReceivedImage]:
    too_many = BodyTooLarge(f"a request may have {limits.images} images: send the rest in another request")
    if body.count(b",") > 4 * limits.images + EXTRA_COMMAS:
        raise too_many
    document = parse_json_body(Base64Images, body, '{"images": ["<base64>", ...]}')
    if len(document.images) > limits.images:
        raise too_many
    return [_decode(text) for text in document.images]


def _decode(text: str) -> ReceivedImage:
    match = _DATA_URL.match(text)
    try:
        return base64.b64decode(text[match.end() :] if match else text, validate=True)
    except (binascii.Error, ValueError) as error:
        return BadBase64(f"not base64 ({error}): send the image's bytes as standard base64")
