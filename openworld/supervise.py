"""Child processes kept running: started in order, started again when they end, stopped in reverse order.

**No child outlives this process, however it ends.** (On Linux; elsewhere one that is killed with SIGKILL leaves them.)
One event loop owns the state and sleeps until something happens: a child ends or says something, a signal comes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Protocol, TextIO

from models.errors import OpenWorldError

log = logging.getLogger(__name__)

MISTAKE = 2  # the exit code of a mistake that the message says how to mend: trying again mends nothing
FORCED = 130  # ours, when people would not wait
ONE_WISH = 0.5  # seconds in which signals count as one: `make` and `timeout` pass on what we have got already
CHUNK = 65536  # bytes read at once, and the longest line that is waited for
LAST_WORDS = 20  # lines kept for the message of a child that cannot start
LAST_LINES = 1.0  # seconds for what an ended child has left in the pipe

# Run by a Python of its own, which then becomes the child: code between fork and exec (`preexec_fn`) may deadlock
# where there are threads. The signal is set before looking at the parent, as the parent may die in between.
_DIE_WITH_PARENT = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class LogStream:
    """One stream for all: lines of text behind the name of who says them, or JSON objects with a field `program`."""

    def __init__(self, stream: TextIO, style: Literal["json", "text"], names: Sequence[str]) -> None:
        self._stream, self._style = stream, style
        width = max(map(len, names))
        colours = stream.isatty() and "NO_COLOR" not in os.environ
        self._prefix = {
            name: f"\x1b[{36 - place % 6}m{name:<{width}} |\x1b[0m " if colours else f"{name:<{width}} | "
            for place, name in enumerate(names)
        }

    def write(self, name: str, text: str) -> None:
        if self._style == "json":
            shown = _with_program(text, name)
        else:
            shown = "\n".join(self._prefix[name] + line for line in text.split("\n"))
        with suppress(OSError, ValueError):  # Nobody reads it any more: the service matters more than its log.
            self._stream.write(f"{shown}\n")
            self._stream.flush()


class OwnLines(logging.Handler):
    """What this process logs itself, into the same stream."""

    def __init__(self, stream: LogStream, name: str) -> None:
        super().__init__()
        self._log_stream, self._program = stream, name

    def emit(self, record: logging.LogRecord) -> None:
        self._log_stream.write(self._program, self.format(record))


def _with_program(line: str, name: str) -> str:
    """Also what is no JSON (a traceback, a library's warning) becomes some, so that machines can read every line."""
    record = None
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
    if not isinstance(record, dict):
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"time": now, "level": "info", "message": line}
    return json.dumps({**record, "program": name}, ensure_ascii=False)


class Program(Protocol):
    """Something to keep running."""

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Begin a run; OSError or OpenWorldError when that is not possible now."""

    async def ready(self) -> None:
        """Return when those that come after it may start; asked once."""

    async def wait(self) -> int:
        """The exit code of the run, negative for a signal, when it has ended."""
        ...

    def signal(self, number: int) -> None:
        """Nothing happens when it does not run."""

    def last_words(self) -> str:
        """What it said at the end of its last run."""
        ...


async def _at_once() -> None:
    return


class Command:
    """A program that is a command line, in a session of its own: the terminal's Ctrl-C is for us alone."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        heard: Callable[[str], None],
        ready: Callable[[], Awaitable[None]] = _at_once,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._command, self._environment, self._pass_fds = list(command), dict(environment), tuple(pass_fds)
        self._heard, self._ready = heard, ready
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._said: deque[str] = deque(maxlen=LAST_WORDS)

    async def start(self) -> None:
        self._said.clear()
        command = self._command
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
        # A pipe of our own: asyncio's has not ended before every grandchild that holds it has.
        reading, writing = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env=self._environment,
                pass_fds=self._pass_fds,
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._listening = asyncio.create_task(self._listen(reading))

    async def ready(self) -> None:
        await self._ready()

    async def wait(self) -> int:
        assert self._process is not None
        assert self._listening is not None
        code = await self._process.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # What it has started itself goes with it.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._listening, LAST_LINES)
        return code

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def last_words(self) -> str:
        """From its last error message on."""
        lines = list(self._said)
        errors = [place for place, line in enumerate(lines) if line.startswith("error: ")]
        return "\n".join(lines[errors[-1] if errors else 0 :]).removeprefix("error: ")

    async def _listen(self, descriptor: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
        )
        try:
            rest = b""
            while chunk := await reader.read(CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > CHUNK:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._say(line)
            if rest:
                self._say(rest)
        finally:
            transport.close()

    def _say(self, line: bytes) -> None:
        text = line.decode(errors="replace").removesuffix("\r")
        self._said.append(text)
        self._heard(text)


@dataclass(frozen=True)
class BackOff:
    """Seconds before a program that ended is started again: doubled each time, until a run has lasted."""

    first: float = 0.5
    longest: float = 30.0
    settled: float = 60.0  # a run that lasts so long was no failed start


class Supervisor:
    """Runs its programs, those first that others need, until it is told to stop or one cannot be started at all."""

    def __init__(
        self, programs: Sequence[Program], grace: float, back_off: BackOff | None = None, patience: float = 20.0
    ) -> None:
        self._programs, self._back_off = list(programs), back_off or BackOff()
        self._grace = grace  # seconds from asking a program to end to killing it
        self._patience = patience  # seconds for a program to be ready before the next is started anyway
        self._stopping = asyncio.Event()
        self._told = -math.inf
        self._forced = False
        self._proven: set[str] = set()  # those that have worked: with them an exit code of 2 is no wrong setting
        self._mistake: str | None = None

    async def run(self) -> int:
        """The exit code; OpenWorldError when a program says that something has to be mended first."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored: that is `nohup`
                loop.add_signal_handler(number, self._signalled, number)
        keepers: dict[str, asyncio.Task[None]] = {}
        readiness = []
        try:
            for program in self._programs:
                if self._stopping.is_set():
                    break
                keepers[program.name] = asyncio.create_task(self._keep(program))
                keepers[program.name].add_done_callback(lambda _: self._stopping.set())
                readiness.append(asyncio.create_task(self._await_ready(program)))
                await self._unless_stopping(readiness[-1], program)
            await self._stopping.wait()
        finally:
            self._stopping.set()
            for waiting in readiness:
                waiting.cancel()
            for program in reversed(self._programs):
                if program.name in keepers:
                    await self._end(program, keepers[program.name])
        await asyncio.gather(*keepers.values(), *readiness)
        if self._mistake is not None:
            raise OpenWorldError(self._mistake)
        return FORCED if self._forced else 0
