"""Swagger UI at /docs works offline: every file that the page loads is served by this server."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.servers import running_server


def test_every_file_of_the_docs_page_is_served(tmp_path: Path) -> None:
    with running_server(tmp_path / "robot", threads=1) as server:
        assets = re.findall(r'(?:src|href)="(/docs/assets/[^"]+)"', server.get("/docs").text)
        assert {Path(asset).suffix for asset in assets} == {".js", ".css", ".png"}
        for asset in assets:
            found = server.get(asset)
            assert (found.status_code, bool(found.content), "etag" in found.headers) == (200, True, True), asset
        missing = server.get("/docs/assets/nothing.js")
        assert (missing.status_code, missing.json()["code"]) == (404, "not_found")


def test_swagger_ui_is_of_a_release_that_reads_the_openapi_version(tmp_path: Path) -> None:
    with running_server(tmp_path / "robot", threads=1) as server:
        assert server.get("/openapi.json").json()["openapi"].startswith("3.1.")
        release = re.search(r'PACKAGE_VERSION:"(\d+)', server.get("/docs/assets/swagger-ui-bundle.js").text)
        assert release is not None
        assert int(release[1]) >= 5  # 4 reads 2.0 and 3.0 only
