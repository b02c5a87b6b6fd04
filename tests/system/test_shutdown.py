"""SIGTERM: the server reports not ready at once, answers every accepted request, then ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import httpx2 as httpx

from tests.support.servers import known_image, learned_folder, running_server, wait_until

CLIENTS = 16


def test_sigterm_under_load_answers_every_accepted_request(tmp_path: Path) -> None:
    """A request is accepted once the server has read it; a refused or reset connection was not accepted."""
    # Status codes, and ids of requests.
    answers, refused, unread = list[int](), list[str](), list[str]()
    # Enough images per request that some are being computed when the signal arrives.
    files = [("images", ("x", known_image("class 0", number))) for number in range(40)]

    def client() -> None:
        with httpx.Client(timeout=60) as http:
            while True:
                id = uuid.uuid4().hex
                try:
                    response = http.post(f"{server.url}/predict", files=files, headers={"X-Request-ID": id})
                except httpx.ConnectError:
                    refused.append(id)
                    return
                except httpx.TransportError:
                    # The kernel accepted the connection, but the server closed before it read the request.
                    unread.append(id)
                    return
                answers.append(response.status_code)
                if response.status_code == 200:
                    assert len(response.json()["predictions"]) == 40

    settings = {"drain_seconds": 0.5, "images_in_flight": 2000, "request_timeout": 60, "shutdown_seconds": 60}
    with running_server(learned_folder(tmp_path / "robot"), fresh=True, **settings) as server:
        threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(answers) > CLIENTS, 60)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        assert server.process.wait(60) == 0
        log = server.log.read_text()
    # Every client ended with a refused connection; no response was cut off.
    assert set(answers) == {200}
    assert len(refused) + len(unread) == CLIENTS
    assert not [id for id in unread if id in log]
    assert log.count('"status": 200') >= len(answers)


def test_the_server_is_not_ready_before_it_stops_listening(tmp_path: Path) -> None:
    with running_server(learned_folder(tmp_path / "robot"), fresh=True, drain_seconds=60) as server:
        assert server.get("/readyz").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/readyz").status_code == 503)
        refused = server.get("/v2/health/ready")
        assert (refused.status_code, refused.json()["code"]) == (503, "not_ready")
        assert server.get("/livez").status_code == 200
        answer = server.post("/predict", content=known_image("class 0"))
        assert answer.status_code == 200
        assert answer.headers["connection"] == "close"
        server.process.send_signal(signal.SIGTERM)  # does not wait for the drain
        server.process.wait(30)


def test_a_second_signal_does_not_wait_for_the_drain(tmp_path: Path) -> None:
    with running_server(learned_folder(tmp_path / "robot"), fresh=True, drain_seconds=60) as server:
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: server.get("/readyz").status_code == 503)
        server.process.send_signal(signal.SIGINT)
        server.process.wait(30)


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "openworld", "serve", "--data", str(tmp_path), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
