"""A child process that says what it says to us, line by line, and dies with us.

**It does not outlive this process, however that ends.** (On Linux; elsewhere it does when we are killed with SIGKILL.)
It has a session of its own: the terminal's Ctrl-C is for us alone, and what it starts itself can be killed with it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from openworld.up.parent_death import mortal

CHUNK = 65536  # bytes read at once, and the longest line that is waited for
LAST_WORDS = 20  # lines kept for the message about a child that could not start
LAST_LINES = 1.0  # seconds to read what an ended child has left in the pipe


async def _at_once() -> None:
    return


class ChildProcess:
    """A program for the supervisor: a command line. Start it on the main thread: with that it dies."""

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
        # A pipe of our own: with asyncio's, the child has not ended before every grandchild has let go of it.
        reading, writing = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *mortal(self._command),
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
            os.killpg(self._process.pid, signal.SIGKILL)  # what it has started goes with it
        with suppress(TimeoutError):
            await asyncio.wait_for(self._listening, LAST_LINES)
        return code

    def send(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)  # its own `send_signal` may take the exit code away from `wait`

    def last_words(self) -> str:
        """Its last error message; without one, its last lines."""
        lines = list(self._said)
        errors = [place for place, line in enumerate(lines) if line.startswith("error: ")]
        return "\n".join(lines[errors[-1] if errors else 0 :]).removeprefix("error: ")

    async def _listen(self, descriptor: int) -> None:
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
                    self._say(line)
            if rest:
                self._say(rest)
        finally:
            transport.close()

    def _say(self, line: bytes) -> None:
        text = line.decode(errors="replace").removesuffix("\r")
        self._said.append(text)
        self._heard(text)
