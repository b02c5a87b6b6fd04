"""`openworld serve` and `openworld train` on a tiny backbone, as processes that a fault kills at a chosen step.

At the step that FAULT names, the process kills itself, or the process that FAULT_PID names. While the file that
BROKEN_ENGINE names exists, the server computes no answers. The trainer pauses for SLOW seconds after every event, and
while the file that HOLD names exists, or only from the end of the epoch on that this file contains. A call of Redis
waits REDIS_SECONDS for its reply. With NEXT_RELEASE, the program writes manifests with a newer minor format and an
unknown field. Without these variables the programs are unchanged.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import service.main  # noqa: F401 - imported by the commands when they start
from models import files
from models.inference.predictor import Predictor
from models.versions.manifest import MINOR, Manifest, canonical_json
from models.versions.store import VersionStore
from openworld.cli import main
from openworld.commands import train
from openworld.environment import settings_from
from service.routes import tasks as routes
from tasks.images import FeatureCache, feature_cache
from tasks.queue import TaskQueue, connection
from tests.support.settings import learner_settings
from tests.support.tiny_model import TINY_SETTINGS, recorded_tiny
from trainer import context
from trainer import publish as publishing
from trainer.learning.progress import Event
from trainer.learning.settings import LearnerSettings
from trainer.worker import lease_keeper, worker

# The programs are forked from a process that has imported this module: the import of torch takes longer than most
# tests. It has no threads and runs none of the code under test.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


@dataclass(frozen=True)
class Program:
    """A running program, with those methods of `subprocess.Popen` that tests use."""

    _process: BaseProcess

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        assert self.returncode is not None, f"process {self.pid} runs after {timeout} s"
        return self.returncode


def start_program(program: str, data: Path, log: Path, environment: dict[str, str]) -> Program:
    """Start `openworld <program> --data <data>` with exactly these environment variables."""
    log.touch()
    process = _FORKS.Process(target=_run, args=(program, data, log, environment))
    process.start()
    return Program(process)


# Inside the child process


def _run(program: str, data: Path, log: Path, environment: dict[str, str]) -> None:
    with log.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    if "FAULT" in environment:
        {"serve": _arm_server, "train": _arm_trainer}[program]()
    if "REDIS_SECONDS" in environment:
        connection.SOCKET_SECONDS = float(environment["REDIS_SECONDS"])
    if "NEXT_RELEASE" in environment:
        _write_manifests_of_the_next_release()
    sys.exit(main([program, "--data", str(data)]))


def _write_manifests_of_the_next_release() -> None:
    def to_json(self: Manifest) -> bytes:
        newer = {"schema_minor": MINOR + 1, "of_the_next_release": {"unknown": [1, 2]}}
        return canonical_json(self.model_dump() | newer, what="the manifest")

    Manifest.to_json = to_json  # type: ignore[method-assign]


def _die() -> None:
    victim = int(os.environ.get("FAULT_PID") or 0) or os.getpid()
    os.environ["FAULT"] = ""
    os.kill(victim, signal.SIGKILL)
    if victim != os.getpid():
        time.sleep(0.2)  # let the victim end before this process continues


def _is_armed(step: str) -> bool:
    return os.environ.get("FAULT") == step


def _at(step: str) -> None:
    if _is_armed(step):
        _die()


def _arm_server() -> None:
    store, submit, score = routes._store, TaskQueue.submit, Predictor.score

    def scoring(*arguments: Any) -> Any:
        if (switch := os.environ.get("BROKEN_ENGINE")) and Path(switch).exists():
            raise RuntimeError("the device is lost")
        return score(*arguments)

    def storing(*arguments: Any) -> None:
        _at("request accepted")
        store(*arguments)
        _at("images stored")

    def submitting(*arguments: Any, **more: Any) -> Any:
        submitted = submit(*arguments, **more)
        _at("task added")
        return submitted

    Predictor.score = scoring  # type: ignore[method-assign]
    routes._store = storing
    TaskQueue.submit = submitting  # type: ignore[method-assign]


def _is_held(event: Event) -> bool:
    try:
        epoch = int(Path(os.environ["HOLD"]).read_text() or 0)
    except (KeyError, FileNotFoundError):
        return False
    return not epoch or (event.phase.startswith("task") and event.epoch >= epoch)


def _arm_trainer() -> None:
    given = {name for name, variable in LearnerSettings.variables().items() if variable in os.environ}
    chosen = {name: value for name, value in TINY_SETTINGS.items() if name not in given}
    train.settings_from = lambda kind, given: (  # type: ignore[assignment]
        learner_settings(**chosen) if kind is LearnerSettings else settings_from(kind, given)
    )
    context.open_backbone = recorded_tiny  # type: ignore[assignment]
    publishing.VersionStore = lambda root: VersionStore(root, on_step=_at)  # type: ignore[assignment, misc]
    write_all, append, packed = files._write_all, FeatureCache._append, feature_cache.packed

    def writing(descriptor: int, data: bytes) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent.name == "tasks" and _is_armed("task file"):
            os.write(descriptor, data[: len(data) // 2])
            _die()
        write_all(descriptor, data)

    def appending(self: Any, *arguments: Any) -> None:
        if _is_armed("cache entry"):
            feature_cache.packed = lambda *record: packed(*record)[:-100]
            with suppress(Exception):
                append(self, *arguments)
            _die()
        append(self, *arguments)

    files._write_all = writing
    FeatureCache._append = appending  # type: ignore[method-assign]
    worker.prepare_backbone = lambda *arguments: None  # type: ignore[assignment]
    work, on_event = worker.Worker.work, lease_keeper.LeaseKeeper.on_event
    publish = worker.Lease.publish

    def working(self: Any, lease: Any) -> None:
        _at("task claimed")
        work(self, lease)

    def on_event_then_fault(self: Any, event: Event) -> None:
        on_event(self, event)
        _at("mid-epoch" if event.phase.startswith("task") and event.epoch == 1 else event.phase)
        time.sleep(float(os.environ.get("SLOW") or 0))
        while _is_held(event):
            time.sleep(0.02)

    def publishing_(self: Any, *arguments: Any) -> Any:
        _at("before the acknowledgement")
        return publish(self, *arguments)

    worker.Worker.work = working  # type: ignore[method-assign]
    lease_keeper.LeaseKeeper.on_event = on_event_then_fault  # type: ignore[method-assign]
    worker.Lease.publish = publishing_  # type: ignore[method-assign]
