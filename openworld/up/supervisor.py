"""Programs kept running, in stages: a program may need those of the stages before its own.

    a program ends                it is started again after 0.5 s, 1 s, ... 30 s; 0.5 s again when it has run for 60 s
    ... early, with exit code 2   people have to mend something: all are stopped, and its message is ours
    Ctrl-C, SIGTERM, SIGHUP       all are asked to end, a stage when the one after it has ended; killed when they do not
    a second one                  all are killed at once

One event loop owns the state and sleeps until something happens.
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

MISTAKE = 2  # the exit code of a mistake that the message says how to mend: trying again mends nothing
FORCED = 130  # our exit code when people did not want to wait
ONE_WISH = 0.5  # seconds in which signals count as one: `make` and `timeout` pass on what we have got already


class Program(Protocol):
    """Something to keep running."""

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Begin a run; OSError or OpenWorldError when that is not possible now."""

    async def ready(self) -> None:
        """Return when those that come after it may start; asked once, after the first start."""

    async def wait(self) -> int:
        """When the run has ended: its exit code, or minus the signal that ended it."""

    def send(self, number: int) -> None:
        """A signal; nothing happens when it does not run."""

    def last_words(self) -> str:
        """Why the last run ended, as it said itself."""


@dataclass(frozen=True)
class RestartPolicy:
    """Seconds before a program that has ended is started again: doubled each time, until a run has lasted."""

    first: float = 0.5
    longest: float = 30.0
    settled: float = 60.0  # a run that lasts so long was no failed start


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
        self._grace = grace  # seconds from asking a program to end to killing it
        self._restart_policy = restart_policy or RestartPolicy()
        self._patience = patience  # seconds for a program to be ready before the next one is started all the same
        self._stopping = asyncio.Event()
        self._told = -math.inf
        self._forced = False
        self._proven: set[str] = set()  # programs that have run for long: their settings are not the mistake
        self._mistake: OpenWorldError | None = None

    async def run(self) -> int:
        """The exit code; OpenWorldError when a program said what has to be mended first."""
        self._heed_signals()
        keepers: dict[str, asyncio.Task[None]] = {}
        ready: list[asyncio.Task[None]] = []
        try:
            for program in self._programs:
                if self._stopping.is_set():
                    break
                keepers[program.name] = asyncio.create_task(self._keep(program))
                keepers[program.name].add_done_callback(lambda _: self._stopping.set())  # it never ends alone
                ready.append(asyncio.create_task(program.ready()))
                await self._await_ready(program, ready[-1])
            await self._stopping.wait()
        finally:
            self._stopping.set()
            for one in ready:
                one.cancel()
            for stage in reversed(self._stages):
                await asyncio.gather(*(self._end(one, keepers[one.name]) for one in stage if one.name in keepers))
            await asyncio.gather(*ready, return_exceptions=True)
        await asyncio.gather(*keepers.values())  # for the exception, if it is a bug that ended one
        log.info("stopped")
        if self._mistake is not None:
            raise self._mistake
        return FORCED if self._forced else 0

    # Signals

    def _heed_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            loop.add_signal_handler(number, self._heed, number)

    def _heed(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if not self._stopping.is_set():
            log.info("%s: stopping; once more to stop at once", number.name)
            self._told = now
            self._stopping.set()
        elif now - self._told > ONE_WISH and not self._forced:
            log.warning("%s again: killing what still runs", number.name)
            self._forced = True
            for program in self._programs:
                program.send(signal.SIGKILL)

    # Starting, and starting again

    async def _await_ready(self, program: Program, ready: asyncio.Task[None]) -> None:
        """Until it is ready, or that is nothing to wait for any more; then it may become so later."""
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({ready, stopping}, timeout=self._patience, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if ready.done():
            ready.result()
        elif not self._stopping.is_set():
            log.warning("%s is not ready after %g s; starting the rest", program.name, self._patience)

    async def _keep(self, program: Program) -> None:
        backoff = Backoff(self._restart_policy.first, self._restart_policy.longest)
        while not self._stopping.is_set():
            began = time.monotonic()
            code, end = await self._run_once(program)
            if time.monotonic() - began >= self._restart_policy.settled:
                self._proven.add(program.name)
                backoff.reset()
            if self._stopping.is_set():
                return
            if code == MISTAKE and program.name not in self._proven:
                self._mistake = OpenWorldError(f"the {program.name} cannot start: {program.last_words()}")
                return
            pause = backoff.next()
            log.error("%s %s; starting it again in %g s", program.name, end, pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def _run_once(self, program: Program) -> tuple[int | None, str]:
        """Its exit code, if it came to that, and how it ended in words."""
        try:
            await program.start()
        except (OSError, OpenWorldError) as error:
            return None, f"could not be started ({error})"
        if self._stopping.is_set():  # told while it started, when there was nobody to pass it on to
            program.send(signal.SIGKILL if self._forced else signal.SIGTERM)
        code = await program.wait()
        return code, f"ended with code {code}" if code >= 0 else f"was ended by {_name_of(-code)}"

    async def _end(self, program: Program, keeper: asyncio.Task[None]) -> None:
        program.send(signal.SIGTERM)
        await asyncio.wait({keeper}, timeout=self._grace)
        if not keeper.done():
            log.warning("%s has not ended in %g s; killing it", program.name, self._grace)
            program.send(signal.SIGKILL)
            await asyncio.wait({keeper})


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time one has no name
