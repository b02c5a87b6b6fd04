"""A full or read-only data folder on a real file system: 507, a log line, and everything works again afterwards."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from models.files import TEMPORARY
from models.versions.folder_id import folder_id
from models.versions.store import VersionStore
from tests.support.learning_loop import Loop, batch
from tests.support.redis_servers import RedisServer
from tests.support.servers import known_image, learned_folder, novel_image, wait_until

FILLER = "filler"


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    try:
        mount("-t", "tmpfs", "-o", "size=128m", "tmpfs", folder)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with small_disk(tmp_path_factory.mktemp("disk")) as folder:
        yield folder


@contextmanager
def server_on(disk: Path, logs: Path) -> Iterator[Loop]:
    """Redis, and a data folder on the small disk; Redis' files and the logs are elsewhere."""
    (data := logs / "robot").symlink_to(learned_folder(disk / logs.name))
    with RedisServer(logs / "redis") as redis:
        running = Loop(data, redis)
        try:
            yield running
            running.check()
        finally:
            running.stop()


@pytest.fixture(scope="module")
def running(disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    with server_on(disk, tmp_path_factory.mktemp("logs")) as running:
        running.start("serve")
        yield running


def fill(disk: Path) -> None:
    with (disk / FILLER).open("wb", buffering=0) as file:
        for size in (2**20, 4096, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


@contextmanager
def full(disk: Path) -> Iterator[None]:
    fill(disk)
    try:
        yield
    finally:
        (disk / FILLER).unlink()


class Writes:
    """Requests that write to the data folder."""

    def __init__(self, http: httpx.Client, running: Loop) -> None:
        self._http, self._running = http, running

    def task(self) -> httpx.Response:
        return self._http.post("/tasks", files=batch("kiwi", "lime"))

    def edit(self) -> httpx.Response:
        return self._http.patch("/classes/class 1", json={"rename": "class one"})

    def activate(self) -> httpx.Response:
        return self._http.post("/versions/3/activate")

    def check_refused(self) -> None:
        for write in (self.task, self.edit, self.activate):
            refused = write()
            assert (refused.status_code, refused.json()["code"]) == (507, "storage_unavailable"), write
            assert "robot" not in refused.text  # the server's paths are not revealed
            line = self._logged(refused.headers["X-Request-ID"])
            assert (line["level"], line["status"]) == ("error", 507)
            assert "Error: " in line["error"]  # the reason
        assert self._http.post("/predict", content=known_image("class 0")).status_code == 200
        assert self._http.post("/predict", content=novel_image(1)).status_code == 200
        assert self._http.get("/readyz").status_code == 200

    def _logged(self, id: str) -> dict[str, Any]:
        log = self._running.data.parent / "serve-0.log"

        def found() -> list[dict[str, Any]]:
            lines = [json.loads(line) for line in log.read_text().splitlines() if id in line]
            return [line for line in lines if line["logger"] == "openworld.requests"]

        wait_until(found)  # it is written after the response
        [line] = found()
        return line

    def check_accepted(self) -> None:
        assert self.task().status_code == 202
        assert self.activate().status_code == 200
        assert self.edit().status_code == 200
        VersionStore(self._running.data).load()
        assert not list(self._running.data.rglob(f"*{TEMPORARY}"))


def test_writes_to_a_full_disk_are_refused_with_507_until_there_is_space(disk: Path, running: Loop) -> None:
    with httpx.Client(base_url=running.url, timeout=30) as http:
        writes = Writes(http, running)
        with full(disk):
            writes.check_refused()
        writes.check_accepted()
        http.post("/predict", content=novel_image(2))
        wait_until(lambda: http.get("/novelties").json()["items"])


def test_a_task_waits_for_space_without_losing_an_attempt(disk: Path, running: Loop) -> None:
    for task in running.queue.list_tasks(states=["queued"]):
        running.queue.cancel(task.id)
    id = running.submit(batch("plum", "fig")).json()["id"]
    with full(disk):
        running.start("train")
        log = running.data.parent / "train-1.log"
        wait_until(lambda: log.read_text().count("is full or read-only") >= 2, 60)
        assert running.task(id)["state"] in ("queued", "learning")
    running.check_learned_once(id)
    assert running.task(id)["attempts"] == 1


def test_writes_to_a_read_only_folder_are_refused_with_507_until_it_is_writable(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with small_disk(tmp_path_factory.mktemp("read-only")) as disk, server_on(disk, tmp_path) as running:
        folder_id(running.data)  # as after an earlier start
        # Before the start: a disk with files open for writing cannot be made read-only.
        mount("-o", "remount,ro", disk)
        running.start("serve")
        with httpx.Client(base_url=running.url, timeout=30) as http:
            writes = Writes(http, running)
            writes.check_refused()
            mount("-o", "remount,rw", disk)
            writes.check_accepted()
