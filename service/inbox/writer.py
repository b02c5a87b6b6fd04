"""The thread that adds sightings to the inbox, so that no request waits for its disk.

**Every offered sighting ends in exactly one call: `on_added` when it is new or folded, `on_drop` otherwise.** No error
reaches the service: a full disk loses novelties, never answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from models.errors import OpenWorldError
from models.files import sha256_bytes
from service.inbox.records import AddResult, DropReason, Sighting

log = logging.getLogger(__name__)

LOG_SECONDS = 60.0  # between two error messages: on a full disk, one per sighting would fill the log
SWEEP_SECONDS = 60.0  # between two sweeps of old novelties


class NoveltySink(Protocol):
    """Where novel images go: the inbox of this server, or that of another one."""

    def add(self, sighting: Sighting) -> AddResult: ...

    def sweep(self) -> int:
        """Delete the novelties that are too old; returns how many."""


class InboxWriter:
    """A bounded queue in front of a sink, and the thread that empties it."""

    def __init__(
        self,
        sink: NoveltySink,
        *,
        max_sightings: int = 64,
        max_bytes: int = 64 * 2**20,
        on_added: Callable[[AddResult], None] = lambda result: None,
        on_drop: Callable[[DropReason], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink = sink
        self._max_sightings, self._max_bytes = max_sightings, max_bytes
        self._on_added, self._on_drop = on_added, on_drop
        self._clock = clock
        self._logged: float | None = None
        self._unlogged = 0
        self._swept = clock()
        # The condition's lock guards what follows, and is never held during slow work.
        self._changed = threading.Condition()
        self._queue: deque[Sighting] = deque()
        self._bytes = 0  # of the queue, and of the sighting that is being added
        self._adding = False
        self._closed = False
        # A daemon, so that it does not keep a process alive that ends without calling close.
        self._thread = threading.Thread(target=self._run, name="inbox-writer", daemon=True)
        self._thread.start()

    def offer(self, sighting: Sighting) -> bool:
        """Queue a sighting without waiting; False when it was dropped because the queue is full or closed."""
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

    def discard(self, sha256s: Collection[str], timeout: float = 10.0) -> None:
        """Drop the queued sightings of erased images, and wait for the one that is being added. Call it in a thread."""
        with self._changed:
            queued = list(self._queue)
        # Hashed without the lock, which the event loop needs.
        erased = {id(one) for one in queued if (one.sha256 or sha256_bytes(one.data)) in sha256s}
        with self._changed:
            dropped = [one for one in self._queue if id(one) in erased]
            self._queue = deque(one for one in self._queue if id(one) not in erased)
            self._bytes -= sum(len(one.data) for one in dropped)
            self._changed.wait_for(lambda: not self._adding, timeout)
        for _ in dropped:
            self._drop("erased")

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all queued sightings are added; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._adding), timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Accept no more sightings, add the queued ones and stop; False when the timeout dropped some."""
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

    # In the thread

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
            result = self._sink.add(sighting)
        except Exception as error:
            self._log("cannot add a novel image to the inbox", error)
            self._drop("error")
            return
        if result.reason is None:
            self._call(lambda: self._on_added(result))
        else:
            self._drop(result.reason)

    def _sweep(self) -> None:
        now = self._clock()
        if now - self._swept < SWEEP_SECONDS:
            return
        self._swept = now
        try:
            self._sink.sweep()
        except Exception as error:
            self._log("cannot remove old novelties from the inbox", error)

    def _drop(self, reason: DropReason) -> None:
        self._call(lambda: self._on_drop(reason))

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:
            self._log("cannot count a novel image", error)

    def _log(self, what: str, error: Exception) -> None:
        now = self._clock()
        if self._logged is not None and now - self._logged < LOG_SECONDS:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more since the last such message)" if self._unlogged else ""
        self._logged, self._unlogged = now, 0
        # An error of ours explains itself; any other is a bug and needs its traceback.
        log.error("%s: %s%s", what, error, more, exc_info=None if isinstance(error, OpenWorldError) else error)
