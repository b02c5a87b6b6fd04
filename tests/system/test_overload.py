"""Overload: excess requests get 429 with Retry-After at once, and the server recovers afterwards.

`python -m benchmarks.overload` measures the same for half a minute on a real backbone.
"""

from __future__ import annotations

import asyncio
import io
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from PIL import Image

from service.settings import ServiceSettings
from tests.support.servers import RunningServer, known_image, learned_folder, running_server, wait_until


def slow_image(seed: int) -> bytes:
    """A 4-megapixel PNG, which is slow to decode."""
    pixels = np.random.default_rng(seed).integers(0, 256, (2000, 2000), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


SLOW = slow_image(0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = learned_folder(tmp_path_factory.mktemp("overload") / "robot")
    settings = {"images_in_flight": 8, "max_request_images": 8, "decode_threads": 1, "request_timeout": 60}
    with running_server(data, inbox="false", **settings) as running:
        yield running


async def burst(url: str, clients: int, answers: int) -> tuple[Counter[int], list[str]]:
    """Run a closed loop of clients until there are as many 200s and 429s; the statuses, and Retry-After of the 429s."""
    statuses: Counter[int] = Counter()
    waits: list[str] = []
    end = time.monotonic() + 60

    def done() -> bool:
        return min(statuses[200], statuses[429]) >= answers or time.monotonic() > end

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=clients + 1)) as http:

        async def client() -> None:
            while not done():
                response = await http.post(f"{url}/predict", content=SLOW)
                statuses[response.status_code] += 1
                if response.status_code == 429:
                    waits.append(response.headers.get("Retry-After", ""))
                    await asyncio.sleep(0.02)

        async def alive() -> None:
            while not done():
                assert (await http.get(f"{url}/livez")).status_code == 200
                await asyncio.sleep(0.05)

        await asyncio.gather(alive(), *(client() for _ in range(clients)))
    return statuses, waits


def test_requests_over_the_limit_get_429_with_retry_after_and_the_rest_an_answer(server: RunningServer) -> None:
    statuses, waits = asyncio.run(burst(server.url, clients=32, answers=20))
    assert set(statuses) == {200, 429}
    assert waits
    assert all(wait.isdecimal() and int(wait) >= 1 for wait in waits)
    assert server.metric("openworld_rejected_total", reason="queue_full") == statuses[429]
    assert server.metric("openworld_in_flight_images") == 0
    assert server.metric("openworld_queue_depth") == 0
    assert server.post("/predict", content=known_image("class 0")).status_code == 200


def test_a_missed_deadline_is_504_and_releases_its_permit(server: RunningServer) -> None:
    before = server.metric("openworld_rejected_total", reason="deadline_passed")
    response = server.post("/predict", content=SLOW, headers={"X-Request-Timeout": "0.001"})
    assert (response.status_code, response.json()["code"]) == (504, "deadline_passed")
    assert server.metric("openworld_rejected_total", reason="deadline_passed") == before + 1
    assert server.metric("openworld_in_flight_images") == 0


def test_a_client_that_sends_its_body_too_slowly_loses_its_permit(server: RunningServer) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as slow:
        slow.sendall(
            b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Timeout: 0.3\r\nContent-Length: 1000\r\n\r\nabc"
        )
        assert slow.recv(4096).startswith(b"HTTP/1.1 504")
    assert server.metric("openworld_in_flight_images") == 0


def test_the_work_of_a_disconnected_client_is_dropped(server: RunningServer) -> None:
    before = server.metric("openworld_rejected_total", reason="abandoned")
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(SLOW)
    for _ in range(4):
        with socket.create_connection((host, int(port)), timeout=30) as gone:
            gone.sendall(head + SLOW)
    wait_until(lambda: server.metric("openworld_in_flight_images") == 0)
    wait_until(lambda: server.metric("openworld_rejected_total", reason="abandoned") > before)


def test_bodies_over_the_memory_limit_are_refused(tmp_path: Path) -> None:
    settings = {"body_memory": 6 * 2**20, "request_timeout": 60}
    with running_server(learned_folder(tmp_path / "robot"), fresh=True, inbox="false", **settings) as server:
        statuses, _ = asyncio.run(burst(server.url, clients=8, answers=5))
        assert set(statuses) == {200, 429}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory of a process")
def test_one_large_image_per_thread_does_not_exceed_the_memory_for_decoding(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGBA", (7000, 7000), (9, 99, 199, 99)).save(buffer, format="PNG", compress_level=1)
    settings = {"decode_threads": 4, "images_in_flight": 8, "max_request_images": 4}
    settings |= {"request_timeout": 200, "max_request_timeout": 200}
    with running_server(learned_folder(tmp_path / "robot"), fresh=True, inbox="false", **settings) as server:

        def memory(field: str) -> int:
            lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

        before = memory("VmRSS")
        files = [("images", ("a.png", buffer.getvalue()))] * 4
        assert httpx.post(f"{server.url}/predict", files=files, timeout=200).status_code == 200
        assert memory("VmHWM") - before < ServiceSettings.model_fields["decode_memory"].default
