"""Decides by a lease in Redis which server owns the shared inbox, and applies the records of all servers to it.

The owner renews its lease every second. When it is killed, another server takes the inbox over after at most
`LEASE_SECONDS`, and the seconds that it takes to read the rows.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from models.errors import OpenWorldError
from service.errors import InboxMoved
from service.inbox import AddResult
from service.shared.inbox import Lease, SharedInbox
from service.shared.inbox_sink import LabelledRecord, SightingRecord, read_record
from service.shared.redis_state import RedisState
from tasks.errors import QueueUnavailable

POLL_SECONDS = 1.0  # between two looks at the lease
RECORDS = 50  # applied between two renewals
SWEEP_SECONDS = 60.0  # between two sweeps of old novelties
MATCH_SECONDS = 3600.0  # between two comparisons of the images with the rows

STREAM = "inbox-stream"

log = logging.getLogger(__name__)


class InboxOwner:
    """The thread of a server that owns the inbox, or waits for it.

    `on_change` gets the inbox when this server becomes its owner, and None when it is the owner no longer. `owner` is
    the address of the server that owns it, as it was a second ago; None: no server does.
    """

    def __init__(
        self,
        state: RedisState,
        address: str,
        open_inbox: Callable[[Lease], SharedInbox],
        on_change: Callable[[SharedInbox | None], None],
        on_result: Callable[[AddResult], None] = lambda result: None,
    ) -> None:
        self._state, self._address, self._open_inbox = state, address, open_inbox
        self._on_change, self._on_result = on_change, on_result
        self.owner: str | None = None
        self._lease = self._new_lease()
        self._inbox: SharedInbox | None = None
        self._retired: list[SharedInbox] = []  # requests may still read them
        self._applied, self._swept, self._matched = "-", 0.0, 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inbox-owner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let another server own the inbox at once. Call it in a thread, after the last request."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(2 * POLL_SECONDS + 1)
        self._retire()
        with suppress(QueueUnavailable):  # then the lease expires
            self._state.run("inbox_release", *self._lease[:2])
        self._close_retired()

    # In the thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._step()
            except (QueueUnavailable, InboxMoved) as error:
                # The index is kept for reading until another server owns the inbox; then or before it is made again.
                log.warning("the shared inbox cannot be changed now: %s", error)
                self._stopping.wait(POLL_SECONDS)
            except Exception as error:
                bug = None if isinstance(error, OpenWorldError) else error
                log.error("the shared inbox is given up, and opened again: %s", error, exc_info=bug)
                self._retire()
                self._stopping.wait(POLL_SECONDS)

    def _step(self) -> None:
        token, _, address = self._state.run("inbox_lease", *self._lease.arguments).decode().partition(" ")
        self._close_retired()
        self.owner = address
        if token != self._lease.token:
            if self._inbox is not None:
                log.warning("another server, %s, has taken over the inbox", address)
                self._retire()
            self._stopping.wait(POLL_SECONDS)
            return
        if self._inbox is None or self._inbox.lost:
            self._open()
        self._apply_waiting()

    def _open(self) -> None:
        """Make the index from Redis, for the first time, or again after a change whose fate is not known."""
        started, again = time.monotonic(), self._inbox is not None
        if self._inbox is not None:
            self._inbox.refuse_changes()  # the rows that are read now must contain its last one
        inbox = self._open_inbox(self._lease)
        if self._inbox is not None:
            self._retired.append(self._inbox)
        self._inbox, self._applied, self._swept = inbox, "-", time.monotonic()
        self._on_change(inbox)
        log.info(
            "this server %s the inbox: %d novelties, read in %.1f s",
            *("has read" if again else "owns", sum(inbox.counts().values()), time.monotonic() - started),
        )
        self._start_matching(inbox)

    def _start_matching(self, inbox: SharedInbox) -> None:
        """In another thread: it lists the images, and the lease must be renewed until it has."""
        self._matched = time.monotonic()
        threading.Thread(target=self._match_images, args=[inbox], name="inbox-images", daemon=True).start()

    def _match_images(self, inbox: SharedInbox) -> None:
        try:
            inbox.match_images(self._waiting_images)
        except Exception as error:  # done again after MATCH_SECONDS, or by the next owner
            bug = None if isinstance(error, (OpenWorldError, OSError)) else error
            log.warning("the images of the inbox were not compared with its rows: %s", error, exc_info=bug)

    def _apply_waiting(self) -> None:
        inbox = self._inbox
        assert inbox is not None
        self._state.wait(STREAM, "0" if self._applied == "-" else self._applied, POLL_SECONDS)
        for entry, fields in self._state.entries(STREAM, self._applied, RECORDS):
            try:
                record = read_record(fields)
            except (ValueError, KeyError, TypeError) as error:
                log.error("a record of the inbox's stream cannot be read, it is skipped: %r", error)
                record = LabelledRecord([])
            if isinstance(record, LabelledRecord):
                inbox.apply_state(entry, record.ids, "labelled")
            else:
                self._on_result(inbox.apply(entry, *record))
            self._applied = entry
        if time.monotonic() - self._swept > SWEEP_SECONDS:
            self._swept = time.monotonic()
            inbox.sweep()
            self._compare_with_stream(inbox)
        if time.monotonic() - self._matched > MATCH_SECONDS:
            self._start_matching(inbox)

    def _compare_with_stream(self, inbox: SharedInbox) -> None:
        """Read the inbox again if a failover of Redis has undone changes: applied records are in the stream again."""
        first = self._state.entries(STREAM, count=1)
        if first and _place(first[0][0]) <= _place(self._applied):
            inbox.refuse_changes()

    def _waiting_images(self) -> set[str]:
        records = (read_record(fields) for _, fields in self._state.entries(STREAM))
        return {str(one.sighting.sha256) for one in records if isinstance(one, SightingRecord)}

    def _retire(self) -> None:
        """Own the inbox no longer; with the next token this server may own it again."""
        self._lease = self._new_lease() if not self._stopping.is_set() else self._lease
        if self._inbox is not None:
            self._on_change(None)
            self._retired.append(self._inbox)
            self._inbox = None

    def _close_retired(self) -> None:
        while self._retired:
            self._retired.pop().close()

    def _new_lease(self) -> Lease:
        return Lease(secrets.token_hex(8), self._address)


def _place(entry: str) -> tuple[int, ...]:
    """The place of an entry in the stream; that of no entry comes first."""
    return tuple(int(part) for part in entry.split("-") if part)
