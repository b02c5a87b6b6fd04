"""Everything that lives as long as the server, in one container."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

from fastapi import Depends, Request

from models.errors import StoreError
from models.inference.providers import gpu_present
from models.inference.runtime import RuntimeCache
from models.versions.data_format import open_data_folder
from models.versions.store import VersionStore
from service.errors import NoQueue
from service.http.auth import Keyring
from service.http.limits import Admission, RateLimiter, RequestLimits
from service.inbox import Inbox, InboxLimits, InboxWriter
from service.inbox.thumbnails import Thumbnails
from service.inference.active_version import ActiveVersion
from service.inference.drift import ScoreDrift
from service.inference.engine import Engine
from service.inference.metrics import Metrics
from service.inference.recent_predictions import Recent
from service.settings import ServiceSettings
from tasks.batch.check import BatchLimits
from tasks.queue import TaskQueue, announce, connect, listen

log = logging.getLogger(__name__)

BATCHES = 2  # labelled batches checked at once: each is in memory meanwhile
WAITING_THREADS = 64  # for what waits for disks and for Redis
GPU_BATCH, CPU_BATCH = 32, 8  # images at once, unless told: a GPU needs many to be busy, a CPU is with few


class Container:
    """The objects of a running server. Create it on the event loop."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.metrics = Metrics(ScoreDrift(settings.drift_window, settings.drift_window // 10))
        self.keyring = Keyring(settings.keys)
        on_gpu = settings.device != "cpu" and gpu_present()
        lanes = settings.parallel_batches or (1 if on_gpu else settings.threads)
        largest = settings.batch_size or (GPU_BATCH if on_gpu else CPU_BATCH)
        self.engine = Engine(largest, self.metrics, lanes)
        self.admission = Admission(
            settings.images_in_flight, settings.body_memory, lambda: self.engine.seconds_per_image
        )
        self.metrics.in_flight.set_function(lambda: self.admission.images)
        self.rate_limiter = RateLimiter(settings.rate_limit, settings.max_request_images)
        self.request_limits = RequestLimits(
            body=settings.max_body_bytes,
            images=settings.max_request_images,
            image=settings.max_image_bytes,
            timeout=settings.request_timeout,
            max_timeout=settings.max_request_timeout,
        )
        # Bounded by the admission in what can wait for it, and here in what it takes of the machine.
        self.decoders = ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="decode")
        open_data_folder(settings.data)
        store = VersionStore(settings.data)
        self.active_version = ActiveVersion(
            store,
            RuntimeCache(store, settings.device, settings.threads),
            settings.image_limits,
            self.metrics,
            poll_seconds=settings.poll_seconds,
            largest_batch=largest,
        )
        self.inbox = _open_inbox(settings) if settings.inbox else None
        self.inbox_writer = self._writer(self.inbox) if self.inbox is not None else None
        self.recent = Recent(settings.recent_bytes)
        self.thumbnails = Thumbnails(settings.image_limits)
        self.batch_limits = BatchLimits(
            max_classes=settings.task_max_classes,
            max_images=settings.task_max_images,
            max_bytes=settings.task_max_bytes,
        )
        self.batches = asyncio.Semaphore(BATCHES)
        url = settings.redis_url
        self._redis = connect(url.get_secret_value()) if url is not None else None
        self._queue = TaskQueue(self._redis) if self._redis is not None else None
        self.draining = False
        self._listener: asyncio.Task[None] | None = None

    def _writer(self, inbox: Inbox) -> InboxWriter:
        return InboxWriter(
            inbox,
            on_kept=lambda kept: self.metrics.novelties_folded.inc(kept.outcome == "folded"),
            on_drop=lambda reason: self.metrics.novelties_dropped.labels(reason).inc(),
        )

    @property
    def ready(self) -> bool:
        """Loaded, warm and not about to go."""
        return self.active_version.usable and not self.draining

    async def start(self) -> None:
        # Python's own default has a handful of threads, which a Redis that hangs would take from everything else.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(WAITING_THREADS))
        self.engine.start()
        await self.active_version.start()
        if self.settings.redis_url is not None:
            self._listener = asyncio.create_task(self._listen(self.settings.redis_url.get_secret_value()))
        self.metrics.ready.set_function(lambda: float(self.ready))

    async def stop(self) -> None:
        """After the last request: nothing is lost that was promised."""
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        await self.active_version.stop()
        await self.engine.stop()
        self.decoders.shutdown(wait=True)
        await asyncio.to_thread(self.thumbnails.close)
        if self._redis is not None:
            await asyncio.to_thread(self._redis.close)
        if self.inbox is not None and self.inbox_writer is not None:
            await asyncio.to_thread(self.inbox_writer.close, 10.0)
            await asyncio.to_thread(self.inbox.close)

    def drain(self) -> None:
        """From now on not ready, but everything is still answered."""
        self.draining = True

    async def _listen(self, url: str) -> None:
        async for _ in listen(url):
            self.active_version.wake()

    def announce(self, version: int) -> None:
        """Tell the other servers; they would find out by themselves, but later."""
        if self._redis is not None:
            announce(self._redis, version)

    def queue(self) -> TaskQueue:
        """Where tasks go. NoQueue when this server was started without one."""
        if self._queue is None:
            raise NoQueue("this server only predicts: start it with `openworld up`, or set OPENWORLD_REDIS_URL", 60)
        return self._queue

    def find_image(self, id: str) -> bytes | None:
        """The image of a novelty's or a recent prediction's id; None when it is not kept. Reads the disk."""
        if self.inbox is not None and self.inbox.get(id) is not None:
            return self.inbox.read_image(id)
        sighting = self.recent.get(id)
        return None if sighting is None else sighting.data


def _open_inbox(settings: ServiceSettings) -> Inbox | None:
    """None when another server of this data folder has it: answers matter more than a second inbox."""
    limits = InboxLimits(
        max_count=settings.inbox_count,
        max_bytes=settings.inbox_bytes,
        max_age_seconds=settings.inbox_days * 86400,
        rate=settings.inbox_rate,
    )
    try:
        return Inbox(settings.data, limits, image_limits=settings.image_limits)
    except StoreError as error:
        log.error("novel images are not kept here: %s", error)
        return None


async def get_container(request: Request) -> Container:
    container: Container = request.app.state.container
    return container


ContainerDep = Annotated[Container, Depends(get_container)]
