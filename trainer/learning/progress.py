"""Progress of a task as events, for a terminal or for the queue."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    task: str
    phase: str
    epoch: int  # finished epochs of the phase, or finished units if the phase has no epochs
    epochs: int
    loss: float | None
    progress: float  # of the whole task, 0 to 1
    seconds_left: float | None  # None until there is enough to estimate from
    saved: bool = False  # the checkpoint holds this epoch


Listener = Callable[[Event], None]
# Share of the work before a first estimate: reading an image takes longer than training on it.
ESTIMATE_FROM = 0.05
LOOK_SECONDS = 1.0


class Progress:
    """Turns finished work into events. Work is counted in images that pass through the network."""

    def __init__(self, task: str, listener: Listener, look: Callable[[], None] = lambda: None) -> None:
        """`look` is called after every event, and about once per second between them; it may raise."""
        self._task, self._listener, self._look = task, listener, look
        self._looked = time.monotonic()
        self._total = self._done = self._skipped = 0.0
        self._started = time.monotonic()

    def plan(self, work: float) -> None:
        self._total += work

    def skip(self, work: float) -> None:
        """Count work of an earlier, interrupted run; the estimate of the remaining time leaves it out."""
        self._done += work
        self._skipped += work

    def report(
        self, phase: str, epoch: int, epochs: int, work: float, loss: float | None = None, saved: bool = False
    ) -> None:
        self._done += work
        own = self._done - self._skipped
        left = None
        if own > ESTIMATE_FROM * self._total:
            left = (time.monotonic() - self._started) / own * max(self._total - self._done, 0.0)
        share = min(self._done / self._total, 1.0) if self._total else 1.0
        self._listener(Event(self._task, phase, epoch, epochs, loss, share, left, saved))
        self._looked = -math.inf
        self.tick()

    def tick(self) -> None:
        """Call it after each small step."""
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._look()
            self._looked = time.monotonic()
