"""Handing out pictures that strangers sent: their bytes say what they are, and no browser may think otherwise."""

from __future__ import annotations

from fastapi import Request, Response

_KINDS = {"image/jpeg": "jpg", "image/png": "png", "image/webp": "webp"}

# The bytes behind an address never change: the address holds their hash. Private: no proxy may keep them.
_HEADERS = {
    "Cache-Control": "private, max-age=31536000, immutable",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; sandbox",
}


def media_type(data: bytes) -> str:
    """The type by the first bytes, as the image reader sees it, whatever the sender or a file's name said."""
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return "application/octet-stream"


def picture_response(data: bytes, name: str, etag: str) -> Response:
    kind = media_type(data)
    disposition = f'inline; filename="{name}.{_KINDS[kind]}"' if kind in _KINDS else "attachment"
    return Response(data, media_type=kind, headers=_HEADERS | {"ETag": etag, "Content-Disposition": disposition})


def unchanged(request: Request, etag: str) -> Response | None:
    """304 when the client says that it has this very picture."""
    given = [part.strip().removeprefix("W/") for part in request.headers.get("if-none-match", "").split(",")]
    return Response(status_code=304, headers=_HEADERS | {"ETag": etag}) if {etag, "*"} & set(given) else None
