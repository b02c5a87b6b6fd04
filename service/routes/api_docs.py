"""Swagger UI at `/docs`, served from the installed package so that it works offline."""

from __future__ import annotations

from pathlib import Path

import fastapi_offline
from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

router = APIRouter()

_assets = StaticFiles(directory=Path(fastapi_offline.__file__).with_name("static"))


@router.get("/docs", include_in_schema=False)
async def docs() -> HTMLResponse:
    return get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="openworld",
        swagger_js_url="/docs/assets/swagger-ui-bundle.js",
        swagger_css_url="/docs/assets/swagger-ui.css",
        swagger_favicon_url="/docs/assets/favicon.png",
    )


@router.api_route("/docs/assets/{path:path}", methods=["GET", "HEAD"], include_in_schema=False)
async def asset(request: Request, path: str) -> Response:
    return await _assets.get_response(path, request.scope)
