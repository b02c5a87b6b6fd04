"""Clients that connect and wait, send slowly or do not read keep no other client out."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.support.servers import RunningServer, known_image, learned_folder, running_server
from tests.support.stalled import answer_of, connection_to, request_head, stalled_request

ANN, BOB = "ann-secret-0123456789", "bob-secret-0123456789"
ROLES = "predict+label+operate"
IMAGE = known_image("class 0")
EDIT, PREDICT = ("PATCH", "/classes/class%200"), ("POST", "/predict")
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learned_folder(tmp_path_factory.mktemp("connections") / "robot")


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[RunningServer]:
    """A server with 16 connections and two keys, of which each may have 8 requests and 4 images in progress.

    A body may pause for two seconds, and for one more per byte of it.
    """
    settings = {
        "keys": f"ann:{ROLES}:{ANN},bob:{ROLES}:{BOB}",
        "max_connections": 16,
        "key_requests": 8,
        "header_timeout": 2,
        "body_grace": 2,
        "min_body_rate": 1,
        "request_timeout": 60,
        "images_in_flight": 8,
        "max_request_images": 2,
        "key_share": 0.5,
        "inbox": "false",
    }
    with running_server(data, data.parent / "server.log", **settings) as running:
        yield running


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
                running_server(data, data.parent / "idle.log", fresh=True, max_connections=1000, inbox="false")
            )
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4000), hard))
            with httpx.Client(base_url=server.url, timeout=30) as client:
                statuses = [client.post("/predict", content=IMAGE).status_code]
                for number in range(2000):
                    stack.enter_context(connection_to(server.url, b"GET / HTTP/1.1\r\n" if number % 2 else b""))
                    if number % 100 == 99:
                        statuses.append(client.post("/predict", content=IMAGE).status_code)
                statuses.append(server.post("/predict", content=IMAGE).status_code)  # on a new connection
                assert statuses == [200] * 22
            assert server.metric("openworld_connections") <= 1000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_new_connection_replaces_one_that_has_sent_no_request(server: RunningServer) -> None:
    request = f"GET /me HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {BOB}\r\n\r\n".encode()
    with connection_to(server.url, request) as used, ExitStack() as stack:
        assert answer_of(used)[0] == 200
        for _ in range(40):
            stack.enter_context(connection_to(server.url))
        used.sendall(request)  # its connection is older, but it has been used
        assert answer_of(used)[0] == 200
    assert server.metric("openworld_connections_closed_total", reason="evicted") > 0


@pytest.mark.parametrize("sent", [b"", LIVEZ, LIVEZ + b"\r\nGET /"])
def test_headers_that_do_not_arrive_close_the_connection(server: RunningServer, sent: bytes) -> None:
    with connection_to(server.url, sent) as connection:
        received = b""
        try:
            while chunk := connection.recv(65536):  # a connection that is only idle is kept for longer than this waits
                received += chunk
        except ConnectionError:
            pass
        except TimeoutError:
            pytest.fail("the connection is still open")
    assert received.startswith(b"HTTP/1.1 200") == (b"GET /" in sent.partition(b"\r\n\r\n")[2])


def test_a_body_that_stalls_on_any_route_is_refused(server: RunningServer) -> None:
    with stalled_request(server.url, *EDIT, key=ANN, sent=b"{") as connection:
        assert answer_of(connection) == (408, "body_too_slow")


def test_stalled_images_of_one_key_do_not_stop_another_key(server: RunningServer) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(stalled_request(server.url, *PREDICT, key=ANN))
        refused = stack.enter_context(connection_to(server.url, request_head(server.url, *PREDICT, key=ANN)))
        assert answer_of(refused) == (429, "key_busy")
        assert predict(server, BOB) == 200


def test_one_key_has_at_most_its_share_of_requests_in_progress(server: RunningServer) -> None:
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(stalled_request(server.url, *EDIT, key=ANN))
        refused = server.get("/me", headers={"X-API-Key": ANN})
        assert (refused.status_code, refused.json()["code"]) == (429, "key_busy")
        assert predict(server, BOB) == 200


def test_a_key_over_its_rate_is_refused_before_its_body_is_read(data: Path) -> None:
    settings = {"rate_limit": 0.01, "max_request_images": 2, "inbox": "false", "request_timeout": 60}
    with running_server(data, data.parent / "rate.log", **settings) as server, ExitStack() as stack:
        for _ in range(2):  # the burst
            stack.enter_context(stalled_request(server.url, *PREDICT))
        third = stack.enter_context(connection_to(server.url, request_head(server.url, *PREDICT)))
        assert answer_of(third) == (429, "rate_limited")


def test_without_keys_there_is_no_share_and_stalled_edits_stop_neither_probes_nor_predictions(data: Path) -> None:
    settings = {"key_requests": 4, "images_in_flight": 8, "max_request_images": 2, "body_grace": 60}
    with running_server(data, data.parent / "keyless.log", inbox="false", **settings) as server, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(stalled_request(server.url, *EDIT))
        refused = stack.enter_context(connection_to(server.url, request_head(server.url, *EDIT)))
        assert answer_of(refused) == (429, "key_busy")
        for path in ("/livez", "/readyz", "/metrics", "/"):
            assert server.get(path).status_code == 200, path
        for _ in range(5):  # more than half of the images in flight
            stack.enter_context(stalled_request(server.url, *PREDICT))
        assert predict(server, "") == 200
