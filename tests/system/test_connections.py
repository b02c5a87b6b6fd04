"""Clients that connect and wait, send slowly or do not read keep no other client out."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from tests.support.servers import RunningServer, known_image, learned_folder, running_server

ANN, BOB = "ann-secret-0123456789", "bob-secret-0123456789"
ROLES = "predict+label+operate"
IMAGE = known_image("class 0")
HEADER_SECONDS, GRACE = 2.0, 2.0
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learned_folder(tmp_path_factory.mktemp("connections") / "robot")


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[RunningServer]:
    """A server with 16 connections and two keys, of which each may have 8 requests and 4 images in progress."""
    settings = {
        "keys": f"ann:{ROLES}:{ANN},bob:{ROLES}:{BOB}",
        "max_connections": 16,
        "key_requests": 8,
        "header_timeout": HEADER_SECONDS,
        "body_grace": GRACE,
        "images_in_flight": 8,
        "max_request_images": 2,
        "key_share": 0.5,
        "inbox": "false",
    }
    with running_server(data, data.parent / "server.log", **settings) as running:
        yield running


@contextmanager
def connected(server: RunningServer, sent: bytes = b"") -> Iterator[socket.socket]:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=15) as connection:
        connection.sendall(sent)
        yield connection


def stalled(method: str, path: str, key: str) -> bytes:
    """A request that has sent a part of its body."""
    return (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {key}\r\nContent-Type: application/json\r\n"
        "Content-Length: 1000\r\n\r\n{"
    ).encode()


def answer(connection: socket.socket) -> tuple[int, str]:
    """Status and code of the response; (0, "") if the connection is closed without one."""
    try:
        with HTTPResponse(connection) as response:
            response.begin()
            return response.status, json.loads(response.read()).get("code", "")
    except TimeoutError:
        return -1, "no answer"
    except (OSError, ValueError, httpx.TransportError):
        return 0, ""


def predict(server: RunningServer, key: str) -> int:
    return server.post("/predict", content=IMAGE, headers={"X-API-Key": key}).status_code


def test_two_thousand_idle_connections_do_not_keep_others_out(data: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4000:
        pytest.skip("this process may not open 2000 sockets")
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))  # the server inherits it
    try:
        with ExitStack() as stack:
            server = stack.enter_context(
                running_server(data, data.parent / "idle.log", max_connections=1000, inbox="false")
            )
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4000), hard))
            with httpx.Client(base_url=server.url, timeout=5) as client:
                statuses = [client.post("/predict", content=IMAGE).status_code]
                for number in range(2000):
                    stack.enter_context(connected(server, b"GET / HTTP/1.1\r\n" if number % 2 else b""))
                    if number % 100 == 99:
                        statuses.append(client.post("/predict", content=IMAGE).status_code)
                with suppress(httpx.TransportError):
                    statuses.append(server.post("/predict", content=IMAGE).status_code)  # on a new connection
                assert statuses == [200] * 22
            assert server.metric("openworld_connections") <= 1000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_new_connection_replaces_one_that_has_sent_no_request(server: RunningServer) -> None:
    request = f"GET /me HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {BOB}\r\n\r\n".encode()
    with connected(server, request) as used, ExitStack() as stack:
        assert answer(used)[0] == 200
        for _ in range(40):
            stack.enter_context(connected(server))
        used.sendall(request)  # its connection is older, but it has been used
        assert answer(used)[0] == 200
    assert server.metric("openworld_connections_closed_total", reason="evicted") > 0


@pytest.mark.parametrize("sent", [b"", LIVEZ, LIVEZ + b"\r\nGET /"])
def test_headers_that_do_not_arrive_close_the_connection(server: RunningServer, sent: bytes) -> None:
    started = time.monotonic()
    with connected(server, sent) as connection:
        received = b""
        try:
            while chunk := connection.recv(65536):
                received += chunk
        except ConnectionError:
            pass
        except TimeoutError:
            pytest.fail("the connection is still open")
    assert time.monotonic() - started < HEADER_SECONDS + 4
    assert received.startswith(b"HTTP/1.1 200") == (b"GET /" in sent.partition(b"\r\n\r\n")[2])


def test_a_body_that_stalls_on_any_route_is_refused(server: RunningServer) -> None:
    with connected(server, stalled("PATCH", "/classes/class%200", ANN)) as connection:
        assert answer(connection) == (408, "body_too_slow")


def test_stalled_images_of_one_key_do_not_stop_another_key(server: RunningServer) -> None:
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(connected(server, stalled("POST", "/predict", ANN)))
        refused = stack.enter_context(connected(server, stalled("POST", "/predict", ANN)))
        assert answer(refused) == (429, "key_busy")
        assert predict(server, BOB) == 200


def test_one_key_has_at_most_its_share_of_requests_in_progress(server: RunningServer) -> None:
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(connected(server, stalled("PATCH", "/classes/class%200", ANN)))
        refused = server.get("/me", headers={"X-API-Key": ANN})
        assert (refused.status_code, refused.json()["code"]) == (429, "key_busy")
        assert predict(server, BOB) == 200


def test_a_key_over_its_rate_is_refused_before_its_body_is_read(data: Path) -> None:
    settings = {"rate_limit": 0.01, "max_request_images": 2, "inbox": "false"}
    with running_server(data, data.parent / "rate.log", **settings) as server, ExitStack() as stack:
        for _ in range(2):  # the burst
            stack.enter_context(connected(server, stalled("POST", "/predict", "")))
        third = stack.enter_context(connected(server, stalled("POST", "/predict", "")))
        assert answer(third) == (429, "rate_limited")
