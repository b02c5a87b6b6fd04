"""Redis, server and trainer as real processes on a tiny backbone, with fault injection."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from models.files import write_durable
from models.storage import DataFolder, Storage
from models.versions.folder_id import folder_id
from models.versions.store import VersionStore
from openworld.check import check_folder
from tasks.images import ImageStore
from tasks.queue import TaskQueue, connect, key_prefix
from tests.support.loop_programs import Program, start_program
from tests.support.redis_servers import RedisServer
from tests.support.servers import IMAGES, address_of, learned_folder, wait_until
from tests.support.settings import clean_environment, variables

LEASE = 1.0
ENDED = ("published", "rejected", "failed", "cancelled")


def batch(*names: str, images: int = 6, start: int = 0) -> list[tuple[str, tuple[str, bytes]]]:
    """Form fields with `images` images per class."""
    return [
        (name, (f"{number}.png", IMAGES.read(f"{name}/{number}")))
        for name in names
        for number in range(start, start + images)
    ]


@dataclass
class Loop:
    """One data folder and its processes; each process can be killed and started again."""

    data: Path
    redis: RedisServer
    settings: dict[str, str] = field(default_factory=dict)  # environment variables of the next process
    processes: list[Program] = field(default_factory=list)
    url: str = ""
    storage: Storage | None = None  # an object store in place of the folder

    @property
    def folder(self) -> DataFolder:
        return self.storage or self.data

    def start(self, program: str, fault: str = "", victim: int = 0, machine: str = "") -> Program:
        """Start a program, by default on the machine that has the data folder."""
        log = self.data.parent / f"{program}-{len(self.processes)}.log"
        environment = clean_environment()
        environment |= {
            "OPENWORLD_REDIS_URL": self.redis.url,
            "OPENWORLD_LOG_FORMAT": "json",
            "OPENWORLD_PORT": "0",
            "OPENWORLD_TRAIN_METRICS_PORT": "0",
            "OPENWORLD_TRAIN_NICE": "0",
            "OPENWORLD_TRAIN_LEASE_SECONDS": str(LEASE),
            "OPENWORLD_TRAIN_PROVISIONAL": "off",  # tests count versions
            "OPENWORLD_SERVE_POLL_SECONDS": "0.2",
            "OPENWORLD_SERVE_DRAIN_SECONDS": "0",
            "FAULT": fault,
            "FAULT_PID": str(victim),
            "HOLD": str(self._hold),
            **self.settings,
        }
        process = start_program(program, self.data.parent / machine if machine else self.data, log, environment)
        self.processes.append(process)
        if program == "serve":
            self.url = address_of(process, log)
        return process

    @contextmanager
    def holding_trainers(self, epoch: int = 0) -> Iterator[None]:
        """Make trainers wait after their next event, or after the end of an epoch: nothing is published meanwhile."""
        write_durable(self._hold, str(epoch or "").encode())
        try:
            yield
        finally:
            self._hold.unlink()

    def advance_held_trainer(self, id: str, condition: Callable[[], object]) -> None:
        """Inside `holding_trainers`: let the task's trainer compute one epoch at a time until the condition is met.

        It looks at the queue and at the current version after each epoch.
        """
        epoch = self.finished_epochs(id)
        while not condition():
            epoch += 1
            write_durable(self._hold, str(epoch).encode())
            wait_until(lambda epoch=epoch: condition() or self.finished_epochs(id) >= epoch, 60)  # type: ignore[misc]

    @property
    def _hold(self) -> Path:
        return self.data.parent / f"{self.data.name}.hold"

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    @property
    def queue(self) -> TaskQueue:
        return TaskQueue(connect(self.redis.url), key_prefix(folder_id(self.folder)), lease_seconds=LEASE)

    def submit(self, files: list[tuple[str, tuple[str, bytes]]], key: str | None = None) -> httpx.Response:
        headers = {"Idempotency-Key": key} if key else {}
        return httpx.post(f"{self.url}/tasks", files=files, headers=headers, timeout=30)

    def task(self, id: str) -> dict[str, Any]:
        response = httpx.get(f"{self.url}/tasks/{id}", timeout=30)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def wait_until_ended(self, id: str, seconds: float = 120) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while (task := self.task(id))["state"] not in ENDED:
            assert time.monotonic() < end, task
            time.sleep(0.05)
        return task

    def wait_for_progress(self, id: str) -> None:
        """Wait until a trainer has reported a first event of the task."""
        wait_until(lambda: self.task(id)["progress"] is not None, 60)

    def finished_epochs(self, id: str) -> int:
        """Those of the task's network, as its trainer has reported them."""
        progress = self.task(id)["progress"] or {"phase": ""}
        return int(progress["epoch"]) if progress["phase"].startswith("task") else 0

    def versions_of(self, id: str) -> list[int]:
        store = VersionStore(self.folder)
        return [n for n in store.versions() if store.manifest(n).has_learned(id)]

    def check_learned_once(self, id: str) -> None:
        """Assert that the task made exactly one version, promoted once, undamaged, with all its images stored."""
        task = self.wait_until_ended(id)
        assert task["state"] == "published", task
        assert self.versions_of(id) == [task["version"]]
        store = VersionStore(self.folder)
        assert [line.version for line in store.log()].count(task["version"]) == 1
        store.load(task["version"])
        images = ImageStore(self.folder)
        for keys in self.queue.get(id).classes.values():
            for key in keys:
                images.read(key)

    def check(self) -> None:
        """Assert that `openworld check` finds nothing wrong, while the processes run."""
        report = check_folder(self.folder, self.queue)
        assert report.problems == [], report.problems


@contextmanager
def folder_loop(data: Path, redis: RedisServer, **settings: str) -> Iterator[Loop]:
    """A data folder with three versions. The test starts server and trainer; both are checked at its end."""
    running = Loop(learned_folder(data), redis, variables(**settings))
    try:
        yield running
        running.check()
    finally:
        running.stop()


@contextmanager
def loop(root: Path, **settings: str) -> Iterator[Loop]:
    """The same with its own Redis server."""
    with RedisServer(root / "robot" / "redis") as redis, folder_loop(root / "robot", redis, **settings) as running:
        yield running


def wait_for_death(process: Program) -> None:
    """Wait until the injected fault has killed the process."""
    wait_until(lambda: process.poll() is not None, 120)
    assert process.returncode == -signal.SIGKILL
