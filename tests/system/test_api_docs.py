"""docs/api.md lists the routes of the OpenAPI document and the codes of the problems, no more and no fewer."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from service.app import create_app
from service.http import problems
from service.settings import ServiceSettings
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()
ROUTE = re.compile(r"`(GET|POST|PUT|PATCH|DELETE) (/[^`?]*)`")


@pytest.fixture(scope="module")
def openapi(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    async def document() -> dict[str, Any]:
        return create_app(ServiceSettings(data=Path(tmp_path_factory.mktemp("data")))).openapi()

    return asyncio.run(document())


def test_the_page_lists_the_routes_of_the_openapi_document(openapi: dict[str, Any]) -> None:
    served = {f"{method.upper()} {path}" for path, methods in openapi["paths"].items() for method in methods}
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    listed = [f"{method} {path}" for line in rows for method, path in ROUTE.findall(line.split("|")[1])]
    assert len(listed) == len(set(listed)), "a route is listed twice"
    assert set(listed) == served


def test_routes_in_the_text_are_in_the_openapi_document(openapi: dict[str, Any]) -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]
    patterns = [re.compile(re.sub(r"\{\w+\}", "[^/]+", path)) for path in openapi["paths"]]
    unknown = [
        f"{page.relative_to(ROOT)}: {method} {path}"
        for page in pages
        for method, path in ROUTE.findall(page.read_text())
        if not any(pattern.fullmatch(path) for pattern in patterns)
    ]
    assert not unknown


def test_the_page_lists_the_codes_of_all_problems() -> None:
    table = PAGE.partition("## Errors")[2]
    rows = re.findall(r"^\| (\d{3}) \| (.+?) \|", table, re.MULTILINE)
    listed = {(int(status), code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    known = {(status, code) for _, status, code, _ in problems.TABLE} | {(422, "invalid")}
    known |= {(status, code) for status, code in problems._HTTP_CODES.items()}
    known.add((503, "too_many_connections"))  # service/http/protocol.py
    assert listed == known - {(499, "abandoned")}  # never sent: the client has closed the connection
