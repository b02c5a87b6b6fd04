"""The inbox that all servers of a data folder share. One of them owns it; this is its part.

    <prefix>:inbox-rows      hash: novelty -> its row
    <prefix>:inbox-stream    records of all servers that the owner has not applied yet
    <prefix>:inbox-ran       seconds that the inbox was open so far
    <prefix>:inbox-matched   set once every image has a row; absent in a Redis that never had this inbox, or lost it
    novelties/images/        the images, in the image store

**Every change is in Redis before it is answered, and a record counts once, whichever server applies it**: one script
stores the rows that it changed and removes it from the stream, if this server still owns the inbox. The database is a
copy for queries, in a temporary folder. A new owner makes it again from the rows, and goes on with the stream.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from models.errors import ImageError, StoreError
from models.images import ImageLimits
from service.errors import InboxMoved
from service.inbox import AddResult, EmbeddingScale, Inbox, InboxLimits, Sighting, StateChange
from service.inbox.index import NoveltyIndex
from service.inbox.similarity import ImageInfo, inspect_image
from service.inbox.table import InboxTable
from service.shared.mirrored_table import Changes, MirroredTable
from service.shared.redis_state import RedisState
from service.wire.novelties import NoveltyState
from tasks.errors import QueueUnavailable
from tasks.images import ImageStore

LEASE_SECONDS = 5.0  # a server that renews its lease for no longer loses the inbox
# An image without a row may belong to a record that is under way. After so long it is removed, or made a novelty.
ORPHAN_SECONDS, ADOPT_SECONDS = 3600.0, 60.0

log = logging.getLogger(__name__)


class Lease(NamedTuple):
    """The right to change the shared inbox. The token differs each time that a server becomes the owner."""

    token: str
    address: str  # of the server, for the others

    @property
    def arguments(self) -> tuple[str, str, int]:
        return self.token, self.address, round(LEASE_SECONDS * 1000)


class SharedInbox(Inbox):
    """The inbox of its owner. Changes raise InboxMoved, or QueueUnavailable; it is then `lost` and must be reopened."""

    def __init__(
        self,
        state: RedisState,
        lease: Lease,
        images: ImageStore,
        limits: InboxLimits,
        *,
        image_limits: ImageLimits,
        scale: Callable[[], EmbeddingScale | None],
        is_erased: Callable[[str], bool],
        erased_at: Callable[[], Mapping[str, float]],
    ) -> None:
        """`is_erased`: a short time ago; `erased_at` returns all erasures of the log."""
        self._state, self._lease, self._is_erased, self._erased_at = state, lease, is_erased, erased_at
        self._turn = threading.Lock()  # a change and its commit
        self.lost = False
        self._unneeded: set[str] = set()  # images that are removed after the next commit
        self._temporary = tempfile.TemporaryDirectory(prefix="openworld-inbox-")
        root = Path(self._temporary.name)
        rows, ran = state.hash_values("inbox-rows"), state.get("inbox-ran")
        self._is_new = state.get("inbox-matched") is None  # to Redis; images may exist nevertheless
        (root / "inbox").mkdir()
        copy = MirroredTable(root / "inbox" / "inbox.sqlite3")
        copy.load(rows, float(ran or 0))
        copy.close()
        super().__init__(root, limits, image_limits=image_limits, scale=scale, images=images)

    def close(self) -> None:
        super().close()
        self._temporary.cleanup()

    def refuse_changes(self) -> None:
        """Wait for the change that is being made, and refuse all later ones."""
        with self._turn:
            self.lost = True

    # Changes: each of them is committed before it returns

    def add(self, sighting: Sighting, *, requested: bool = False) -> AddResult:
        with self._committed():
            return super().add(sighting, requested=requested)

    def apply(self, entry: str, sighting: Sighting, info: ImageInfo) -> AddResult:
        """Add a sighting of another server, which has stored its image; `entry` is its place in the stream."""
        id = str(sighting.sha256)
        with self._committed(entry):
            result = AddResult("dropped", reason="erased")
            if not self._is_erased(id):
                try:
                    with self._lock:
                        result = self._add(id, sighting, info, requested=False)
                except StoreError as error:  # of this record: the next ones must not wait for it
                    log.error("cannot add a novel image to the inbox: %s", error)
                    result = AddResult("dropped", reason="error")
            self._unneeded.add(id)  # if it is no novelty
        return result

    def set_state(self, ids: Iterable[str], state: NoveltyState, was: NoveltyState | None = None) -> StateChange:
        with self._committed():
            return super().set_state(ids, state, was)

    def apply_state(self, entry: str, ids: Iterable[str], state: NoveltyState) -> None:
        """The same for the record of another server."""
        with self._committed(entry):
            super().set_state(ids, state)

    def delete(self, ids: Iterable[str]) -> int:
        with self._committed():
            return super().delete(ids)

    def delete_erased(self, erased_at: Mapping[str, float]) -> int:
        with self._committed():
            return super().delete_erased(erased_at)

    def sweep(self) -> int:
        with self._committed():
            return super().sweep()

    def match_images(self, waiting: Callable[[], set[str]]) -> None:
        """Remove images without a row and erased ones; in a Redis that has lost its rows, make novelties of the others.

        `waiting` returns the images of records that were not applied yet. May take long: it lists the images.
        """
        images = list(self._images)
        erased_at = self._erased_at()
        # An erasure that was interrupted; the record of such an image may even have been applied since.
        erased = {image.sha256 for image in images if image.time < erased_at.get(image.sha256, 0.0)}
        self.delete(erased)
        self._images.remove(*erased)
        listed = [(image.sha256, time.time() - image.time) for image in images if image.sha256 not in erased]
        waiting_images = waiting()
        for id, age in listed:
            with self._lock:
                if self._closed or self.lost:
                    return  # the index is empty or outdated; the next owner compares
                known = id in self._index or id in waiting_images
            if known:
                continue
            if self._is_new and age > ADOPT_SECONDS:
                self._adopt_image(id)
            elif age > ORPHAN_SECONDS:
                self._images.remove(id)
        if self._is_new:  # an image without a row is an orphan from now on, for later owners too
            self._state.put("inbox-matched", "1")
            self._is_new = False

    def _adopt_image(self, id: str) -> None:
        try:
            data = self._images.read(id)
            info = inspect_image(data, self._image_limits)
        except (ImageError, StoreError) as error:
            log.warning("the image %s of the inbox has no row and cannot be shown: %s", id, error)
            return
        with self._committed(), self._lock:
            self._add(id, Sighting.without_answer(data, id), info, requested=True)

    @contextmanager
    def _committed(self, entry: str = "") -> Iterator[None]:
        with self._turn:
            # Its rows may be in use elsewhere already, with the same lease: a commit would replace newer ones.
            if self.lost:
                raise InboxMoved("the inbox is being read again: send the request again", 1)
            try:
                yield
                self._commit(entry)
            except (InboxMoved, QueueUnavailable):
                self.lost = True
                raise
            self._remove_unneeded()

    def _remove_unneeded(self) -> None:
        """Only after a commit: a server that owns the inbox no longer must not remove images of the next owner.

        After a kill in between, `match_images` removes them.
        """
        with self._lock:
            if self._closed:
                return  # the index is empty
            unneeded = [id for id in self._unneeded if id not in self._index]
        self._images.remove(*unneeded)
        self._unneeded.clear()

    def _commit(self, entry: str) -> None:
        with self._lock:
            table, ran = self._table, self._ran
            changes = table.take_changes() if isinstance(table, MirroredTable) else Changes({}, set())
        rows: list[str | bytes] = [part for row in changes.rows.items() for part in row]
        deleted: list[str | int] = [len(changes.deleted), *changes.deleted]
        reply = self._state.run("inbox_commit", *self._lease.arguments, entry, ran, *deleted, *rows)
        if reply != b"committed":
            raise InboxMoved("another server has taken over the inbox: send the request again", 1)

    # Of the base class

    def _remove_image(self, id: str) -> None:
        self._unneeded.add(id)

    def _open_table(self) -> InboxTable:
        return MirroredTable(self._database)

    def _load_index(self, table: InboxTable) -> None:
        entries = list(table.entries())
        self._index = NoveltyIndex(max(self._limits.max_count, len(entries)), self._scale())
        for entry in entries:
            self._index.add(entry)

    def _store_image(self, id: str, sighting: Sighting) -> str:
        if sighting.data:
            return super()._store_image(id, sighting)
        if id not in self._images:
            raise StoreError(f"the image {id} of a novelty is not in the image store")
        return id
