"""The page /docs in a browser: Swagger UI must read the OpenAPI version of /openapi.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.browsers import playwright, visit
from tests.support.servers import running_server

expect = playwright.expect


def test_the_docs_page_shows_the_operations_without_an_error(browser: Any, tmp_path: Path) -> None:
    with running_server(tmp_path / "robot", threads=1) as server, visit(browser, server.url) as visiting:
        visiting.page.goto(f"{server.url}/docs")
        operation = visiting.page.locator("#operations-robots-predict_predict_post")
        expect(operation).to_contain_text("/predict")
        operation.locator("button").first.click()
        expect(operation.locator(".responses-table").first).to_contain_text("200")
        expect(visiting.page.locator(".errors-wrapper")).to_have_count(0)
        expect(visiting.page.locator("body")).not_to_contain_text("Unable to render")
