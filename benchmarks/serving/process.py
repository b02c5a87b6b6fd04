"""Start a contender, wait until it answers, and end it with all its child processes."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from benchmarks.serving.load import HOST

START_SECONDS = 120.0
STOP_SECONDS = 15.0
LOG_TAIL = 1500  # characters of a log to show


class NotServing(Exception):
    """The contender did not start or does not answer; the message has the end of its log."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Running:
    """A running contender."""

    process: subprocess.Popen[bytes]
    port: int
    start_seconds: float

    def cpu_seconds(self) -> float:
        """CPU seconds of the process and its children."""
        total = 0.0
        for process in family(self.process.pid):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], port: int, request: bytes, log: Path, cwd: Path
) -> Iterator[Running]:
    """Start the command in a new session, wait for a 200 to `request`, and end it on exit."""
    started = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        _wait(process, port, request, log)
        yield Running(process, port, round(time.monotonic() - started, 1))
    finally:
        stop(process)


def _wait(process: subprocess.Popen[bytes], port: int, request: bytes, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    status: int | str = "no connection"
    while time.monotonic() < end:
        if process.poll() is not None:
            raise NotServing(f"it ended with code {process.returncode}: {_tail(log)}")
        try:
            status = _ask(port, request)
            if status == 200:
                return
        except (OSError, http.client.HTTPException) as error:
            status = type(error).__name__
        time.sleep(0.1)
    raise NotServing(f"no answer within {START_SECONDS:g} s (last: {status}): {_tail(log)}")


def _ask(port: int, request: bytes) -> int:
    with socket.create_connection((HOST, port), timeout=10) as connection:
        connection.sendall(request)
        response = http.client.HTTPResponse(connection)
        response.begin()
        response.read()
        return response.status


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL:].strip() or "it logged nothing"


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate the process and its children by pid, then kill the rest; some workers leave the session."""
    members = family(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    _, left = psutil.wait_procs(members, timeout=2)
    for member in left:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(left, timeout=STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # processes started in the meantime
    process.wait(STOP_SECONDS)
