"""Responses with a small JPEG of an image, shared by the routes of novelties and of stored images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Query, Request, Response

from service.container import Container
from service.http.image_responses import image_response, not_modified
from service.http.problems import documented
from service.inbox.thumbnails import MAX_SIZE, MIN_SIZE

SizeQuery = Annotated[int, Query(ge=MIN_SIZE, le=MAX_SIZE, description="maximum of the longer side, in pixels")]
DEFAULT_SIZE = 256
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/jpeg": {}}},
    304: {"description": "unchanged"},
    **documented(401, 403, 404, 413, 422),
}


async def thumbnail_response(
    request: Request, container: Container, sha256: str, size: int, read: Callable[[str], bytes]
) -> Response:
    """The thumbnail of an image that is known to exist; `read` is called if the server has not cached it."""
    etag = f'"{sha256}-{size}"'
    if (cached := not_modified(request, etag)) is not None:
        return cached
    data = await container.thumbnails.get(sha256, size, read)
    return image_response(data, f"{sha256[:12]}-{size}", etag)
