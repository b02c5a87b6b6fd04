"""The thread that fills the inbox, so that no request ever waits for its disk.

**Every sighting that is offered ends in exactly one call: `on_kept` when it is new or folded, `on_drop` otherwise.**
Nothing is raised into the service: a full disk costs novelties, never answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from models.errors import OpenWorldError
from service.inbox.records import Kept, Reason, Sighting
from service.inbox.store import Inbox

log = logging.getLogger(__name__)

# "queue": the queue was full, or closed; "error": the disk or the database did not take it.
DropReason = Reason | Literal["queue", "error"]

LOG_SECONDS = 60.0  # between two lines about errors: a full disk would otherwise fill up on its own log
SWEEP_SECONDS = 60.0  # between two looks for what has aged out


class InboxWriter:
    """A bounded queue before an inbox, and the one thread that empties it."""

    def __init__(
        self,
        inbox: Inbox,
        *,
        max_sightings: int = 64,
        max_bytes: int = 64 * 2**20,
        on_kept: Callable[[Kept], None] = lambda kept: None,
        on_drop: Callable[[DropReason], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = inbox
        self._max_sightings, self._max_bytes = max_sightings, max_bytes
        self._on_kept, self._on_drop = on_kept, on_drop
        self._clock = clock
        self._logged: float | None = None
        self._silenced = 0
        self._swept = clock()
        # Under this condition's lock, which is never held while anything slow happens:
        self._changed = threading.Condition()
        self._queue: deque[Sighting] = deque()
        self._bytes = 0  # of the queue, and of the one being added
        self._adding = False
        self._closed = False
        # A daemon: a server that dies without closing must not be kept alive by its inbox.
        self._thread = threading.Thread(target=self._run, name="inbox-writer", daemon=True)
        self._thread.start()

    def offer(self, sighting: Sighting) -> bool:
        """Hand over a sighting without waiting; False when it was dropped because the queue is full or closed."""
        size = len(sighting.data)
        with self._changed:
            full = len(self._queue) >= self._max_sightings or self._bytes + size > self._max_bytes
            taken = not (full or self._closed)
            if taken:
                self._queue.append(sighting)
                self._bytes += size
                self._changed.notify_all()
        if not taken:
            self._drop("queue")
        return taken

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything offered so far is done; False when that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._adding), timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Take nothing more, add what is queued, and stop; False when time ran out and the rest was dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        drained = self.flush(timeout)
        with self._changed:
            rest = len(self._queue)
            self._queue.clear()
        for _ in range(rest):
            self._drop("queue")
        if drained:
            self._thread.join(timeout)  # it may be sweeping
        return drained

    # The thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed, SWEEP_SECONDS)
                sighting = self._queue.popleft() if self._queue else None
                if sighting is None and self._closed:
                    return
                self._adding = sighting is not None
            if sighting is not None:
                self._add(sighting)
                with self._changed:
                    self._adding = False
                    self._bytes -= len(sighting.data)
                    self._changed.notify_all()
            self._sweep()

    def _add(self, sighting: Sighting) -> None:
        try:
            kept = self._inbox.add(sighting)
        except Exception as error:
            self._complain("a novel image could not be kept", error)
            self._drop("error")
            return
        if kept.reason is None:
            self._call(lambda: self._on_kept(kept))
        else:
            self._drop(kept.reason)

    def _sweep(self) -> None:
        now = self._clock()
        if now - self._swept < SWEEP_SECONDS:
            return
        self._swept = now
        try:
            self._inbox.sweep()
        except Exception as error:
            self._complain("the inbox could not be swept", error)

    def _drop(self, reason: DropReason) -> None:
        self._call(lambda: self._on_drop(reason))

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:
            self._complain("counting a novel image failed", error)

    def _complain(self, what: str, error: Exception) -> None:
        now = self._clock()
        if self._logged is not None and now - self._logged < LOG_SECONDS:
            self._silenced += 1
            return
        more = f" ({self._silenced} more since the last such line)" if self._silenced else ""
        self._logged, self._silenced = now, 0
        # The errors of the store say all there is to say; of any other, a bug, the traceback is wanted.
        log.error("%s: %s%s", what, error, more, exc_info=None if isinstance(error, OpenWorldError) else error)
