"""The web console: the page at `/` and its files under `/console/`."""

from __future__ import annotations

import mimetypes
import os
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.staticfiles import StaticFiles
from starlette.types import Scope

router = APIRouter()

FOLDER = Path(__file__).parents[1] / "console"
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'self'",
        "img-src 'self' blob: data:",  # blob: for images that were fetched with a key or chosen from a disk
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Cache-Control": "no-cache",  # the browser revalidates by ETag, so that a new release shows at once
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
mimetypes.add_type("text/javascript", ".mjs")  # absent from the type tables of some systems


class ConsoleFiles(StaticFiles):
    """Static files with the console's security and cache headers."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


_page = ConsoleFiles(directory=FOLDER)
_files = ConsoleFiles(directory=FOLDER / "static")


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page(request: Request) -> Response:
    return await _page.get_response("index.html", request.scope)


@router.api_route("/console/{path:path}", methods=["GET", "HEAD"], include_in_schema=False)
async def file(request: Request, path: str) -> Response:
    return await _files.get_response(path, request.scope)
