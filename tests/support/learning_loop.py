"""Redis, server and trainer as real processes on a tiny backbone, with fault injection.

`python -m tests.support.learning_loop serve|train ...` runs `openworld serve|train ...` on the tiny backbone. At the
step that FAULT names, the process kills itself, or the process that FAULT_PID names.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from models.versions.store import VersionStore
from tasks.images import ImageStore
from tasks.queue import TaskQueue, connect
from tests.support.redis_servers import RedisServer
from tests.support.servers import IMAGES, address_of, learned_folder, wait_until
from tests.support.settings import clean_environment, learner_settings, variables

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
    settings: dict[str, str] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    url: str = ""

    def start(self, program: str, fault: str = "", victim: int = 0) -> subprocess.Popen[bytes]:
        log = self.data.parent / f"{program}-{len(self.processes)}.log"
        environment = clean_environment()
        environment |= {
            "OPENWORLD_REDIS_URL": self.redis.url,
            "OPENWORLD_LOG_FORMAT": "json",
            "OPENWORLD_PORT": "0",
            "OPENWORLD_TRAIN_METRICS_PORT": "0",
            "OPENWORLD_TRAIN_NICE": "0",
            "OPENWORLD_TRAIN_LEASE_SECONDS": str(LEASE),
            "OPENWORLD_SERVE_POLL_SECONDS": "0.2",
            "OPENWORLD_SERVE_DRAIN_SECONDS": "0",
            "FAULT": fault,
            "FAULT_PID": str(victim),
            **self.settings,
        }
        command = [sys.executable, "-m", "tests.support.learning_loop", program, "--data", str(self.data)]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        self.processes.append(process)
        if program == "serve":
            self.url = address_of(process, log)
        return process

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    @property
    def queue(self) -> TaskQueue:
        return TaskQueue(connect(self.redis.url), lease_seconds=LEASE)

    def submit(self, files: list[tuple[str, tuple[str, bytes]]], key: str | None = None) -> httpx.Response:
        headers = {"Idempotency-Key": key} if key else {}
        return httpx.post(f"{self.url}/tasks", files=files, headers=headers, timeout=30)

    def task(self, id: str) -> dict[str, Any]:
        response = httpx.get(f"{self.url}/tasks/{id}", timeout=30)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def wait_until_ended(self, id: str, seconds: float = 60) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while (task := self.task(id))["state"] not in ENDED:
            assert time.monotonic() < end, task
            time.sleep(0.05)
        return task

    def versions_of(self, id: str) -> list[int]:
        store = VersionStore(self.data)
        return [n for n in store.versions() if store.manifest(n).task_id == id]

    def check_learned_once(self, id: str) -> None:
        """Assert that the task made exactly one version, promoted once, undamaged, with all its images stored."""
        task = self.wait_until_ended(id)
        assert task["state"] == "published", task
        assert self.versions_of(id) == [task["version"]]
        store = VersionStore(self.data)
        assert [line.version for line in store.log()].count(task["version"]) == 1
        store.load(task["version"])
        images = ImageStore(self.data)
        for keys in self.queue.get(id).classes.values():
            for key in keys:
                images.read(key)


@contextmanager
def loop(root: Path, **settings: str) -> Iterator[Loop]:
    """Redis and a data folder with three versions. The test starts server and trainer."""
    data = learned_folder(root / "robot")
    with RedisServer(data / "redis") as redis:
        running = Loop(data, redis, variables(**settings))
        try:
            yield running
        finally:
            running.stop()


def wait_for_death(process: subprocess.Popen[bytes]) -> None:
    """Wait until the injected fault has killed the process."""
    wait_until(lambda: process.poll() is not None, 60)
    assert process.returncode == -signal.SIGKILL


# Fault injection, inside the child process


def _die() -> None:
    victim = int(os.environ.get("FAULT_PID") or 0) or os.getpid()
    os.environ["FAULT"] = ""
    os.kill(victim, signal.SIGKILL)
    if victim != os.getpid():
        time.sleep(0.2)  # let the victim end before this process continues


def _at(step: str) -> None:
    if os.environ.get("FAULT") == step:
        _die()


def _arm_server() -> None:
    from service.routes import tasks as routes

    store, submit = routes._store, TaskQueue.submit

    def storing(*arguments: Any) -> None:
        _at("request accepted")
        store(*arguments)
        _at("images stored")

    def submitting(*arguments: Any) -> Any:
        submitted = submit(*arguments)
        _at("task added")
        return submitted

    routes._store = storing
    TaskQueue.submit = submitting  # type: ignore[method-assign]


def _arm_trainer() -> None:
    from openworld.commands import train
    from openworld.environment import settings_from
    from tests.support.tiny_model import TINY_SETTINGS, tiny_backbone
    from trainer import publish as publishing
    from trainer.learning.progress import Event
    from trainer.learning.settings import LearnerSettings
    from trainer.worker import worker

    given = {name for name, variable in LearnerSettings.variables().items() if variable in os.environ}
    chosen = {name: value for name, value in TINY_SETTINGS.items() if name not in given}
    train.settings_from = lambda kind, given: (  # type: ignore[assignment]
        learner_settings(**chosen) if kind is LearnerSettings else settings_from(kind, given)
    )
    publishing.open_backbone = lambda *arguments: tiny_backbone()  # type: ignore[assignment]
    publishing.VersionStore = lambda root: VersionStore(root, on_step=_at)  # type: ignore[assignment, misc]
    work, on_event = worker.Worker.work, worker._LeaseKeeper.on_event
    publish = worker.Lease.publish

    def working(self: Any, lease: Any) -> None:
        _at("task claimed")
        work(self, lease)

    def on_event_then_fault(self: Any, event: Event) -> None:
        on_event(self, event)
        _at("mid-epoch" if event.phase.startswith("task") and event.epoch == 1 else event.phase)
        if pause := float(os.environ.get("SLOW") or 0):
            time.sleep(pause)

    def publishing_(self: Any, *arguments: Any) -> Any:
        _at("before the acknowledgement")
        return publish(self, *arguments)

    worker.Worker.work = working  # type: ignore[method-assign]
    worker._LeaseKeeper.on_event = on_event_then_fault  # type: ignore[method-assign]
    worker.Lease.publish = publishing_  # type: ignore[method-assign]


if __name__ == "__main__":
    {"serve": _arm_server, "train": _arm_trainer}[sys.argv[1]]()
    from openworld.cli import main

    sys.exit(main())
