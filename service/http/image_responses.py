"""Responses with images that clients sent: with headers that keep a browser from treating them as anything else."""

from __future__ import annotations

from fastapi import Request, Response
from PIL import Image

from models.images import image_plugin

_SUFFIXES = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}

# The URL contains the hash of the bytes, so they never change, but they may be erased: browsers keep them for a minute,
# and then ask with their ETag; proxies never keep them.
CACHE_SECONDS = 60
_HEADERS = {
    "Cache-Control": f"private, max-age={CACHE_SECONDS}",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; sandbox",
}


def image_response(data: bytes, name: str, etag: str) -> Response:
    """The media type is that of the bytes, whatever the client claimed when it sent them."""
    format = str(image_plugin(data).format)
    headers = {"ETag": etag, "Content-Disposition": f'inline; filename="{name}.{_SUFFIXES[format]}"'}
    return Response(data, media_type=Image.MIME[format], headers=_HEADERS | headers)


def not_modified(request: Request, etag: str) -> Response | None:
    """A 304 response if the client has the image already."""
    given = [part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")]
    return Response(status_code=304, headers=_HEADERS | {"ETag": etag}) if {etag, "*"} & set(given) else None
