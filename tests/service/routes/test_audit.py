"""The audit log: every change is recorded with its author before it is answered, and operators can read it."""

from __future__ import annotations

import asyncio
import json
import re
import stat
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from starlette.types import Receive, Scope, Send

from service.audit import BLOCK, AuditLog
from service.http.audit import ACTIONS, AuditTrail
from service.keys import Key
from service.wire.audit import AuditEntry
from tests.support.redis_servers import RedisServer
from tests.support.servers import IMAGES, RunningServer, known_image, learned_folder, novel_image, running_server
from tests.support.waiting import wait_until

SECRETS = {role: f"{role}-secret-of-the-audit" for role in ("predict", "label", "operate", "monitor")}
KEYS = ",".join(f"{role}-key:{role}:{secret}" for role, secret in SECRETS.items())


def key(role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {SECRETS[role]}"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learned_folder(tmp_path_factory.mktemp("audit") / "robot")


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[RunningServer]:
    settings = {"keys": KEYS, "trusted_proxies": "127.0.0.1", "inbox_rate": 1000}
    with (
        RedisServer(data.parent / "redis") as redis,
        running_server(data, threads=1, redis_url=redis.url, **settings) as running,
    ):
        yield running


def call(server: RunningServer, method: str, path: str, role: str, **arguments: Any) -> httpx.Response:
    headers = key(role) | arguments.pop("headers", {})
    return httpx.request(method, f"{server.url}{path}", headers=headers, timeout=30, **arguments)


def entries(server: RunningServer, limit: int = 50) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = call(server, "GET", f"/audit?limit={limit}", "operate").json()["items"]
    return found


def last(server: RunningServer) -> dict[str, Any]:
    return entries(server, 1)[0]


def test_an_activation_is_recorded_with_its_author(server: RunningServer) -> None:
    before = datetime.now(UTC)
    headers = {"X-Request-ID": "mine", "X-Forwarded-For": "192.0.2.7"}
    assert call(server, "POST", "/versions/2/activate?reason=why", "operate", headers=headers).status_code == 200
    entry = last(server)
    assert before <= datetime.fromisoformat(entry.pop("time")) <= datetime.now(UTC)
    assert entry == {
        "by": "operate-key",
        "action": "version.activate",
        "target": "2",
        "detail": {"reason": "why"},
        "address": "192.0.2.7",
        "request_id": "mine",
        "status": 200,
    }
    assert call(server, "POST", "/versions/3/activate", "operate").status_code == 200


def test_tasks_and_classes_are_recorded(server: RunningServer) -> None:
    files = [("kiwi", (f"{n}.png", IMAGES.read(f"kiwi/{n}"))) for n in range(3)]
    task = call(server, "POST", "/tasks", "label", files=files).json()["id"]
    found = last(server)
    assert (found["by"], found["action"], found["target"]) == ("label-key", "task.submit", task)
    assert found["detail"] == {"images": {"kiwi": 3}, "fresh": True}
    call(server, "POST", f"/tasks/{task}/cancel", "label")
    assert (last(server)["action"], last(server)["target"]) == ("task.cancel", task)
    call(server, "PATCH", "/classes/class 4", "label", json={"rename": "clementine"})
    found = last(server)
    assert (found["action"], found["target"], found["detail"]) == ("class.edit", "class 4", {"rename": "clementine"})


def test_erasures_are_recorded(server: RunningServer) -> None:
    image = novel_image(1)
    (answer,) = call(server, "POST", "/predict", "predict", content=image).json()["predictions"]
    assert answer["novel"]
    wait_until(lambda: call(server, "GET", "/novelties", "label").json()["items"])
    (novelty,) = call(server, "GET", "/novelties", "label").json()["items"]
    for action in ("dismiss", "restore"):
        call(server, "POST", f"/novelties/{action}", "label", json={"ids": [novelty["id"]]})
        assert (last(server)["action"], last(server)["detail"]) == (
            f"novelty.{action}",
            {"count": 1, "ids": [novelty["id"]]},
        )
    assert call(server, "DELETE", f"/images/{novelty['id']}?force=true", "operate").status_code == 200
    found = last(server)
    assert (found["action"], found["target"]) == ("image.erase", novelty["id"])
    assert found["detail"] == {"force": True, "images": 0, "novelties": 1}
    assert call(server, "DELETE", "/images?older_than_days=900&confirm=true", "operate").status_code == 200
    found = last(server)
    assert found["action"] == "image.erase_expired"
    assert found["detail"] == {"older_than_days": 900, "images": 0, "novelties": 0}


def test_refused_requests_and_reads_are_not_recorded(server: RunningServer) -> None:
    count = len(entries(server, 200))
    assert call(server, "POST", "/versions/2/activate", "label").status_code == 403
    assert call(server, "POST", "/versions/99/activate", "operate").status_code == 404
    assert server.post("/versions/2/activate").status_code == 401
    call(server, "POST", "/predict", "predict", content=known_image("class 0"))
    call(server, "GET", "/versions", "operate")
    assert len(entries(server, 200)) == count


@pytest.mark.parametrize("role", ["predict", "label", "monitor"])
def test_only_operators_read_it(server: RunningServer, role: str) -> None:
    assert call(server, "GET", "/audit", role).status_code == 403
    assert server.get("/audit").status_code == 401


def test_every_route_that_changes_something_is_recorded(server: RunningServer) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    changes = {f"{method.upper()} {path}" for path, item in paths.items() for method in item if method != "get"}
    assert changes - {"POST /predict", "POST /explain"} == set(ACTIONS)


def test_the_file_only_grows(server: RunningServer, data: Path) -> None:
    path = data / "audit.jsonl"
    before = path.read_bytes()
    call(server, "POST", "/versions/3/activate", "operate")
    after = path.read_bytes()
    assert after.startswith(before)
    assert json.loads(after[len(before) :])["action"] == "version.activate"
    assert not re.search(r"secret", after.decode())


def test_a_change_is_answered_although_it_cannot_be_recorded(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    (data / "audit.jsonl").mkdir()
    with running_server(data, threads=1, inbox=False) as server:
        assert server.post("/versions/2/activate").status_code == 200
        (line,) = [one for one in server.log_lines() if "audit" in one]
    assert (line["level"].lower(), line["audit"]["action"]) == ("error", "version.activate")


# The file


def entry(number: int, **detail: str) -> AuditEntry:
    return AuditEntry(time=datetime.now(UTC), by="anna", action="test", target=str(number), detail=detail)


def test_pages_have_every_entry_once_newest_first(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "new")
    assert log.page(10).items == []
    for number in range(25):
        log.record(entry(number, text="ä" * (BLOCK // 3 if number % 5 == 0 else 10)))
    found, cursor = [], None
    while True:
        page = log.page(7, cursor)
        found += [one.target for one in page.items]
        log.record(entry(1000))  # new entries do not move a cursor
        cursor = page.next_cursor
        if cursor is None:
            break
    assert found == [str(number) for number in reversed(range(25))]


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.record(entry(1))
    with (tmp_path / "audit.jsonl").open("ab") as file:
        file.write(b'{"time": "20')
    log.record(entry(2))
    assert [one.target for one in log.page(10).items] == ["2", "1"]


def test_threads_lose_no_entry(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    threads = [threading.Thread(target=lambda: [log.record(entry(n)) for n in range(10)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log.page(200).items) == 40
    assert not stat.S_IMODE((tmp_path / "audit.jsonl").stat().st_mode) & 0o022


def test_a_change_that_fails_unexpectedly_is_recorded(tmp_path: Path) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"], scope["path_params"] = SimpleNamespace(path="/versions/{version}/activate"), {"version": 2}
        raise LookupError("after the change")

    async def unused(*_: Any) -> Any:
        raise AssertionError

    key = Key("anna", frozenset({"operate"}), b"")
    scope = {"type": "http", "method": "POST", "path": "/versions/2/activate", "key": key, "client": None}
    with pytest.raises(LookupError):
        asyncio.run(AuditTrail(app, AuditLog(tmp_path))(scope, unused, unused))
    (found,) = AuditLog(tmp_path).page(10).items
    assert (found.by, found.action, found.target, found.status) == ("anna", "version.activate", "2", 500)
