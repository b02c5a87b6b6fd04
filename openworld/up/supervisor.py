"""The supervisor of `openworld up`.

**A program that ends is started again, for whatever reason it ended, until the supervisor is told to stop.** The pause
before a restart grows from 0.5 s to 30 s, and falls back to 0.5 s after a run of 60 s.

    exit code 2 before any run of 60 s   a wrong setting: all programs stop, and its message becomes the error of `up`
    SIGINT, SIGTERM or SIGHUP            SIGTERM to all programs, last stage first; SIGKILL after the grace period
    another signal                       SIGKILL to all programs

Programs are in stages: a program may need those of earlier stages. One event loop owns all state.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from models.backoff import Backoff
from models.errors import OpenWorldError

log = logging.getLogger(__name__)

CONFIGURATION_ERROR = 2  # exit code of a program that a restart cannot help
KILLED = 130  # exit code of `up` after a second signal
SAME_SIGNAL_SECONDS = 0.5  # `make` and `timeout` pass on a signal that `up` has received as well


class Program(Protocol):
    """A program to keep running."""

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Begin a run. OSError or OpenWorldError: try again later."""

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
        self._stopping = asyncio.Event()
        self._stop_time = -math.inf
        self._killed = False
        self._error: OpenWorldError | None = None

    async def run(self) -> int:
        """Return the exit code. OpenWorldError: a program reports a wrong setting."""
        self._handle_signals()
        keepers: dict[str, asyncio.Task[None]] = {}
        ready: list[asyncio.Task[None]] = []
        try:
            for program in self._programs:
                if self._stopping.is_set():
                    break
                keepers[program.name] = asyncio.create_task(self._keep_running(program))
                keepers[program.name].add_done_callback(lambda _: self._stopping.set())
                ready.append(asyncio.create_task(program.ready()))
                await self._wait_until_ready(program, ready[-1])
            await self._stopping.wait()
        finally:
            self._stopping.set()
            for task in ready:
                task.cancel()
            for stage in reversed(self._stages):
                await asyncio.gather(*(self._stop(one, keepers[one.name]) for one in stage if one.name in keepers))
            await asyncio.gather(*ready, return_exceptions=True)
        await asyncio.gather(*keepers.values())  # raises what ended a keeper unexpectedly
        log.info("stopped")
        if self._error is not None:
            raise self._error
        return KILLED if self._killed else 0

    # Signals

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started with nohup: survive the end of the terminal
            loop.add_signal_handler(number, self._on_signal, number)

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

    # Start and restart

    async def _wait_until_ready(self, program: Program, ready: asyncio.Task[None]) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({ready, stopping}, timeout=self._patience, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if ready.done():
            ready.result()
        elif not self._stopping.is_set():
            log.warning("%s is not ready after %g s: starting the next program", program.name, self._patience)

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
            if code == CONFIGURATION_ERROR and not has_settled:
                self._error = OpenWorldError(f"the {program.name} cannot start: {program.last_error()}")
                return
            pause = backoff.next()
            log.error("%s %s: restart in %g s", program.name, result, pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def _run_once(self, program: Program) -> tuple[int | None, str]:
        """The exit code, None if the program could not be started, and the result in words."""
        try:
            await program.start()
        except (OSError, OpenWorldError) as error:
            return None, f"could not be started ({error})"
        if self._stopping.is_set():  # a signal that came during the start has not reached the program
            program.send(signal.SIGKILL if self._killed else signal.SIGTERM)
        code = await program.wait()
        return code, f"ended with code {code}" if code >= 0 else f"was ended by {_signal_name(-code)}"

    async def _stop(self, program: Program, keeper: asyncio.Task[None]) -> None:
        program.send(signal.SIGTERM)
        await asyncio.wait({keeper}, timeout=self._grace)
        if not keeper.done():
            log.warning("%s has not ended after %g s: killing it", program.name, self._grace)
            program.send(signal.SIGKILL)
            await asyncio.wait({keeper})


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # real-time signals have no name
