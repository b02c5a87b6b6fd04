"""The console's files: served with the right types and headers, complete, and asking nobody else for anything."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from service.routes.console import FOLDER, TYPES, Console
from tests.support.servers import RunningServer, running_server

FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())
NAMESPACE = "http://www.w3.org/2000/svg"  # a name, not an address: nobody fetches it
KINDS = {"html": "text/html", "css": "text/css", "mjs": "text/javascript", "svg": "image/svg+xml"}
LONGEST = 250  # lines of a module


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With keys: the page itself needs none, or nobody could be asked for one."""
    data = tmp_path_factory.mktemp("files") / "robot"
    with running_server(data, threads=1, keys="a:predict:aaaaaaaa-secret-of-a-robot") as running:
        yield running


@pytest.fixture(scope="module")
def edition(server: RunningServer) -> str:
    found = re.search(r"console/([0-9a-f]+)/js/main\.mjs", server.get("/").text)
    assert found
    return found[1]


def test_the_page_is_there_with_headers_that_let_nothing_else_in(server: RunningServer) -> None:
    page = server.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["cache-control"] == "no-cache"
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'self'"
    assert policy["img-src"] == "'self' blob: data:"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["object-src"] == "'none'"
    assert "unsafe" not in page.headers["content-security-policy"]


@pytest.mark.parametrize("name", [name for name in FILES if name != "index.html"])
def test_every_file_is_served_with_its_type_and_may_be_kept_for_ever(
    server: RunningServer, edition: str, name: str
) -> None:
    found = server.get(f"/console/{edition}/{name}")
    assert found.status_code == 200
    assert found.content == (FOLDER / name).read_bytes()
    assert found.headers["content-type"].partition(";")[0] == KINDS[name.rpartition(".")[2]]
    assert "immutable" in found.headers["cache-control"]
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["content-security-policy"]
    again = server.get(f"/console/{edition}/{name}", headers={"If-None-Match": found.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_a_page_of_another_edition_gets_what_there_is_and_asks_again(server: RunningServer) -> None:
    found = server.get("/console/0123456789abcdef/js/main.mjs")
    assert (found.status_code, found.headers["cache-control"]) == (200, "no-cache")


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        "/console",
        "/console/x/",
        "/console/x/js/nothing.mjs",
        "/console/x/index.html",
        "/console/x/%2e%2e/web.py",
        "/console/x/..%2f..%2fpyproject.toml",
        "/console/x//etc/passwd",
    ],
)
def test_what_is_not_there_is_a_404_in_the_usual_shape(server: RunningServer, path: str) -> None:
    missing = server.get(path)
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")


def test_the_page_can_be_asked_for_its_headers_alone(server: RunningServer) -> None:
    head = httpx.head(f"{server.url}/")
    assert (head.status_code, head.content) == (200, b"")


def test_any_change_makes_another_edition(tmp_path: Path) -> None:
    for name in FILES:
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((FOLDER / name).read_bytes())
    before = Console(tmp_path)
    assert before.edition == Console().edition
    (tmp_path / "css" / "base.css").write_text("body { color: red }")
    after = Console(tmp_path)
    assert after.edition != before.edition
    assert after.page.etag != before.page.etag


# The files themselves


def text(name: str) -> str:
    return (FOLDER / name).read_text()


def test_there_is_nothing_that_would_not_be_served() -> None:
    assert {Path(name).suffix for name in FILES} <= set(TYPES)


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host(name: str) -> None:
    source = text(name).replace(NAMESPACE, "")
    assert not re.findall(r"https?://", source)
    assert not re.findall(r"""["'(`]//[a-z]""", source)


def references(name: str) -> set[str]:
    """Files that this one asks for, as names from the console's folder."""
    source = text(name)
    if name == "index.html":
        return set(re.findall(r"""(?:src|href)="console/_/([^"]+)""", source))
    found = re.findall(r"""(?:from|import\()\s*"(\.[^"]+)\"""", source)
    found += re.findall(r"""url\(["']?([^"')]+)""", source)
    return {posixpath.normpath(posixpath.join(posixpath.dirname(name), one)) for one in found}


def test_every_file_that_is_referred_to_exists_and_every_file_is_referred_to() -> None:
    asked = {reference for name in FILES for reference in references(name)}
    assert not asked - set(FILES)
    assert set(FILES) - asked == {"index.html"}


def test_nothing_stands_inline() -> None:
    page = text("index.html")
    assert not re.findall(r"<script(?![^>]*src=)", page)
    assert not re.findall(r"<style|\sstyle=|\son[a-z]+=", page)
    scripts = "".join(text(name) for name in FILES if name.endswith(".mjs"))
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert sink not in scripts  # names and notes are what strangers wrote


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith(".svg")])
def test_a_module_can_be_read_in_one_sitting(name: str) -> None:
    assert len(text(name).splitlines()) <= LONGEST
