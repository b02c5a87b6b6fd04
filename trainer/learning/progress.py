"""Progress of a task as events: a terminal bar shows them, and so can a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """Where a task stands."""

    task: str
    phase: str
    epoch: int  # finished epochs of the phase, or finished units where a phase has none
    epochs: int
    loss: float | None
    progress: float  # of the whole task, 0 to 1
    seconds_left: float | None  # None while there is nothing to estimate from


Listener = Callable[[Event], None]
SPEAKS_FROM = 0.05  # of the work: an image read takes longer than one trained on, and is no measure of it


class Progress:
    """Turns finished work into events. Work is counted in images passed through the network, whatever the phase."""

    def __init__(self, task: str, listener: Listener, clock: Callable[[], float] = time.monotonic) -> None:
        self._task, self._listener, self._clock = task, listener, clock
        self._total = self._done = self._skipped = 0.0
        self._started = clock()

    def plan(self, work: float) -> None:
        """Announce work that is going to be done."""
        self._total += work

    def skip(self, work: float) -> None:
        """Work that an earlier, interrupted run has done: it says nothing of this run's pace."""
        self._done += work
        self._skipped += work

    def report(self, phase: str, epoch: int, epochs: int, work: float, loss: float | None = None) -> None:
        """`work` more is done."""
        self._done += work
        own = self._done - self._skipped
        left = None
        if own > SPEAKS_FROM * self._total:
            left = (self._clock() - self._started) / own * max(self._total - self._done, 0.0)
        share = min(self._done / self._total, 1.0) if self._total else 1.0
        self._listener(Event(self._task, phase, epoch, epochs, loss, share, left))
