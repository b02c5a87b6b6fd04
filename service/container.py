"""Everything that lives as long as the server, in one container; `app.state.container` holds it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from models.errors import OpenWorldError, StoreError
from models.images import DecodeBudget, ImageLimits
from models.inference.providers import gpu_present
from models.inference.runtime import RuntimeCache
from models.versions.data_format import open_data_folder
from models.versions.folder_id import folder_id
from models.versions.keep import open_keep, recorded_keep
from models.versions.store import VersionStore
from service.audit import AuditLog
from service.erasure import Erasure, clean_up
from service.errors import NoQueue
from service.http.auth import Keyring
from service.http.batch_bodies import form_overhead
from service.http.bodies import Pace
from service.http.limits import Admission, Quota, RateLimiter, RequestLimits
from service.http.shared_rates import SharedRateLimiter
from service.http.uploads import Uploads
from service.inbox import Inbox, Thumbnails
from service.inbox_access import InboxAccess
from service.inference.active_version import ActiveVersion
from service.inference.drift import ScoreDrift
from service.inference.engine import Engine
from service.inference.metrics import Metrics
from service.inference.pulse import Pulse
from service.inference.recent_predictions import RecentPredictions
from service.inference.recorder import Recorder
from service.inference.shared_predictions import SharedPredictions
from service.key_store import KeyStore
from service.settings import ServiceSettings
from service.shared import RedisState, SharedKeyStore
from service.task_events import TaskEvents
from service.threads import BoundedThreads
from tasks.batch import BatchLimits
from tasks.errors import QueueUnavailable
from tasks.images import ImageStore
from tasks.queue import TaskQueue, announce, connect, key_prefix, listen

log = logging.getLogger(__name__)
T = TypeVar("T")

DISK_THREADS = 64  # threads of `asyncio.to_thread`: calls that wait for disks
REDIS_THREADS, REDIS_CALLS = 16, 64  # calls that wait for Redis; more are refused
# Default images per computed batch. On a CPU eight are no faster than four, and others wait twice as long for them.
GPU_BATCH, CPU_BATCH = 32, 4


class Container:
    """The objects of a running server. Create it on the event loop."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.draining = False  # not ready any more, but still answering
        self.storage = settings.open_storage()
        self.images = ImageStore(self.storage)
        self.audit_log = AuditLog(settings.data)
        self.metrics = Metrics(ScoreDrift(settings.drift_window, settings.drift_window // 10))
        self.metrics.ready.set_function(lambda: float(self.ready))
        self.storage.observe(self.metrics.store.observe)

        on_gpu = settings.device != "cpu" and gpu_present()
        max_batch = settings.batch_size or (GPU_BATCH if on_gpu else CPU_BATCH)
        parallel_batches = settings.parallel_batches or (1 if on_gpu else settings.threads)
        self.engine = Engine(max_batch, self.metrics, parallel_batches, settings.decode_threads)
        if self.storage.shared or settings.data.exists():  # otherwise the queue or the first write creates it
            open_data_folder(self.storage)
        self.keep = open_keep(self.storage, settings.keep)
        image_limits = ImageLimits(
            settings.max_image_bytes, settings.max_image_pixels, DecodeBudget(settings.decode_memory)
        )
        store = VersionStore(self.storage)
        self.active_version = ActiveVersion(
            store,
            RuntimeCache(store, settings.device, settings.threads),
            image_limits,
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
        images = Quota(settings.images_in_flight, settings.body_memory)
        largest = Quota(settings.max_request_images, settings.max_body_bytes)
        self.admission = Admission(
            images,
            images.share(settings.key_share, largest),
            lambda: self.engine.seconds_per_image,
            has_keys=lambda: bool(self.keyring),
        )
        self.metrics.in_flight.set_function(lambda: self.admission.in_use.images)
        self._shared = self._connect_shared()
        self.keyring = Keyring(settings.keys, self._key_store())
        self.rate_limiter = (
            SharedRateLimiter(self._shared, settings.rate_limit, settings.max_request_images)
            if self._shared is not None and "rates" in settings.shared
            else RateLimiter(settings.rate_limit, settings.max_request_images)
        )
        self.explain_turn = asyncio.Semaphore(1)
        # Neither of them waits for a disk or for Redis.
        self.explain_thread = ThreadPoolExecutor(1, thread_name_prefix="explain")
        self.metrics_thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")

        self.address = f"http://{settings.host}:{settings.port}"  # at which other servers reach this one
        self.thumbnails = Thumbnails(image_limits)
        self.recent = (
            SharedPredictions(
                self._shared, settings.recent_bytes, settings.recent_seconds, rewrite=self.keep != "images"
            )
            if self._shared is not None and "recent" in settings.shared
            else RecentPredictions(settings.recent_bytes)
        )
        self.recorder = Recorder(self.metrics, self.recent, keep_novelties=settings.inbox)
        self.novelties = InboxAccess(
            settings,
            self.storage,
            self._shared if "inbox" in settings.shared else None,
            image_limits,
            self.recorder,
            self.metrics,
            self.active_version,
            self.keep,
        )
        self.erasure = Erasure(
            self.storage, self.recorder, self.recent, self.novelties, self.thumbnails, settings.max_request_timeout
        )
        self.pulse = Pulse(self.metrics, self.active_version)

        self.batch_limits = BatchLimits(
            max_classes=settings.task_max_classes,
            max_images=settings.task_max_images,
            max_bytes=settings.task_max_bytes,
            image=image_limits,
        )
        batches = Quota(settings.uploads, settings.upload_bytes + form_overhead(self.batch_limits))
        largest = Quota(1, settings.task_max_bytes + form_overhead(self.batch_limits))
        self.uploads = Uploads(batches, batches.share(settings.key_share, largest), lambda: bool(self.keyring))
        self.upload_pace = Pace(settings.min_body_rate, settings.body_grace, settings.upload_seconds)
        url = settings.redis_url
        self._redis = connect(url.get_secret_value()) if url is not None else None
        self._queue: TaskQueue | None = None
        if url is not None:
            try:
                self.queue()
            except StoreError as error:  # predictions need no queue
                log.error("this server accepts no tasks for now: %s", error)
        self._redis_threads = BoundedThreads("redis", REDIS_THREADS, REDIS_CALLS, _queue_is_busy)
        self.task_events = TaskEvents(self.ask_queue, settings.event_streams, lambda: self.draining)
        self._background: list[asyncio.Task[None]] = []

    def _connect_shared(self) -> RedisState | None:
        url = self.settings.redis_url
        if url is None or not self.settings.shared:
            return None
        return RedisState(url.get_secret_value(), key_prefix(folder_id(self.storage)))

    def _key_store(self) -> KeyStore:
        own = KeyStore(self.settings.data)
        if self._shared is None or "keys" not in self.settings.shared:
            return own
        if own.records():
            log.warning("the keys in %s are not used: the servers share others through Redis", own.place)
        return SharedKeyStore(self.settings.data, self._shared)

    @property
    def inbox(self) -> Inbox | None:
        """The inbox, while this server has it."""
        return self.novelties.inbox

    @property
    def ready(self) -> bool:
        return self.not_ready is None

    @property
    def not_ready(self) -> str | None:
        """Why the server is not ready; None if it is."""
        if self.draining:
            return "shutting down"
        if not self.active_version.usable:
            failure = self.active_version.failure
            return f"no version: {failure.reason}" if failure else "loading"
        version = self.active_version.model.version
        broken = self.engine.broken.get(version)
        return None if broken is None else f"version {version} computes no answers: {broken}"

    async def start(self) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(DISK_THREADS))
        self.keyring.start()
        self.engine.start()
        await self.active_version.start()
        self._background.append(asyncio.create_task(self.pulse.run()))
        self._background.append(asyncio.create_task(asyncio.to_thread(clean_up, self.storage)))
        self._background.append(asyncio.create_task(self.erasure.follow()))
        self._background.append(asyncio.create_task(self._follow_keep()))
        if self.settings.inbox:
            await self.novelties.start(self.address)
        if self.settings.redis_url is not None:
            self._background.append(asyncio.create_task(self._listen(self.settings.redis_url.get_secret_value())))

    async def stop(self) -> None:
        """Call it after the last request. Writes what is queued for the inbox."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.to_thread(self.keyring.stop)
        await self.active_version.stop()
        await self.engine.stop()
        await asyncio.to_thread(self.thumbnails.close)
        await asyncio.to_thread(self.uploads.close)
        self._redis_threads.close()
        if self._redis is not None:
            await asyncio.to_thread(self._redis.close)
        self.explain_thread.shutdown(wait=False)
        self.metrics_thread.shutdown(wait=False)
        await asyncio.to_thread(self.recorder.close, 10.0)
        await self.novelties.stop()
        self.recent.close()
        self.rate_limiter.close()
        if self._shared is not None:
            await asyncio.to_thread(self._shared.close)

    async def _listen(self, url: str) -> None:
        while self._queue is None:
            with suppress(StoreError):
                await asyncio.to_thread(self.queue)
            await asyncio.sleep(self.settings.poll_seconds)
        async for _ in listen(url, self._queue.prefix):
            self.active_version.wake()

    def announce(self, version: int) -> None:
        """Notify the other servers of a new current version, without waiting for Redis. They poll as well."""
        if self._redis is not None and self._queue is not None:
            with suppress(QueueUnavailable):
                self._redis_threads.submit(announce, self._redis, version, self._queue.prefix)

    async def ask_queue(self, call: Callable[..., T], *arguments: Any) -> T:
        """The result of a call that waits for Redis; QueueUnavailable also if too many calls wait for it."""
        return await self._redis_threads.run(call, *arguments)

    def queue(self) -> TaskQueue:
        """The task queue; NoQueue if the server runs without Redis.

        StoreError if the data folder has no id yet and cannot be written.
        """
        if self._redis is None:
            raise NoQueue("this server only predicts: start it with `openworld up`, or set OPENWORLD_REDIS_URL", 60)
        if self._queue is None:
            prefix = key_prefix(folder_id(self.storage))
            self._queue = TaskQueue(self._redis, prefix, replicas=self.settings.confirming_replicas)
        return self._queue

    def find_image(self, id: str) -> bytes | None:
        """The image of a novelty, a recent prediction or an earlier task; None if it is not kept. Reads the disk."""
        novelty = self.novelties.read_image(id)
        if novelty is not None:
            return novelty
        sighting = self.recent.get(id)
        if sighting is not None:
            return sighting.data
        return self.images.read(id) if id in self.images else None

    async def _follow_keep(self) -> None:
        """Until the first version, a trainer may record what the folder keeps; later only `openworld convert` does."""
        learned = False
        while self.keep == "images" and not learned:
            await asyncio.sleep(self.settings.poll_seconds)
            has_version = self.active_version.model.version != 0  # asked before the record, which precedes any version
            with suppress(OSError, OpenWorldError):  # looked at again
                self.keep = await asyncio.to_thread(recorded_keep, self.storage)
                learned = has_version
        self.novelties.use_keep(self.keep)
        self.recent.rewrite = self.keep != "images"


def _queue_is_busy() -> QueueUnavailable:
    return QueueUnavailable(f"{REDIS_CALLS} calls wait for Redis already: check that it answers, then try again")


async def get_container(request: Request) -> Container:
    container: Container = request.app.state.container
    return container


ContainerDep = Annotated[Container, Depends(get_container)]
