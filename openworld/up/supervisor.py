"""The supervisor of `openworld up`.

**A program that ends is started again, for whatever reason it ended, until the supervisor is told to stop.** The pause
before a restart grows from 0.5 s to 30 s, and falls back to 0.5 s after a run of 60 s.

    configuration error before any run of 60 s   all programs stop, and its message becomes the error of `up`
    SIGINT, SIGTERM or SIGHUP                    SIGTERM to all programs, last stage first; SIGKILL after a grace period
    another signal                               SIGKILL to all programs

Programs are in stages: a program may need those of earlier stages. One event loop owns all state.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from models.backoff import Backoff
from models.errors import OpenWorldError

log = logging.getLogger(__name__)

KILLED = 130  # exit code of `up` after a second signal
SAME_SIGNAL_SECONDS = 0.5  # `make` and `timeout` pass on a signal that `up` has received as well


class Program(Protocol):
    """A program to keep running."""

    @property
    def name(self) -> str: ...

    @property
    def configuration_error(self) -> int | None:
        """The exit code of an error that a restart cannot help, if there is one."""

    async def start(self) -> None:
        """Begin a run. OSError: try again later."""

    async def ready(self) -> None:
        """Return when the next program may start. Called once, after the first start."""

    async def wait(self) -> int:
        """Wait for the end of the run: its exit code, or minus the signal that ended it."""

    def send(self, number: int) -> None:
        """Send a signal; ignored if it does not run."""

    def last_error(self) -> str:
        """The error message of the last run."""


@dataclass(frozen=True)
class RestartPolicy:
    """Seconds between the end of a run and the next start."""

    first: float = 0.5
    longest: float = 30.0
    settled: float = 60.0  # a run of this length resets the pause


class Supervisor:
    """Runs its programs until it is told to stop."""

    def __init__(
        self,
        stages: Sequence[Sequence[Program]],
        *,
        grace: float,
        restart_policy: RestartPolicy | None = None,
        patience: float = 20.0,
    ) -> None:
        self._stages = stages
        self._programs = [program for stage in stages for program in stage]
        self._grace = grace  # seconds from SIGTERM to SIGKILL
        self._restart_policy = restart_policy or RestartPolicy()
        self._patience = patience  # seconds to wait for a program to be ready before the next one is started
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self._stop_time = 0.0
        self._killed = False

    async def run(self) -> int:
        """Return the exit code. OpenWorldError: a program reports a configuration error."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP: then survive the end of the terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        starter = self._create_task(self._start_all())
        await self._stopping.wait()
        starter.cancel()
        for stage in reversed(self._stages):
            await asyncio.gather(*(self._stop(program) for program in stage if program.name in self._keepers))
        log.info("stopped")
        ended = await asyncio.gather(starter, *self._keepers.values(), return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error
        return KILLED if self._killed else 0

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if not self._stopping.is_set():
            log.info("%s: stopping; send it again to kill all programs", number.name)
            self._stop_time = now
            self._stopping.set()
        elif now - self._stop_time > SAME_SIGNAL_SECONDS and not self._killed:
            log.warning("%s again: killing all programs", number.name)
            self._killed = True
            for program in self._programs:
                program.send(signal.SIGKILL)

    # Start, restart and stop

    async def _start_all(self) -> None:
        """Start each program when the previous one is ready."""
        async with asyncio.TaskGroup() as group:
            for program in self._programs:
                self._keepers[program.name] = self._create_task(self._keep_running(program))
                ready = group.create_task(program.ready())
                await asyncio.wait({ready}, timeout=self._patience)
                if not ready.done():
                    log.warning("%s is not ready after %g s: starting the next program", program.name, self._patience)
        await self._stopping.wait()

    def _create_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose end stops the supervisor."""
        task = asyncio.create_task(coroutine)
        task.add_done_callback(lambda _: self._stopping.set())
        return task

    async def _keep_running(self, program: Program) -> None:
        backoff = Backoff(self._restart_policy.first, self._restart_policy.longest)
        has_settled = False
        while not self._stopping.is_set():
            started = time.monotonic()
            code, result = await self._run_once(program)
            if time.monotonic() - started >= self._restart_policy.settled:
                has_settled = True
                backoff.reset()
            if self._stopping.is_set():
                return
            if code is not None and code == program.configuration_error and not has_settled:
                raise OpenWorldError(f"{program.name} cannot start: {program.last_error()}")
            pause = backoff.next()
            log.error("%s %s: restart in %g s", program.name, result, pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def _run_once(self, program: Program) -> tuple[int | None, str]:
        """The exit code, None if the program could not be started, and the result in words."""
        try:
            await program.start()
        except OSError as error:
            return None, f"could not be started ({error})"
        if self._stopping.is_set():  # a signal that came during the start has not reached the program
            program.send(signal.SIGKILL if self._killed else signal.SIGTERM)
        code = await program.wait()
        if code >= 0:
            return code, f"ended with code {code}"
        known = {number.value: number.name for number in signal.Signals}
        return code, f"was ended by {known.get(-code, f'signal {-code}')}"

    async def _stop(self, program: Program) -> None:
        keeper = self._keepers[program.name]
        program.send(signal.SIGTERM)
        await asyncio.wait({keeper}, timeout=self._grace)
        if not keeper.done():
            log.warning("%s has not ended after %g s: killing it", program.name, self._grace)
            program.send(signal.SIGKILL)
            await asyncio.wait({keeper})
