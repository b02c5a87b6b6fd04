"""The novelty inbox: images that the service answered `novel`, kept until people have looked at them.

    <root>/inbox/images/ab/<sha256>   the bytes
    <root>/inbox/inbox.sqlite3        what is known about them

**Bounded in count, bytes, age and rate whatever arrives, and usable after a kill at any moment.** Bytes are written
before their row. They are removed before it, too: on a full disk that makes the space that removing a row takes. A kill
in between leaves bytes without a row, or a row without bytes; both go when the inbox is opened again. Nothing is
written before the first novelty.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path

from models.errors import ImageError, ImageTooLarge, StoreError
from models.files import make_folder, sha256_bytes
from models.images import DEFAULT_LIMITS, ImageLimits
from service.errors import NotFound
from service.inbox.group_pages import group_page
from service.inbox.holdings import Holdings
from service.inbox.likeness import unit
from service.inbox.look import Look, look_at
from service.inbox.reconcile import reconciled
from service.inbox.records import (
    STATES,
    GroupPage,
    InboxLimits,
    Kept,
    Moved,
    Novelty,
    Only,
    Page,
    Sighting,
)
from service.inbox.table import InboxTable
from service.token_bucket import TokenBucket
from service.wire.novelties import GroupOrder, NoveltyState
from tasks.images import ImageStore


class Inbox:
    """The inbox of one data folder. Any thread may call any method; calls wait for each other, and for the disk."""

    def __init__(
        self,
        root: Path,
        limits: InboxLimits | None = None,
        clock: Callable[[], float] = time.time,
        *,
        image_limits: ImageLimits = DEFAULT_LIMITS,
    ) -> None:
        self._folder = root / "inbox"
        self._limits = limits or InboxLimits()
        self._clock = clock
        self._image_limits = image_limits
        self._lock = threading.Lock()
        self._images = ImageStore(self._folder)
        self._bucket = TokenBucket(self._limits.rate, self._limits.burst, clock)
        self._table: InboxTable | None = None  # while there is nothing on the disk
        self._held = Holdings()
        self._closed = False
        if self._database.exists():
            with self._lock:
                self._open()

    def __repr__(self) -> str:
        return f"Inbox({str(self._folder.parent)!r}, {len(self._held)} novelties)"

    # Reading

    def get(self, id: str) -> Novelty | None:
        with self._lock:
            found = None if self._table is None else self._table.get(id)
            return None if found is None else self._grouped(found)

    def list(
        self, state: NoveltyState = "new", limit: int = 50, before: int | None = None, only: Only | None = None
    ) -> Page:
        """Novelties in a state, last seen first. A cursor stays good while others come and go.

        One that is seen again moves to the front: someone paging on does not meet it twice.
        """
        _check_limit(limit)
        only = only or Only()
        with self._lock:
            if self._table is None:
                return Page((), None)
            members = None if only.group is None else self._held.groups.members(only.group)
            page = self._table.page(state, limit, before, only, members)
            return replace(page, items=tuple(self._grouped(item) for item in page.items))

    def groups(
        self, state: NoveltyState = "new", limit: int = 50, before: str | None = None, order: GroupOrder = "largest"
    ) -> GroupPage:
        """Novelties in a state by likeness: the largest groups first, or those with the newest novelty."""
        _check_limit(limit)
        with self._lock:
            if self._table is None:
                return GroupPage((), None)
            return group_page(self._table, self._held.groups, state, limit, before, order)

    def counts(self) -> dict[NoveltyState, int]:
        """How many novelties there are in each state."""
        with self._lock:
            return dict.fromkeys(STATES, 0) if self._table is None else self._table.counts()

    @property
    def bytes_used(self) -> int:
        """Bytes of the images that are kept."""
        return self._held.bytes

    def read_image(self, id: str) -> bytes:
        """The bytes as they were sent; `NotFound` when there is no such novelty, or its bytes are lost."""
        with self._lock:
            if id not in self._held:
                raise NotFound(f"novelty {id[:80]!r} is not in the inbox: it may have been deleted or have aged out")
        try:
            # Without the lock, so that nobody waits for a slow disk's reading.
            return self._images.read(id)
        except StoreError as error:
            with self._lock:
                if id in self._images:
                    raise
                self._remove([id])
            raise NotFound(f"the image of novelty {id} is lost: it was evicted or removed from the disk") from error

    # Writing

    def add(self, sighting: Sighting, *, asked: bool = False) -> Kept:
        """Keep a sighting as a new novelty, fold it into the one that it is like, or drop it for a reason.

        `asked`: a person wants this very image there. It then costs no token of the rate, folds into nothing but the
        same bytes, and is new again if people were done with it.
        `StoreError` when the disk does not take it; what was kept before stays.
        """
        id = sighting.sha256 or sha256_bytes(sighting.data)
        with self._lock:
            if self._table is not None and id in self._held:
                return self._fold(self._table, id, sighting, asked)
        if len(sighting.data) > self._limits.max_bytes:
            return Kept("dropped", reason="too_large")
        try:
            # Without the lock: decoding is the slow part, and needs nothing of ours.
            look = look_at(sighting.data, self._image_limits)
        except ImageTooLarge:
            return Kept("dropped", reason="too_large")
        except ImageError:
            return Kept("dropped", reason="unreadable")
        with self._lock:
            return self._add(id, sighting, look, asked)

    def set_state(self, ids: Iterable[str], state: NoveltyState) -> int:
        """Say what people did with them; returns how many of the ids there were."""
        if state not in STATES:
            raise ValueError(f"state must be one of {STATES}, not {state!r}")
        with self._lock:
            known = {id for id in ids if id in self._held}
            self._set_state(known, state, STATES)
            return len(known)

    def move(self, ids: Iterable[str], was: NoveltyState, state: NoveltyState) -> Moved:
        """Like `set_state`, but only for those that are in the state `was`."""
        wanted = dict.fromkeys(ids)
        with self._lock:
            missing = tuple(id for id in wanted if id not in self._held)
            return Moved(tuple(self._set_state([id for id in wanted if id in self._held], state, [was])), missing)

    def delete(self, id: str) -> bool:
        """Forget a novelty and its bytes; False when there was none."""
        return self.delete_all([id]) == 1

    def delete_all(self, ids: Iterable[str]) -> int:
        """Forget novelties and their bytes; returns how many of the ids there were."""
        with self._lock:
            known = {id for id in ids if id in self._held}
            self._remove(known)
            return len(known)

    def sweep(self) -> int:
        """Remove what was last seen too long ago; returns how many."""
        with self._lock:
            return self._expire()

    def close(self) -> None:
        """Let go of the file. Afterwards the inbox reads as empty and takes nothing."""
        with self._lock:
            self._closed = True
            self._forget()

    # With the lock held

    def _add(self, id: str, sighting: Sighting, look: Look, asked: bool) -> Kept:
        like = self._like(id, sighting, look, asked)
        if self._table is not None and like is not None:
            return self._fold(self._table, like, sighting, asked)
        if not asked and self._bucket.take() > 0:
            return Kept("dropped", reason="rate")
        table = self._table or self._open()
        self._expire()
        self._make_room(1, len(sighting.data))
        stored = self._images.put(sighting.data)
        try:
            if stored != id:
                raise ValueError(f"the sighting says sha256 {id[:80]!r}, but its bytes have {stored}")
            entry = table.insert(id, sighting, self._clock(), look)
        except BaseException:
            if stored not in self._held:
                self._images.remove(stored)
            raise
        self._held.add(entry)
        return Kept("new", id)

    def _like(self, id: str, sighting: Sighting, look: Look, asked: bool) -> str | None:
        if id in self._held:  # another thread was faster
            return id
        if asked:
            return None
        embedding = None if sighting.embedding is None else unit(sighting.embedding)
        return self._held.index.alike(look.hash, embedding, self._limits.fold_bits, self._limits.fold_cosine)

    def _fold(self, table: InboxTable, id: str, sighting: Sighting, asked: bool) -> Kept:
        table.fold(id, sighting, self._clock(), "new" if asked else None)
        if asked:
            self._held.set_state(id, "new")
        return Kept("folded", id)

    def _make_room(self, count: int, size: int) -> None:
        limits, held = self._limits, self._held
        while self._table and (len(held) + count > limits.max_count or held.bytes + size > limits.max_bytes):
            victim = self._table.least_wanted()
            if victim is None:
                break
            self._remove([victim])

    def _expire(self) -> int:
        if self._table is None:
            return 0
        expired = self._table.older_than(self._clock() - self._limits.max_age_seconds)
        self._remove(expired)
        return len(expired)

    def _remove(self, ids: Collection[str]) -> None:
        if self._table is None or not ids:
            return
        for id in ids:
            self._images.remove(id)
        self._table.delete(ids)
        for id in ids:
            if id in self._held:
                self._held.remove(id)

    def _set_state(self, ids: Collection[str], state: NoveltyState, was: Collection[NoveltyState]) -> Collection[str]:
        changed = self._table.set_state(ids, state, was) if self._table is not None and ids else []
        for id in changed:
            self._held.set_state(id, state)
        return changed

    def _grouped(self, novelty: Novelty) -> Novelty:
        return replace(novelty, group=self._held.groups.of(novelty.id))

    # Opening

    @property
    def _database(self) -> Path:
        return self._folder / "inbox.sqlite3"

    def _open(self) -> InboxTable:
        if self._closed:
            raise StoreError("the inbox is closed: open it again")
        try:
            make_folder(self._folder)
            self._table = InboxTable(self._database)
            for entry in reconciled(self._table, self._folder / "images"):
                self._held.add(entry)
            self._make_room(0, 0)  # the limits may be tighter than they were
        except BaseException as error:
            self._forget()
            if isinstance(error, OSError):
                raise StoreError(f"the inbox cannot be opened ({error}): check the data folder's rights") from error
            raise
        return self._table

    def _forget(self) -> None:
        table, self._table = self._table, None
        self._held = Holdings()
        if table is not None:
            table.close()


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
