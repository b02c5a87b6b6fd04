"""The novelty inbox: novel images that wait for a label.

    <root>/inbox/images/ab/<sha256>   the images
    <root>/inbox/inbox.sqlite3        one row per image

**Count, bytes, age and rate are bounded, and the inbox is usable after a kill at any moment.** An image is written
before its row, and also removed before it: on a full disk that frees the space which deleting the row takes. A kill in
between leaves an image without a row or a row without an image. Opening the inbox adds the row, also of every image
whose database was moved away, or removes it. Nothing is written before the first novelty.

The age of a novelty is the time since its last sighting during which a server had the inbox open. A clock that is set,
or that starts wrong on a board without a battery, therefore removes nothing; dates are those of the wall clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from models.errors import ImageError, ImageTooLarge, StoreError
from models.files import file_lock, make_folder, sha256_bytes
from models.images import DEFAULT_LIMITS, ImageLimits
from models.versions.data_format import open_data_folder
from service.errors import NotFound
from service.inbox.index import NoveltyIndex
from service.inbox.pages import check_limit, page_of_groups, page_of_novelties, with_group
from service.inbox.records import (
    STATES,
    AddResult,
    GroupPage,
    InboxLimits,
    Novelty,
    NoveltyFilter,
    NoveltyPage,
    Now,
    Sighting,
    StateChange,
)
from service.inbox.recovery import recovered_index
from service.inbox.similarity import EmbeddingScale, ImageInfo, inspect_image, unit_vector
from service.inbox.table import InboxTable
from service.token_bucket import TokenBucket
from service.wire.novelties import GroupOrder, NoveltyState
from tasks.images import ImageStore


class InboxInUse(StoreError):
    """Another process has the inbox open."""


class Inbox:
    """The inbox of one data folder. Thread-safe; calls wait for each other and for the disk.

    **One process at a time has it open, and keeps a lock on `<root>/.inbox.lock`, which the kernel releases when the
    process ends.** InboxInUse for any other.
    """

    def __init__(
        self,
        root: Path,
        limits: InboxLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        wall_clock: Callable[[], float] = time.time,
        image_limits: ImageLimits = DEFAULT_LIMITS,
        scale: Callable[[], EmbeddingScale | None] = lambda: None,
        images: ImageStore | None = None,
    ) -> None:
        """`scale` returns what embeddings are compared on: that of the active version. `images`: if not in `root`."""
        self._root = root
        self._folder = root / "inbox"
        self._database = self._folder / "inbox.sqlite3"
        self._limits = limits or InboxLimits()
        self._clock, self._wall_clock = clock, wall_clock
        self._ran_before, self._opened_at = 0.0, clock()
        self._image_limits, self._scale = image_limits, scale
        self._lock = threading.Lock()
        self._images = images or ImageStore(self._folder)
        self._bucket = TokenBucket(self._limits.rate, self._limits.burst, clock)
        self._table: InboxTable | None = None  # None until the first novelty
        self._index = NoveltyIndex(0)
        self._closed = False
        self._ownership, self._owned = ExitStack(), False
        try:
            with self._lock:
                if root.exists():  # otherwise the first novelty creates it
                    self._acquire()
                if self._database.exists() or (self._folder / "images").is_dir():
                    self._open()
        except BaseException:
            self._ownership.close()
            raise

    # Reading

    def get(self, id: str) -> Novelty | None:
        with self._lock:
            found = None if self._table is None else self._table.get([id]).get(id)
            return None if found is None else with_group(found, self._index)

    def list(
        self,
        state: NoveltyState = "new",
        limit: int = 50,
        before: int | None = None,
        only: NoveltyFilter | None = None,
    ) -> NoveltyPage:
        """Novelties in a state, last seen first. A cursor stays valid while novelties come and go.

        A novelty that is seen again moves to the front, so later pages do not repeat it.
        """
        check_limit(limit)
        only = only or NoveltyFilter()
        with self._lock:
            if self._table is None:
                return NoveltyPage((), None)
            return page_of_novelties(self._table, self._index, state, limit, before, only)

    def groups(
        self, state: NoveltyState = "new", limit: int = 50, before: str | None = None, order: GroupOrder = "largest"
    ) -> GroupPage:
        """Groups with novelties in a state; only these count. The largest or the newest first."""
        check_limit(limit)
        with self._lock:
            if self._table is None:
                return GroupPage((), None)
            return page_of_groups(self._table, self._index, state, limit, before, order)

    def counts(self) -> dict[NoveltyState, int]:
        """The number of novelties per state."""
        with self._lock:
            return dict.fromkeys(STATES, 0) if self._table is None else self._table.counts()

    @property
    def bytes_used(self) -> int:
        """The size of all images."""
        return self._index.bytes

    def read_image(self, id: str) -> bytes:
        """The bytes as they were sent; `NotFound` when there is no such novelty, or its image is lost."""
        with self._lock:
            if id not in self._index:
                raise NotFound(f"novelty {id[:80]!r} is not in the inbox: it may have been deleted or have aged out")
        try:
            return self._images.read(id)  # without the lock: a slow disk delays only this caller
        except StoreError as error:
            with self._lock:
                if id in self._images:
                    raise
                self._remove([id])
            raise NotFound(f"the image of novelty {id} is lost: it was evicted or removed from the disk") from error

    # Writing

    def add(self, sighting: Sighting, *, requested: bool = False) -> AddResult:
        """Store a sighting as a new novelty, fold it into a similar one, or drop it.

        `requested`: a person reported this image. It is then exempt from the rate, folds only into the same bytes, and
        is new again if it was labelled or dismissed.
        `StoreError` when the disk or the database fails; existing novelties stay.
        """
        id = sighting.sha256 or sha256_bytes(sighting.data)
        with self._lock:
            if self._table is not None and id in self._index:
                return self._fold(self._table, id, sighting, requested)
        if len(sighting.data) > self._limits.max_bytes:
            return AddResult("dropped", reason="too_large")
        try:
            info = inspect_image(sighting.data, self._image_limits)  # without the lock: decoding is the slow part
        except ImageTooLarge:
            return AddResult("dropped", reason="too_large")
        except ImageError:
            return AddResult("dropped", reason="unreadable")
        with self._lock:
            return self._add(id, sighting, info, requested)

    def set_state(self, ids: Iterable[str], state: NoveltyState, was: NoveltyState | None = None) -> StateChange:
        """Change the state of novelties; with `was`, only of those in that state."""
        if state not in STATES:
            raise ValueError(f"state must be one of {STATES}, not {state!r}")
        unique = dict.fromkeys(ids)
        with self._lock:
            known = [id for id in unique if id in self._index]
            changed = self._table.set_state(known, state, [was] if was else STATES) if self._table and known else []
            for id in changed:
                self._index.set_state(id, state)
            return StateChange(tuple(changed), tuple(id for id in unique if id not in self._index))

    def delete(self, ids: Iterable[str]) -> int:
        """Delete novelties and their images; returns how many existed."""
        with self._lock:
            known = {id for id in ids if id in self._index}
            self._remove(known)
            return len(known)

    def delete_erased(self, erased_at: Mapping[str, float]) -> int:
        """Complete erasures that were interrupted: delete the novelties that were first seen before their erasure."""
        with self._lock:
            if self._table is None:
                return 0
            known = self._table.get(id for id in erased_at if id in self._index)
            erased = {id for id, novelty in known.items() if novelty.first_seen < erased_at[id]}
            self._remove(erased)
            return len(erased)

    def use_limits(self, limits: InboxLimits) -> None:
        """Apply other ages from the next sweep on."""
        with self._lock:
            self._limits = limits

    def sweep(self) -> int:
        """Delete the novelties that are too old; returns how many."""
        with self._lock:
            if self._table is not None:
                self._table.save_ran(self._ran)
            return self._expire()

    def close(self) -> None:
        """Release the file. A closed inbox reads as empty, and `add` raises `StoreError`."""
        with self._lock:
            self._closed = True
            self._release()
            self._ownership.close()

    # With the lock held

    @property
    def _ran(self) -> float:
        """For how many seconds the inbox was open so far, in all processes: ages do not depend on the wall clock."""
        return self._ran_before + self._clock() - self._opened_at

    @property
    def _now(self) -> Now:
        return Now(self._wall_clock(), self._ran)

    def _add(self, id: str, sighting: Sighting, info: ImageInfo, requested: bool) -> AddResult:
        similar = id if id in self._index else None  # another thread may have added it
        if similar is None and not requested:
            embedding = None if sighting.embedding is None else unit_vector(sighting.embedding)
            limits = self._limits
            similar = self._index.find_similar(info.hash, embedding, limits.fold_bits, limits.fold_cosine)
        if self._table is not None and similar is not None:
            return self._fold(self._table, similar, sighting, requested)
        if not requested and self._bucket.take() > 0:
            return AddResult("dropped", reason="rate")
        table = self._table or self._open()
        self._expire()
        self._make_room(1, info.bytes)
        stored = self._store_image(id, sighting)
        try:
            if stored != id:
                raise ValueError(f"the sighting says sha256 {id[:80]!r}, but its bytes have {stored}")
            self._index.groups.use_scale(self._scale())
            self._index.add(table.insert(id, sighting, self._now, info))
        except BaseException:
            if stored not in self._index:
                self._remove_image(stored)
                with suppress(StoreError):
                    table.delete([stored])
            raise
        return AddResult("new", id)

    def _store_image(self, id: str, sighting: Sighting) -> str:
        """Returns the sha256 of what is stored."""
        return self._images.put(sighting.data)

    def _fold(self, table: InboxTable, id: str, sighting: Sighting, requested: bool) -> AddResult:
        table.fold(id, sighting, self._now, "new" if requested else None)
        if requested:
            self._index.set_state(id, "new")
        return AddResult("folded", id)

    def _make_room(self, count: int, size: int) -> None:
        limits, index = self._limits, self._index
        while self._table and (len(index) + count > limits.max_count or index.bytes + size > limits.max_bytes):
            evicted = self._table.next_to_evict()
            if evicted is None:
                break
            self._remove([evicted])

    def _expire(self) -> int:
        if self._table is None:
            return 0
        now, limits = self._now, self._limits
        expired = self._table.expired(now.ran - limits.max_age_seconds, now.wall - limits.max_kept_seconds)
        self._remove(expired)
        return len(expired)

    def _remove(self, ids: Collection[str]) -> None:
        if self._table is None or not ids:
            return
        for id in ids:
            self._remove_image(id)
        self._table.delete(ids)
        for id in ids:
            if id in self._index:
                self._index.remove(id)

    def _remove_image(self, id: str) -> None:
        self._images.remove(id)

    # Opening

    def _open(self) -> InboxTable:
        if self._closed:
            raise StoreError("the inbox is closed: open it again")
        try:
            open_data_folder(self._root)
            self._acquire()
            make_folder(self._folder)
            self._table = self._open_table()
            self._ran_before, self._opened_at = self._table.ran(), self._clock()
            self._load_index(self._table)
            self._make_room(0, 0)  # the limits may be lower than before
        except BaseException as error:
            self._release()
            if isinstance(error, OSError):
                raise StoreError(f"the inbox cannot be opened ({error}): check the data folder's rights") from error
            raise
        return self._table

    def _open_table(self) -> InboxTable:
        return InboxTable(self._database)

    def _acquire(self) -> None:
        """Own the inbox until it is closed."""
        if self._owned:
            return
        try:
            self._ownership.enter_context(file_lock(self._root / ".inbox.lock", 0.0))
        except TimeoutError:
            raise InboxInUse(f"another process has this inbox open: {self._folder}") from None
        except OSError as error:
            raise StoreError(f"the inbox cannot be opened ({error}): check the data folder's rights") from error
        self._owned = True

    def _load_index(self, table: InboxTable) -> None:
        room, limits = self._limits.max_count, self._image_limits
        self._index = recovered_index(table, self._folder, room, self._scale(), limits, self._now)

    def _release(self) -> None:
        table, self._table = self._table, None
        self._index = NoveltyIndex(0)
        if table is not None:
            with suppress(StoreError):  # a full disk: the inbox ages more slowly
                table.save_ran(self._ran)
            table.close()
