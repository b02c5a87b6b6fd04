"""The labelling console at `/`: hand-written files, with headers that let nothing else into the page.

All files are read once, at the start: a hundred kilobytes, and no path of a request ever reaches the disk. They stand
under an address that holds their hash, so that a browser may keep them for ever and still has the new ones at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from models.files import sha256_bytes
from service.errors import NotFound

router = APIRouter()

FOLDER = Path(__file__).parents[1] / "console"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PLACE = b"console/_/"  # as the page has it; `_` gives way to the edition
POLICY = "; ".join(
    [
        "default-src 'self'",
        "img-src 'self' blob: data:",  # blob: a picture that was fetched with a key, or chosen from a disk
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Asset(NamedTuple):
    """One file of the console."""

    data: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, data: bytes, suffix: str) -> Asset:
        return cls(data, TYPES[suffix], f'"{sha256_bytes(data)[:32]}"')

    def respond(self, request: Request, cache: str) -> Response:
        headers = HEADERS | {"ETag": self.etag, "Cache-Control": cache}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.data, media_type=self.media_type, headers=headers)


class Console:
    """The page, and the files that it asks for."""

    def __init__(self, folder: Path = FOLDER) -> None:
        found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
        data = {name: path.read_bytes() for name, path in found.items() if path.suffix in TYPES}
        self.edition = sha256_bytes(b"".join(sha256_bytes(one).encode() for one in data.values()))[:16]
        page = data.pop("index.html").replace(PLACE, f"console/{self.edition}/".encode())
        self.page = Asset.of(page, ".html")
        self.files = {name: Asset.of(one, found[name].suffix) for name, one in data.items()}


def _console(request: Request) -> Console:
    console: Console = request.app.state.console
    return console


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page(request: Request) -> Response:
    return _console(request).page.respond(request, "no-cache")


@router.api_route("/console/{edition}/{path:path}", methods=["GET", "HEAD"], include_in_schema=False)
async def file(request: Request, edition: str, path: str) -> Response:
    console = _console(request)
    asset = console.files.get(path)
    if asset is None:
        raise NotFound(f"the console has no file {path[:80]!r}")
    # A page of an older edition that is still open gets what there is now, and asks again next time.
    return asset.respond(request, "public, max-age=31536000, immutable" if edition == console.edition else "no-cache")
