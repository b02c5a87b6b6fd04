"""Multipart forms: read as a whole, or refused. A form that is cut short is not a shorter form."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import Request
from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser

from service.errors import BadRequest, BodyTooLarge

IN_MEMORY = 2**40  # bytes of a file before it goes to the disk: never


class _Parser(MultiPartParser):
    """Starlette's, which drops the part that a form ends in, without a word: this one says whether the end came."""

    complete = False

    def on_end(self) -> None:
        self.complete = True


async def read_form(
    request: Request, chunks: AsyncGenerator[bytes, None], *, max_files: int, in_memory: bool
) -> FormData:
    """The form of a request's body. Close it, unless it is in memory."""
    parser = _Parser(request.headers, chunks, max_files=max_files, max_fields=max_files, max_part_size=1024)
    if in_memory:
        parser.spool_max_size = IN_MEMORY
    try:
        form = await parser.parse()
    except MultiPartException as error:
        if error.message.startswith("Too many files"):
            raise BodyTooLarge(f"a form may have {max_files} files: send the rest in another one") from error
        raise BadRequest(f"the multipart form cannot be read: {error.message}") from error
    except (KeyError, ValueError, AssertionError) as error:  # no boundary, or a header that is no header
        raise BadRequest("the multipart form cannot be read: it has no boundary, or a part is malformed") from error
    if not parser.complete:
        await form.close()
        raise BadRequest("the multipart form cannot be read: it is cut short, its final boundary is missing")
    return form
