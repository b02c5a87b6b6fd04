"""Versions are swapped under load: no request fails, and every answer names the version that gave it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest

from models.versions.folder_id import folder_id
from models.versions.store import VersionStore
from tasks.queue import announce, connect, key_prefix
from tests.support.redis_servers import RedisServer
from tests.support.servers import RunningServer, known_image, learned_folder, running_server, wait_until

CLIENTS = 32


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return learned_folder(tmp_path / "robot", current=1)


@pytest.fixture
def server(data: Path) -> Iterator[RunningServer]:
    with running_server(data, fresh=True, poll_seconds=0.1, request_timeout=60) as running:
        yield running


def answers(server: RunningServer, label: str, **arguments: Any) -> dict[str, Any]:
    response = server.post("/predict", content=known_image(label), **arguments)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["predictions"][0]
    return found


def test_a_published_version_is_found_by_polling(server: RunningServer, data: Path) -> None:
    assert answers(server, "class 4")["version"] == 1
    VersionStore(data).activate(3, "trainer", "as a trainer would")
    server.wait_for_version(3)
    assert answers(server, "class 4") | {"id": ""} == answers(server, "class 4") | {"id": ""}
    assert answers(server, "class 4")["version"] == 3
    assert answers(server, "class 4")["label"] == "class 4"
    assert server.metric("openworld_model_swaps_total") == 2


def test_an_activated_version_is_served_when_the_call_returns(server: RunningServer) -> None:
    for version in (3, 1, 2, 3):
        response = server.post(f"/versions/{version}/activate", params={"reason": "trying"})
        assert response.status_code == 200
        assert response.json()["serving"] == response.json()["current"] == version
        assert answers(server, "class 0")["version"] == version
    history = server.get("/versions").json()["history"]
    assert [line["version"] for line in history][-4:] == [3, 1, 2, 3]
    assert history[-1]["reason"] == "anonymous: trying"
    assert history[-1]["by"] == "operator"


def test_a_request_can_ask_for_a_version(server: RunningServer) -> None:
    assert answers(server, "class 4", params={"version": 3})["label"] == "class 4"
    assert answers(server, "class 4", params={"version": 2})["version"] == 2
    assert answers(server, "class 4")["version"] == 1
    missing = server.post("/predict", content=known_image("class 0"), params={"version": 9})
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    assert server.post("/versions/9/activate").status_code == 404


def test_20_swaps_under_32_clients_fail_no_request(server: RunningServer) -> None:
    stop, failures, versions = threading.Event(), list[str](), list[int]()
    image = known_image("class 0")

    def client() -> None:
        with httpx.Client(timeout=60) as http:
            while not stop.is_set():
                response = http.post(f"{server.url}/predict", content=image)
                if response.status_code != 200:
                    failures.append(response.text)
                else:
                    versions.append(response.json()["predictions"][0]["version"])

    def enough(start: int, version: int) -> bool:
        return bool(failures) or (len(versions) >= start + CLIENTS and version in versions[start:])

    with ThreadPoolExecutor(CLIENTS) as pool:
        jobs = [pool.submit(client) for _ in range(CLIENTS)]
        try:
            for swap in range(20):
                version, start = (2, 3, 1)[swap % 3], len(versions)
                assert server.post(f"/versions/{version}/activate").status_code == 200
                wait_until(lambda start=start, version=version: enough(start, version), 60)
        finally:
            stop.set()
        for job in jobs:
            job.result()
    assert not failures
    assert server.metric("openworld_model_swaps_total") == 21


def test_240_swaps_do_not_leak_memory(server: RunningServer) -> None:
    memory = psutil.Process(server.process.pid).memory_info
    sizes: list[int] = []
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for swap in range(240):
            assert http.post(f"/versions/{(2, 3, 1)[swap % 3]}/activate").status_code == 200
            assert http.post("/predict", content=known_image("class 0")).status_code == 200
            sizes.append(memory().rss)
    # The size after one swap depends on what the allocator has returned: compare the extremes of many. 180 swaps are
    # between the two, so that a leak of a version exceeds 5 %.
    early, late = max(sizes[20:40]), min(sizes[220:])
    assert late <= 1.05 * early, (early / 2**20, late / 2**20)


def test_a_server_without_a_version_answers_novel_until_there_is_one(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    with running_server(empty, poll_seconds=0.1) as server:
        answer = answers(server, "class 0")
        assert (answer["label"], answer["novel"], answer["version"], answer["nearest"]) == (None, True, 0, [])
        assert server.post("/predict", content=b"no image").status_code == 415
        assert server.get("/readyz").json() == {"status": "ready", "version": 0}
        assert server.get("/versions").json() | {"since": "", "disk": None} == {
            "serving": 0,
            "since": "",
            "current": None,
            "problem": None,
            "keep": "images",
            "versions": [],
            "history": [],
            "disk": None,
        }
        learned_folder(empty)
        wait_until(lambda: answers(server, "class 0")["version"] == 3)


def test_an_announced_version_is_served_before_the_next_poll(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot", current=1)
    with (
        RedisServer(tmp_path / "redis") as redis,
        running_server(data, poll_seconds=600, redis_url=redis.url) as server,
    ):
        assert answers(server, "class 4")["version"] == 1
        VersionStore(data).activate(3, "trainer", "as a trainer would")
        prefix = key_prefix(folder_id(data))
        with closing(connect(redis.url)) as client:
            # Repeat the announcement: the server may still be connecting to Redis.
            wait_until(lambda: announce(client, 3, prefix) or answers(server, "class 4")["version"] == 3)
