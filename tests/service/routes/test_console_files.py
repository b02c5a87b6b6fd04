"""The console's files: complete, served with the right types and headers, and without references to other hosts."""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from service.routes import console
from tests.support.servers import RunningServer, running_server

PAGE = console.FOLDER / "index.html"
STATIC = console.FOLDER / "static"
FILES = sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file())
MEDIA_TYPES = {"css": "text/css", "mjs": "text/javascript", "svg": "image/svg+xml"}
SVG_NAMESPACE = "http://www.w3.org/2000/svg"  # an identifier that is never fetched
MAX_LINES = 250


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with keys: the page and its files need none, because the page asks for the key."""
    data = tmp_path_factory.mktemp("files") / "robot"
    with running_server(data, threads=1, keys="a:predict:aaaaaaaa-secret-of-a-robot") as running:
        yield running


def test_the_page_has_a_strict_content_security_policy(server: RunningServer) -> None:
    page = server.get("/")
    assert page.status_code == 200
    assert page.content == PAGE.read_bytes()
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["cache-control"] == "no-cache"
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'self'"
    assert policy["img-src"] == "'self' blob: data:"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["object-src"] == "'none'"
    assert "unsafe" not in page.headers["content-security-policy"]


@pytest.mark.parametrize("name", FILES)
def test_every_file_has_its_type_and_the_security_headers(server: RunningServer, name: str) -> None:
    found = server.get(f"/console/{name}")
    assert found.status_code == 200
    assert found.content == (STATIC / name).read_bytes()
    assert found.headers["content-type"].partition(";")[0] == MEDIA_TYPES[name.rpartition(".")[2]]
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/", "/console/js/main.mjs"])
def test_the_browser_revalidates_every_file_by_its_etag(server: RunningServer, path: str) -> None:
    found = server.get(path)
    assert found.headers["cache-control"] == "no-cache"
    again = server.get(path, headers={"If-None-Match": found.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["cache-control"] == "no-cache"
    assert again.headers["content-security-policy"]


def test_a_new_release_gets_another_etag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(console.FOLDER, tmp_path / "console")
    monkeypatch.setattr(console, "_files", console.ConsoleFiles(directory=tmp_path / "console" / "static"))
    app = FastAPI()
    app.include_router(console.router)
    client = TestClient(app)
    before = client.get("/console/css/base.css")
    changed = tmp_path / "console" / "static" / "css" / "base.css"
    changed.write_text("body { color: red }")
    after = client.get("/console/css/base.css", headers={"If-None-Match": before.headers["etag"]})
    assert (after.status_code, after.text) == (200, "body { color: red }")
    assert after.headers["etag"] != before.headers["etag"]


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        "/console",
        "/console/",
        "/console/js",
        "/console/js/",
        "/console/js/nothing.mjs",
        "/console/index.html",
        "/console/%2e%2e/index.html",
        "/console/..%2f..%2f..%2fpyproject.toml",
        "/console//etc/passwd",
        "/console/js/main.mjs%00",
    ],
)
def test_an_unknown_path_is_a_404_with_problem_details(server: RunningServer, path: str) -> None:
    missing = server.get(path, follow_redirects=True)
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")


def test_a_head_request_returns_no_body(server: RunningServer) -> None:
    head = httpx.head(f"{server.url}/")
    assert (head.status_code, head.content) == (200, b"")


# The files themselves


def source(name: str) -> str:
    return (STATIC / name).read_text()


def test_no_file_has_an_unknown_type() -> None:
    assert {name.rpartition(".")[2] for name in FILES} <= set(MEDIA_TYPES)


@pytest.mark.parametrize("name", ["../index.html", *FILES])
def test_no_file_refers_to_another_host(name: str) -> None:
    text = source(name).replace(SVG_NAMESPACE, "")
    assert not re.findall(r"https?://", text)
    assert not re.findall(r"""["'(`]//[a-z]""", text)


def page_references() -> set[str]:
    return set(re.findall(r"""(?:src|href)="console/([^"]+)""", PAGE.read_text()))


def references(name: str) -> set[str]:
    """The files that a file imports, relative to the static folder."""
    found = re.findall(r"""(?:from|import\()\s*"(\.[^"]+)\"""", source(name))
    found += re.findall(r"""url\(["']?([^"')]+)""", source(name))
    return {posixpath.normpath(posixpath.join(posixpath.dirname(name), one)) for one in found}


def test_every_reference_exists_and_every_file_is_referenced() -> None:
    assert page_references().union(*map(references, FILES)) == set(FILES)


def test_nothing_is_inline() -> None:
    page = PAGE.read_text()
    assert not re.findall(r"<script(?![^>]*src=)", page)
    assert not re.findall(r"<style|\sstyle=|\son[a-z]+=", page)
    scripts = "".join(source(name) for name in FILES if name.endswith(".mjs"))
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert sink not in scripts  # class names and notes are untrusted text


def test_every_setting_that_a_page_names_exists() -> None:
    documented = (console.FOLDER.parents[1] / "docs" / "settings.md").read_text()
    named = {setting for name in FILES for setting in re.findall(r"OPENWORLD_\w+", source(name))}
    assert named
    assert not [setting for setting in named if f"`{setting}`" not in documented]


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith(".svg")])
def test_no_file_is_long(name: str) -> None:
    assert len(source(name).splitlines()) <= MAX_LINES
