"""Responses with images that clients sent: with headers that keep a browser from treating them as anything else."""

from __future__ import annotations

from fastapi import Request, Response

_KINDS = {"image/jpeg": "jpg", "image/png": "png", "image/webp": "webp"}

# The URL contains the hash of the bytes, so browsers may cache them without revalidation; proxies may not.
_HEADERS = {
    "Cache-Control": "private, max-age=31536000, immutable",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; sandbox",
}


def media_type(data: bytes) -> str:
    """The media type by the first bytes, as the decoder sees it."""
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return "application/octet-stream"


def image_response(data: bytes, name: str, etag: str) -> Response:
    kind = media_type(data)
    disposition = f'inline; filename="{name}.{_KINDS[kind]}"' if kind in _KINDS else "attachment"
    return Response(data, media_type=kind, headers=_HEADERS | {"ETag": etag, "Content-Disposition": disposition})


def not_modified(request: Request, etag: str) -> Response | None:
    """A 304 response if the client has the image already."""
    given = [part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")]
    return Response(status_code=304, headers=_HEADERS | {"ETag": etag}) if {etag, "*"} & set(given) else None
