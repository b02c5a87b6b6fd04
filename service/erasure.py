"""Erasing images from a server: all copies that it has besides the image store, and what other servers have erased."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

from models import files
from models.errors import StoreError
from models.storage import Storage
from service.errors import InboxMoved
from service.inbox import Thumbnails
from service.inbox_access import InboxAccess
from service.inference.recent_predictions import RecentPredictions
from service.inference.recorder import Recorder
from service.inference.shared_predictions import SharedPredictions
from tasks.errors import QueueUnavailable
from tasks.images import ErasureFollower, FeatureStore, ImageStore, erase_copies, erased_at

log = logging.getLogger(__name__)

FOLLOW_SECONDS = 1.0  # between looks at the log of erasures
CLOCK_SECONDS = 5.0  # that the clocks of an object store and of this machine may differ


class Erased(NamedTuple):
    """How many copies were erased."""

    novelties: int
    recent: int  # recent predictions, in memory


class Erasure:
    """Where a server has copies of images. Use it on the event loop."""

    def __init__(
        self,
        storage: Storage,
        recorder: Recorder,
        recent: RecentPredictions | SharedPredictions,
        novelties: InboxAccess,
        thumbnails: Thumbnails,
        request_seconds: float,
    ) -> None:
        self._storage, self._recorder, self._recent = storage, recorder, recent
        self._novelties, self._thumbnails = novelties, thumbnails
        self._request_seconds = request_seconds  # that a request takes at most
        # A request holds it from its entry in the log to its count of copies: `follow` reads the same log, and would
        # erase copies that the request then does not count.
        self.counting = asyncio.Lock()

    async def erase(self, sha256s: Collection[str]) -> Erased:
        """Erase all copies of images that this server has besides the image store.

        Other servers of the data folder follow the log of erasures, and do the same within `FOLLOW_SECONDS`.
        """
        self._recorder.erase(sha256s, self._request_seconds)
        try:
            # Before the inbox: a person may report a recent prediction, which puts its image there.
            recent = await self._recent.erase(sha256s)
        finally:  # also if Redis does not answer, which may have copies of recent predictions
            await asyncio.to_thread(self._recorder.discard, sha256s)
            novelties = await asyncio.to_thread(self._novelties.erase, sha256s)
            for sha256 in sha256s:
                self._thumbnails.remove(sha256)
        return Erased(novelties, recent)

    async def follow(self) -> None:
        """Erase what the log of erasures names from now on, until cancelled."""
        follower: ErasureFollower | None = None
        left: set[str] = set()
        while True:
            try:
                if follower is None:
                    follower = await asyncio.to_thread(ErasureFollower, self._storage)
                await asyncio.sleep(FOLLOW_SECONDS)
                left |= await asyncio.to_thread(follower.new)
                if left:
                    async with self.counting:
                        await self.erase(left)
                    if self._storage.shared:  # the server that erased them has a folder of its own
                        await asyncio.to_thread(erase_copies, self._storage, left)
                        await asyncio.to_thread(self._novelties.images.drop_copies, left)
                    left = set()
            except (QueueUnavailable, InboxMoved) as error:  # of the copies that servers share: tried again
                log.warning("copies of erased images that servers share remain for now: %s", error)
            except (OSError, StoreError) as error:  # tried again: a disk may be full for some time
                log.error("copies of erased images remain in this server for now: %s", error)
                await asyncio.sleep(FOLLOW_SECONDS)


def clean_up(storage: Storage) -> None:
    """Remove what killed processes have left: temporary files of uploads, and images whose erasure was interrupted.

    Their features, too.
    """
    files.remove_abandoned(storage.root / "images")
    images = ImageStore(storage)
    # The clock of an object store is another one, and counts in seconds: an image may have been submitted again since.
    margin = CLOCK_SECONDS if storage.shared else 0.0
    with suppress(StoreError, OSError):
        erased = erased_at(storage)
        images.erase(image for sha256, image in images.find_all(erased).items() if image.time < erased[sha256] - margin)
        features = FeatureStore(storage)
        if stored := list(features):  # else the log, which may be long, need not be read again
            times = erased_at(storage, with_features=True)
            features.erase([own.sha256 for own in stored if own.time < times.get(own.sha256, 0.0) - margin])
        erase_copies(storage, erased)
