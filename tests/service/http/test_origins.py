"""Pages of other sites cannot use a server through the browser of a person who can reach it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from pydantic import ValidationError

from models.versions.store import VersionStore
from service.settings import ServiceSettings
from tests.support.bad_inputs import Case, send
from tests.support.redis_servers import RedisServer
from tests.support.servers import RunningServer, known_image, learned_folder, running_server

EVIL = "https://evil.example"
SECRET = "a-secret-of-an-operator"
KEY = {"Authorization": f"Bearer {SECRET}"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learned_folder(tmp_path_factory.mktemp("origins") / "robot")


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[RunningServer]:
    """Without keys, with a queue."""
    with RedisServer(data.parent / "redis") as redis, running_server(data, threads=1, redis_url=redis.url) as running:
        yield running


@pytest.fixture(scope="module")
def proxied(data: Path) -> Iterator[RunningServer]:
    """Without keys, with every setting for a reverse proxy on this machine."""
    with running_server(
        data,
        data.parent / "proxied.log",
        threads=1,
        inbox=False,
        trusted_hosts="robot.example, Other.Example",
        trusted_origins="https://console.example:8443",
        trusted_proxies="127.0.0.1,10.0.0.0/8",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def locked(data: Path) -> Iterator[RunningServer]:
    """With keys."""
    keys = f"ann:predict+label+operate:{SECRET}"
    with running_server(data, data.parent / "locked.log", threads=1, inbox=False, keys=keys) as running:
        yield running


def answer(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json().get("code", "") if response.is_error else ""


FOREIGN_ORIGIN = (403, "foreign_origin")
UNKNOWN_HOST = (421, "unknown_host")


# Origin and Sec-Fetch-Site


def teach(server: RunningServer, headers: dict[str, str]) -> httpx.Response:
    """A form, which a page may send to another site without asking."""
    files: list[Any] = [("kiwi", ("1.png", known_image("class 7", n))) for n in range(3)]
    return server.post("/tasks", files=files, headers=headers)


def test_a_page_of_another_site_changes_nothing(server: RunningServer, data: Path) -> None:
    for headers in ({"Origin": EVIL}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        assert answer(server.post("/versions/2/activate", headers=headers)) == FOREIGN_ORIGIN
        assert answer(teach(server, headers)) == FOREIGN_ORIGIN
        edit = httpx.patch(f"{server.url}/classes/class 0", json={"retired": True}, headers=headers, timeout=30)
        assert answer(edit) == FOREIGN_ORIGIN
        assert answer(httpx.delete(f"{server.url}/images/{'0' * 64}", headers=headers, timeout=30)) == FOREIGN_ORIGIN
        assert answer(server.post("/predict", content=known_image("class 0"), headers=headers)) == FOREIGN_ORIGIN
    assert VersionStore(data).current() == 3
    assert server.get("/tasks").json()["tasks"] == []


@pytest.mark.parametrize(
    "origin", [EVIL, "null", "http://127.0.0.1", "http://127.0.0.1:1", "http://localhost:8000", "", "file://", "é", "x"]
)
def test_an_origin_of_another_host_or_port_is_refused(server: RunningServer, origin: str) -> None:
    headers = {"Origin": origin.encode()}
    assert answer(httpx.post(f"{server.url}/versions/3/activate", headers=headers, timeout=30)) == FOREIGN_ORIGIN  # type: ignore[arg-type]
    assert answer(httpx.get(f"{server.url}/versions", headers=headers, timeout=30)) == FOREIGN_ORIGIN  # type: ignore[arg-type]


def test_two_origins_are_refused(server: RunningServer) -> None:
    both = [("Origin", server.url), ("Origin", EVIL)]
    assert answer(httpx.post(f"{server.url}/versions/3/activate", headers=both, timeout=30)) == FOREIGN_ORIGIN


def test_the_own_pages_and_programs_are_answered(server: RunningServer) -> None:
    port = server.url.rpartition(":")[2]
    for headers in (
        {},
        {"Origin": server.url, "Sec-Fetch-Site": "same-origin"},
        {"Origin": f"http://localhost:{port}", "Host": f"LocalHost:{port}"},
        {"Sec-Fetch-Site": "none"},
    ):
        assert answer(server.post("/versions/3/activate", headers=headers)) == (200, "")


def test_a_link_on_another_site_opens_the_console(server: RunningServer) -> None:
    assert server.get("/", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}).status_code == 200


def test_another_program_on_this_machine_is_another_site(server: RunningServer) -> None:
    """Browsers call other ports of a host `same-site`."""
    assert answer(server.post("/versions/3/activate", headers={"Sec-Fetch-Site": "same-site"})) == FOREIGN_ORIGIN


def test_a_server_with_keys_checks_origins_too(locked: RunningServer) -> None:
    assert answer(locked.post("/versions/3/activate", headers=KEY | {"Origin": EVIL})) == FOREIGN_ORIGIN
    assert answer(locked.post("/versions/3/activate", headers=KEY | {"Origin": locked.url})) == (200, "")


# Host


@pytest.mark.parametrize("path", ["/", "/versions", "/novelties", "/metrics", "/livez", "/openapi.json"])
def test_a_name_of_another_site_that_points_here_is_refused(server: RunningServer, path: str) -> None:
    """DNS rebinding: to the browser, this server is a part of that site."""
    port = server.url.rpartition(":")[2]
    headers = {"Host": f"evil.example:{port}", "Sec-Fetch-Site": "same-origin"}
    assert answer(server.get(path, headers=headers)) == UNKNOWN_HOST


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "192.0.2.1", "", "[::1", "a@127.0.0.1"]
)
def test_only_loopback_names_are_accepted_without_keys(server: RunningServer, host: str) -> None:
    assert answer(server.post("/versions/3/activate", headers={"Host": host})) == UNKNOWN_HOST


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "localhost.", "127.0.0.1", "127.1.2.3:9", "[::1]:8000"])
def test_loopback_names_are_accepted(server: RunningServer, host: str) -> None:
    assert answer(server.get("/versions", headers={"Host": host})) == (200, "")


def test_each_of_several_hosts_is_checked(server: RunningServer) -> None:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    raw = b"GET /versions HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n"
    assert send((host, int(port)), Case("two hosts", 421, raw=raw)).status == 421


def test_a_server_with_keys_has_any_name(locked: RunningServer) -> None:
    assert answer(locked.get("/versions", headers=KEY | {"Host": "robot.example"})) == (200, "")


# Behind a reverse proxy


def test_configured_hosts_are_accepted(proxied: RunningServer) -> None:
    for host in ("robot.example", "ROBOT.example:443", "other.example", "127.0.0.1"):
        assert answer(proxied.get("/versions", headers={"Host": host})) == (200, "")
    assert answer(proxied.get("/versions", headers={"Host": "evil.example"})) == UNKNOWN_HOST


def test_the_origin_of_a_tls_proxy_that_keeps_the_host_is_the_own_one(proxied: RunningServer) -> None:
    for host in ("robot.example", "robot.example:443"):
        headers = {"Host": host, "Origin": "https://robot.example", "Sec-Fetch-Site": "same-origin"}
        assert answer(proxied.post("/versions/3/activate", headers=headers)) == (200, "")
    headers = {"Host": "robot.example", "Origin": "https://robot.example:8443"}
    assert answer(proxied.post("/versions/3/activate", headers=headers)) == FOREIGN_ORIGIN


def test_a_trusted_origin_may_differ_from_the_host(proxied: RunningServer) -> None:
    for headers in ({}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "cross-site"}):
        trusted = {"Origin": "https://console.example:8443", **headers}
        assert answer(proxied.post("/versions/3/activate", headers=trusted)) == (200, "")
    assert answer(proxied.get("/versions", headers={"Origin": "http://console.example:8443"})) == FOREIGN_ORIGIN


def test_the_host_that_a_trusted_proxy_forwards_is_the_own_one(proxied: RunningServer) -> None:
    """The default of nginx: `Host` is the address of the server."""
    origin = {"Origin": "https://robot.example"}
    assert answer(proxied.post("/versions/3/activate", headers=origin)) == FOREIGN_ORIGIN
    forwarded = origin | {"X-Forwarded-Host": "robot.example", "X-Forwarded-Proto": "https"}
    assert answer(proxied.post("/versions/3/activate", headers=forwarded)) == (200, "")


def test_a_forwarded_host_does_not_replace_a_foreign_one(proxied: RunningServer) -> None:
    """The page of a rebound name may set every header except for Host and Origin."""
    forged = {"Host": "evil.example", "X-Forwarded-Host": "robot.example"}
    assert answer(proxied.get("/versions", headers=forged)) == UNKNOWN_HOST
    assert answer(proxied.get("/versions", headers={"X-Forwarded-Host": "evil.example"})) == UNKNOWN_HOST


def test_forwarded_headers_of_others_are_ignored(server: RunningServer) -> None:
    forged = {"Origin": "https://robot.example", "X-Forwarded-Host": "robot.example"}
    assert answer(server.post("/versions/3/activate", headers=forged)) == FOREIGN_ORIGIN
    assert answer(server.get("/versions", headers={"X-Forwarded-Host": "evil.example"})) == (200, "")


def test_a_redirect_uses_the_scheme_that_a_trusted_proxy_forwards(
    proxied: RunningServer, server: RunningServer
) -> None:
    forwarded = {"X-Forwarded-Proto": "https"}
    assert proxied.get("/versions/", headers=forwarded).headers["location"].startswith("https://")
    assert server.get("/versions/", headers=forwarded).headers["location"].startswith("http://")


# Content types


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_a_body_with_a_type_that_a_form_can_have_is_refused(server: RunningServer, kind: str) -> None:
    """A page may send these types to another site without asking; `text/plain` can contain JSON."""
    headers = {"Content-Type": kind}
    for body in (b'{"ids": ["x"]}', b""):
        assert answer(server.post("/novelties/dismiss", content=body, headers=headers)) == (415, "unsupported_body")
        assert answer(server.post("/versions/3/activate", content=body, headers=headers)) == (415, "unsupported_body")


def test_a_body_without_a_type_is_refused(server: RunningServer) -> None:
    assert answer(server.post("/novelties/dismiss", content=b'{"ids": ["x"]}')) == (415, "unsupported_body")
    assert answer(server.post("/novelties/dismiss", content=iter([b'{"ids": ["x"]}']))) == (415, "unsupported_body")


@pytest.mark.parametrize("path", ["/predict", "/explain"])
def test_an_image_needs_a_type_that_an_image_can_have(server: RunningServer, path: str) -> None:
    image = known_image("class 0")
    for kind in ("text/plain", "text/html", "application/xml", "video/mp4"):
        refused = server.post(path, content=image, headers={"Content-Type": kind})
        assert answer(refused) == (415, "unsupported_body")
        assert kind in refused.json()["detail"]
    for kind in ("image/png", "image/x-anything", "application/octet-stream", "application/x-www-form-urlencoded"):
        assert answer(server.post(path, content=image, headers={"Content-Type": kind})) == (200, "")
    assert answer(server.post(path, content=image)) == (200, "")


def test_a_batch_needs_a_type_that_a_batch_can_have(server: RunningServer) -> None:
    refused = server.post("/tasks", content=b"kiwi", headers={"Content-Type": "text/plain"})
    assert answer(refused) == (415, "unsupported_body")


# Settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trusted_hosts", "https://robot.example"),
        ("trusted_hosts", "robot.example:8000"),
        ("trusted_hosts", "*"),
        ("trusted_hosts", "robot example"),
        ("trusted_origins", "robot.example"),
        ("trusted_origins", "https://robot.example/console"),
        ("trusted_origins", "*"),
        ("trusted_origins", "null"),
        ("trusted_proxies", "proxy.example"),
        ("trusted_proxies", "10.0.0.1/8"),
    ],
)
def test_a_wrong_setting_is_refused_at_startup(name: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=name):
        ServiceSettings(data=tmp_path, **{name: value})  # type: ignore[arg-type]
