"""The novelty inbox of a server: its own, or one that the servers of a data folder share.

Of the servers with their own inboxes on one folder, the first has it; another one takes it over when that one ends. A
shared inbox has one owner, too, but all servers hand their novel images to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from weakref import ref

from models.errors import StoreError
from models.images import ImageLimits
from models.storage import Storage
from models.versions.keep import Keep
from service.errors import NotFound
from service.http.inbox_forwarding import InboxPlace
from service.inbox import EmbeddingScale, Inbox, InboxInUse, InboxLimits
from service.inference.active_version import ActiveVersion
from service.inference.embedding_scale import embedding_scale
from service.inference.metrics import Metrics
from service.inference.recorder import Recorder
from service.inference.servable import ServableModel
from service.settings import ServiceSettings
from service.shared import InboxOwner, InboxSink, Lease, RedisState, SharedInbox
from tasks.images import NOVELTIES, ImageStore, erased_at

DAYS, DAYS_WITHOUT_IMAGES = 30.0, 1.0  # that a novel image is kept by default
COUNT_SECONDS = 0.25  # that /metrics waits for the inbox; then the last known numbers stand
IN_USE_SECONDS = 1.0  # between attempts to open the inbox while another server has it
BROKEN_SECONDS = 30.0  # the same, if it cannot be opened for another reason

log = logging.getLogger(__name__)


class InboxAccess:
    """Opens the inbox, or takes part in the shared one. `inbox` is None while this server does not have it."""

    def __init__(
        self,
        settings: ServiceSettings,
        storage: Storage,
        shared: RedisState | None,
        image_limits: ImageLimits,
        recorder: Recorder,
        metrics: Metrics,
        active_version: ActiveVersion,
        keep: Keep = "images",
    ) -> None:
        """`shared` is None if the servers do not share the inbox."""
        self._storage, self._shared, self._image_limits = storage, shared, image_limits
        self._recorder, self._metrics, self._active_version = recorder, metrics, active_version
        self._limits = InboxLimits(
            max_count=settings.inbox_count,
            max_bytes=settings.inbox_bytes,
            max_age_seconds=86400 * (settings.inbox_days or DAYS),
            rate=settings.inbox_rate,
        )
        self._kept_seconds = 86400 * (settings.inbox_days or DAYS_WITHOUT_IMAGES)  # if the folder keeps no images
        # Weak: a version that was replaced is freed.
        self._scaled: tuple[ref[ServableModel], EmbeddingScale | None] = (ref(active_version.model), None)
        self.inbox: Inbox | None = None
        # The shared images are apart from those of a server's own inbox, which may still exist and is in its folder.
        self.images = ImageStore(storage.root / "inbox") if shared is None else ImageStore(storage, NOVELTIES)
        self._sink = None if shared is None else InboxSink(shared, self.images, self._limits, image_limits)
        self._owner: InboxOwner | None = None
        self._opening: asyncio.Task[None] | None = None
        self._counting: asyncio.Task[None] | None = None
        self.use_keep(keep)

    def use_keep(self, keep: Keep) -> None:
        """Apply what the data folder promises about novel images."""
        if keep != "images":
            self._limits = replace(self._limits, max_kept_seconds=self._kept_seconds)
        if self.inbox is not None:
            self.inbox.use_limits(self._limits)

    async def start(self, address: str) -> None:
        """`address` is that of this server, for the others."""
        if self._shared is not None and self._sink is not None:
            owner = InboxOwner(self._shared, address, self._open_shared, self._use, self._recorder.count_added)
            self._metrics.inbox_missing.set_function(lambda: float(owner.owner is None))
            self._recorder.use_inbox(self._sink)
            self._owner = owner
            owner.start()
        elif (failed := await self._open()) is not None:
            self._opening = asyncio.create_task(self._take_over(failed))

    async def stop(self) -> None:
        """Call it after the recorder was closed."""
        for task in (self._opening, self._counting):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._owner is not None:
            await asyncio.to_thread(self._owner.stop)
        if self.inbox is not None:
            await asyncio.to_thread(self.inbox.close)

    def place(self) -> InboxPlace | None:
        """Where the inbox is that servers share; None if they do not."""
        return None if self._owner is None else InboxPlace(self.inbox is not None, self._owner.owner)

    def read_image(self, id: str) -> bytes | None:
        """The image of a novelty, also if another server owns the shared inbox. Reads the disk."""
        if self.inbox is not None:
            with suppress(NotFound):
                return self.inbox.read_image(id)
        return self.images.read(id) if self._shared is not None and id in self.images else None

    def erase(self, ids: Collection[str]) -> int:
        """Delete novelties and their images; returns how many novelties existed. Waits for a disk or for Redis.

        Of a shared inbox also images without a row: their records were not sent, or wait for the owner, which drops a
        record without an image.
        """
        deleted = self.inbox.delete(ids) if self.inbox is not None else 0
        if self._shared is not None:
            self.images.remove(*ids)
        return deleted

    def mark_labelled(self, ids: Collection[str]) -> None:
        """Mark those of the images as labelled that are novelties. Waits for a disk or for Redis."""
        if self._sink is not None:
            self._sink.mark_labelled(ids)
        elif self.inbox is not None:
            self.inbox.set_state(ids, "labelled")

    async def count(self) -> None:
        """Update the metrics. A slow disk delays the numbers, not the caller."""
        if self.inbox is not None:
            if self._counting is None or self._counting.done():
                self._counting = asyncio.create_task(asyncio.to_thread(self._count, self.inbox))
            await asyncio.wait({self._counting}, timeout=COUNT_SECONDS)

    def _count(self, inbox: Inbox) -> None:
        try:
            for state, count in inbox.counts().items():
                self._metrics.novelties.labels(state).set(count)
            self._metrics.novelties_bytes.set(inbox.bytes_used)
        except StoreError as error:
            log.warning("the novelties cannot be counted: %s", error)

    # The server's own inbox

    async def _take_over(self, failed: StoreError) -> None:
        """Open the inbox as soon as the server that has it ends: rolling replacement."""
        log.error("this server keeps no novel images for now: %s", failed)
        self._metrics.inbox_missing.set(1)
        error: StoreError | None = failed
        while error is not None:
            await asyncio.sleep(IN_USE_SECONDS if isinstance(error, InboxInUse) else BROKEN_SECONDS)
            error = await self._open()
        log.info("this server keeps novel images from now on")

    async def _open(self) -> StoreError | None:
        try:
            inbox = await asyncio.to_thread(
                Inbox, self._storage.root, self._limits, image_limits=self._image_limits, scale=self._embedding_scale
            )
        except StoreError as error:
            return error
        with suppress(StoreError):  # logged when the next one is erased
            await asyncio.to_thread(lambda: inbox.delete_erased(erased_at(self._storage)))
        self.inbox = inbox
        self._recorder.use_inbox(inbox)
        self._metrics.inbox_missing.set(0)
        return None

    # The shared inbox, in the thread of its owner

    def _open_shared(self, lease: Lease) -> SharedInbox:
        assert self._shared is not None
        inbox = SharedInbox(
            self._shared,
            lease,
            self.images,
            self._limits,
            image_limits=self._image_limits,
            scale=self._embedding_scale,
            is_erased=self._recorder.is_erased_sha256,
            erased_at=lambda: erased_at(self._storage),
        )
        inbox.delete_erased(erased_at(self._storage))
        return inbox

    def _use(self, inbox: SharedInbox | None) -> None:
        self.inbox = inbox

    def _embedding_scale(self) -> EmbeddingScale | None:
        """That of the active version; the same object until another version is active."""
        model = self._active_version.model
        if model is not self._scaled[0]():
            self._scaled = (ref(model), embedding_scale(model))
        return self._scaled[1]
