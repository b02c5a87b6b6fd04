"""A supervised child process whose output is read line by line.

**A child never outlives this process, however this process ends.** (On Linux; elsewhere a child survives if this
process is killed with SIGKILL.) A child has its own session: Ctrl-C on the terminal reaches this process only, and
processes that the child starts can be killed with it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

CHUNK = 65536  # bytes per read; a longer line is split
KEPT_LINES = 20  # of the output, for the error message of a child that cannot start
FLUSH_SECONDS = 1.0  # to read what an ended child left in the pipe

# A separate Python process sets the death signal and then becomes the child: with threads, code between fork and exec
# (`preexec_fn`) may deadlock. It sets the signal before it checks the parent, which may die in between.
_LAUNCHER = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def die_with_parent(command: Sequence[str]) -> list[str]:
    """`command`, killed when the *thread* that starts it ends: start it from a thread that outlives it."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]


class ChildProcess:
    """A command line as a program of the supervisor. Start it on the main thread."""

    configuration_error: int | None = 2

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_line: Callable[[str], None],
        ready: Callable[[], Awaitable[None]] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._command, self._environment, self._pass_fds = list(command), dict(environment), tuple(pass_fds)
        self._on_line, self._ready = on_line, ready
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)

    async def start(self) -> None:
        self._last_lines.clear()
        # Not asyncio's own pipe: with that, wait() returns only when every grandchild has closed it.
        read_end, write_end = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *die_with_parent(self._command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env=self._environment,
                pass_fds=self._pass_fds,
                start_new_session=True,
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self._reader = asyncio.create_task(self._read(read_end))

    async def ready(self) -> None:
        if self._ready is not None:
            await self._ready()

    async def wait(self) -> int:
        assert self._process is not None
        assert self._reader is not None
        code = await self._process.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # processes that the child has started
        with suppress(TimeoutError):
            await asyncio.wait_for(self._reader, FLUSH_SECONDS)
        return code

    def send(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)  # asyncio's `send_signal` may take the exit code from `wait`

    def last_error(self) -> str:
        lines = list(self._last_lines)
        errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        return "\n".join(lines[errors[-1] if errors else 0 :]).removeprefix("error: ")

    async def _read(self, descriptor: int) -> None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(descriptor, "rb", buffering=0)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            rest = b""
            while chunk := await reader.read(CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > CHUNK:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._handle(line)
            if rest:
                self._handle(rest)
        finally:
            transport.close()

    def _handle(self, line: bytes) -> None:
        text = line.decode(errors="replace").removesuffix("\r")
        self._last_lines.append(text)
        self._on_line(text)
