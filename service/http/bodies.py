"""Reading request bodies: content type, bounded stream, multipart form and JSON."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import BinaryIO, TypeVar, cast

from pydantic import BaseModel, ValidationError
from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.types import Message, Receive

from service.errors import BadRequest, BodyTooLarge, BodyTooSlow, ClientDisconnected
from service.http.limits import Permit

M = TypeVar("M", bound=BaseModel)


def content_type(request: Request) -> str:
    """The media type of the body, in lower case and without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


@dataclass(frozen=True)
class Pace:
    """How slowly a body may arrive: `rate` bytes per second after `grace` seconds, and `longest` seconds in total."""

    rate: float
    grace: float
    longest: float

    def seconds_left(self, started: float, seen: int) -> float:
        """Seconds until the next bytes are due, for a body that began at `started` and of which `seen` bytes came."""
        return started + min(self.grace + seen / self.rate, self.longest) - time.monotonic()


def bounded_receive(request: Request, limit: int, advice: str, pace: Pace | None = None) -> Receive:
    """The request's `receive`: BodyTooLarge after `limit` bytes, or now if Content-Length is more; BodyTooSlow by pace.

    A body without a pace needs a deadline from its caller.
    """
    announced, seen = request.headers.get("content-length", ""), 0
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit, advice)
    receive = request.receive
    started, complete = time.monotonic(), False

    async def bounded() -> Message:
        nonlocal seen, complete
        if pace is None or complete:  # after the body, `receive` waits for the end of the connection
            message = await receive()
        else:
            try:
                async with asyncio.timeout(pace.seconds_left(started, seen)):
                    message = await receive()
            except TimeoutError as error:
                raise BodyTooSlow(f"{seen} bytes of the body came in time: send it faster, or in parts") from error
        complete = not message.get("more_body", False)
        seen += len(message.get("body", b""))
        if seen > limit:
            raise _too_large(limit, advice)
        return message

    return bounded


def _too_large(limit: int, advice: str) -> BodyTooLarge:
    return BodyTooLarge(f"the body has more than {limit} bytes: {advice}")


async def body_chunks(
    request: Request, limit: int, advice: str, permit: Permit, pace: Pace | None = None
) -> AsyncGenerator[bytes, None]:
    """The body as it arrives, at most `limit` bytes; the permit reserves every chunk before it is kept."""
    receive = bounded_receive(request, limit, advice, pace)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the client disconnected while it sent the body")
        if chunk := message.get("body", b""):
            permit.grow(size=len(chunk))
            yield chunk
        if not message.get("more_body", False):
            return


class SpooledPart:
    """A part of a file that the images of a batch share: a batch may have more images than descriptors."""

    def __init__(self, spool: BinaryIO) -> None:
        self._spool, self._start, self._size = spool, 0, 0

    def write(self, data: bytes) -> int:
        self._start = self._spool.seek(0, io.SEEK_END) - self._size  # parts are written one after another
        self._size += len(data)
        return self._spool.write(data)

    def read(self) -> bytes:
        self._spool.seek(self._start)
        return self._spool.read(self._size)

    def seek(self, offset: int) -> int:
        return offset  # `read` always starts at the beginning

    def close(self) -> None: ...


class _FormParser(MultiPartParser):
    """Starlette's parser silently drops an unfinished last part. `complete` tells whether the final boundary came."""

    complete = False
    spool: BinaryIO | None = None
    spool_max_size = 2**40  # without `spool`, files stay in memory

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        if self.spool is not None and self._current_part.file is not None:
            self._current_part.file.file = cast(BinaryIO, SpooledPart(self.spool))
            self._files_to_close_on_error.pop().close()

    def on_end(self) -> None:
        self.complete = True


async def read_form(
    request: Request, chunks: AsyncGenerator[bytes, None], *, max_files: int, spool: BinaryIO | None = None
) -> FormData:
    """Parse a multipart form. Its files are kept in memory, or in the open file `spool`, which the caller closes."""
    parser = _FormParser(request.headers, chunks, max_files=max_files, max_fields=max_files, max_part_size=1024)
    parser.spool = spool
    try:
        form = await parser.parse()
    except MultiPartException as error:
        if error.message.startswith("Too many files"):
            raise BodyTooLarge(f"a form may have {max_files} files: send the rest in another request") from error
        raise BadRequest(f"the multipart form cannot be read: {error.message}") from error
    except (KeyError, ValueError, AssertionError) as error:  # no boundary, or a malformed header
        raise BadRequest("the multipart form cannot be read: it has no boundary, or a part is malformed") from error
    if not parser.complete:
        await form.close()
        raise BadRequest("the multipart form cannot be read: it is cut short, its final boundary is missing")
    return form


def parse_json_body(model: type[M], body: bytes, example: str) -> M:
    """Parse a JSON body. Limit the number of entries before: pydantic reports each wrong one in hundreds of bytes."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise BadRequest(f"the JSON cannot be read ({where}: {first['msg']}): send {example}") from error
