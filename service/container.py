"""Everything that lives as long as the server, in one container; `app.state.container` holds it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated

from fastapi import Depends, Request

from models.errors import StoreError
from models.inference.providers import gpu_present
from models.inference.runtime import RuntimeCache
from models.versions.data_format import open_data_folder
from models.versions.store import VersionStore
from service.errors import NoQueue, NotFound
from service.http.auth import Keyring
from service.http.limits import Admission, RateLimiter, RequestLimits
from service.inbox import Inbox, InboxLimits, Thumbnails
from service.inference.active_version import ActiveVersion
from service.inference.drift import ScoreDrift
from service.inference.engine import Engine
from service.inference.metrics import Metrics
from service.inference.pulse import Pulse
from service.inference.recent_predictions import RecentPredictions
from service.inference.recorder import Recorder
from service.settings import ServiceSettings
from tasks.batch import BatchLimits
from tasks.queue import TaskQueue, announce, connect, listen

log = logging.getLogger(__name__)

PARALLEL_UPLOADS = 2  # labelled batches that are read and checked at the same time
BLOCKING_THREADS = 64  # threads of `asyncio.to_thread`, which wait for disks and for Redis
GPU_BATCH, CPU_BATCH = 32, 8  # default images per computed batch: a GPU needs more of them to be busy


class Container:
    """The objects of a running server. Create it on the event loop."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.draining = False  # not ready any more, but still answering
        self.keyring = Keyring(settings.keys)
        self.metrics = Metrics(ScoreDrift(settings.drift_window, settings.drift_window // 10))
        self.metrics.ready.set_function(lambda: float(self.ready))

        on_gpu = settings.device != "cpu" and gpu_present()
        max_batch = settings.batch_size or (GPU_BATCH if on_gpu else CPU_BATCH)
        parallel_batches = settings.parallel_batches or (1 if on_gpu else settings.threads)
        self.engine = Engine(max_batch, self.metrics, parallel_batches, settings.decode_threads)
        if settings.data.exists():  # otherwise the first write creates it: a mistyped folder leaves nothing behind
            open_data_folder(settings.data)
        store = VersionStore(settings.data)
        self.active_version = ActiveVersion(
            store,
            RuntimeCache(store, settings.device, settings.threads),
            settings.image_limits,
            self.metrics,
            poll_seconds=settings.poll_seconds,
            max_batch=max_batch,
        )

        self.request_limits = RequestLimits(
            body=settings.max_body_bytes,
            images=settings.max_request_images,
            image=settings.max_image_bytes,
            timeout=settings.request_timeout,
            max_timeout=settings.max_request_timeout,
        )
        self.admission = Admission(
            settings.images_in_flight, settings.body_memory, lambda: self.engine.seconds_per_image
        )
        self.metrics.in_flight.set_function(lambda: self.admission.images)
        self.rate_limiter = RateLimiter(settings.rate_limit, settings.max_request_images)
        self.explain_turn = asyncio.Semaphore(1)

        self.inbox = _open_inbox(settings) if settings.inbox else None
        self.thumbnails = Thumbnails(settings.image_limits)
        self.recent = RecentPredictions(settings.recent_bytes)
        self.recorder = Recorder(self.metrics, self.recent, self.inbox)
        self.pulse = Pulse(self.metrics, self.active_version)

        self.batch_limits = BatchLimits(
            max_classes=settings.task_max_classes,
            max_images=settings.task_max_images,
            max_bytes=settings.task_max_bytes,
        )
        self.uploads = asyncio.Semaphore(PARALLEL_UPLOADS)
        url = settings.redis_url
        self._redis = connect(url.get_secret_value()) if url is not None else None
        self._queue = TaskQueue(self._redis) if self._redis is not None else None
        self._background: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> bool:
        return self.active_version.usable and not self.draining

    async def start(self) -> None:
        # The default pool has few threads: calls that wait for a hanging Redis would block all others.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(BLOCKING_THREADS))
        self.engine.start()
        await self.active_version.start()
        self._background.append(asyncio.create_task(self.pulse.run()))
        if self.settings.redis_url is not None:
            self._background.append(asyncio.create_task(self._listen(self.settings.redis_url.get_secret_value())))

    async def stop(self) -> None:
        """Call it after the last request. Writes what is queued for the inbox."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.active_version.stop()
        await self.engine.stop()
        await asyncio.to_thread(self.thumbnails.close)
        if self._redis is not None:
            await asyncio.to_thread(self._redis.close)
        await asyncio.to_thread(self.recorder.close, 10.0)
        if self.inbox is not None:
            await asyncio.to_thread(self.inbox.close)

    async def _listen(self, url: str) -> None:
        async for _ in listen(url):
            self.active_version.wake()

    def announce(self, version: int) -> None:
        """Notify the other servers of a new current version. They poll as well."""
        if self._redis is not None:
            announce(self._redis, version)

    def queue(self) -> TaskQueue:
        """The task queue; NoQueue if the server runs without Redis."""
        if self._queue is None:
            raise NoQueue("this server only predicts: start it with `openworld up`, or set OPENWORLD_REDIS_URL", 60)
        return self._queue

    def find_image(self, id: str) -> bytes | None:
        """The image of a novelty or of a recent prediction; None if it is not kept. Reads the disk."""
        if self.inbox is not None:
            with suppress(NotFound):
                return self.inbox.read_image(id)
        sighting = self.recent.get(id)
        return None if sighting is None else sighting.data

    async def erase_images(self, sha256s: Collection[str]) -> int:
        """Erase images from the inbox, the recent predictions and the thumbnails; returns the number of novelties.

        A sighting that the inbox's writer is adding at this moment may still arrive.
        """
        novelties = await asyncio.to_thread(self.inbox.delete, sha256s) if self.inbox is not None else 0
        for sha256 in sha256s:
            self.thumbnails.remove(sha256)
        await self.recent.erase(sha256s)
        return novelties


def _open_inbox(settings: ServiceSettings) -> Inbox | None:
    """None if the inbox cannot be opened, for example because another server uses it: predictions need no inbox."""
    limits = InboxLimits(
        max_count=settings.inbox_count,
        max_bytes=settings.inbox_bytes,
        max_age_seconds=settings.inbox_days * 86400,
        rate=settings.inbox_rate,
    )
    try:
        return Inbox(settings.data, limits, image_limits=settings.image_limits)
    except StoreError as error:
        log.error("this server keeps no novel images: %s", error)
        return None


async def get_container(request: Request) -> Container:
    container: Container = request.app.state.container
    return container


ContainerDep = Annotated[Container, Depends(get_container)]
