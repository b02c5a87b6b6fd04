"""What one `openworld up` has to itself: its data folder, and its ports. Asked for before anything is started."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from models.errors import OpenWorldError

LOCK = ".up.lock"
LETTING_GO = 5.0  # seconds for the children of an `up` that was killed to be gone
LOOK_AGAIN = 0.05


@contextmanager
def only_one(data: Path) -> Iterator[int]:
    """Hold the folder, by this descriptor: children that inherit it hold the folder until the last of them is gone."""
    with (data / LOCK).open("a+") as lock:
        deadline = time.monotonic() + LETTING_GO
        while not _locked(lock.fileno()):
            lock.seek(0)
            pid = lock.read()
            if _runs(pid) or time.monotonic() > deadline:
                raise OpenWorldError(
                    f"{data} is in use by another `openworld up` (pid {pid or 'unknown'}): "
                    "use that one, stop it first, or give another folder with --data"
                )
            time.sleep(LOOK_AGAIN)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield lock.fileno()


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _runs(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass  # somebody else's, but it runs
    return True


def free_port(host: str, port: int, remedy: str) -> int:
    """The port, or a free one for 0."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise OpenWorldError(f"cannot listen on {host}, port {port} ({error.strerror or error}): {remedy}") from error
