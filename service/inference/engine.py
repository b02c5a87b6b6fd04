"""The engine decodes images, queues them and computes their answers in batches.

**Every image gets the answer of the model it was submitted to, or its own error; never another image's.**

No image waits for a batch to fill: a batch contains the images that queued while the engine was busy. An image whose
request was cancelled or has passed its deadline is skipped. A GPU computes one batch at a time. A CPU computes one
batch per core: one large batch is no faster there than several small ones in parallel, which do not wait for each other
after every layer.

The images of a client that sends far more than the others have a queue and threads of their own, of low priority: they
use what the others leave, and hardly delay them.

A version whose batches fail again and again is probed with a blank image. While the probe fails too, the version is
`broken`, and a server with it is not ready.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from weakref import ref

import numpy as np

from models.backoff import Backoff
from models.errors import LargeImage
from models.inference.evidence import Array
from models.inference.predictor import Scored
from service.errors import DeadlinePassed
from service.inference.client_load import ClientLoad
from service.inference.metrics import Metrics
from service.inference.servable import ServableModel
from service.thread_priority import lower_priority

log = logging.getLogger(__name__)

FAILURES_BEFORE_PROBE = 3  # failed batches of a version in a row
FIRST_PROBE, LONGEST_PROBE = 1.0, 30.0  # seconds between probes of a version that computes nothing
SMOOTHING = 0.2  # weight of the newest batch in `seconds_per_image`


@dataclass(eq=False)
class _QueuedImage:
    model: ServableModel
    pixels: Array
    deadline: float
    future: asyncio.Future[Scored]  # cancelled when the request ends early
    queued_at: float = field(default_factory=time.monotonic)


class _Lane:
    """A queue of images, and the threads that decode and compute them."""

    def __init__(
        self, name: str, parallel_batches: int, decode_threads: int, initializer: Callable[[], None] | None = None
    ) -> None:
        self.name = name
        self.queue: deque[_QueuedImage] = deque()
        self.not_empty = asyncio.Event()
        # Admission bounds what waits for these threads.
        self.decoders = ThreadPoolExecutor(decode_threads, f"{name}-decode", initializer)
        self.threads = ThreadPoolExecutor(parallel_batches, name, initializer)
        self.free_threads = asyncio.Semaphore(parallel_batches)

    def close(self) -> None:
        """Call it after the last batch."""
        for image in self.queue:
            image.future.cancel()
        self.threads.shutdown(wait=True)
        self.decoders.shutdown(wait=True)


class Engine:
    """Uses the event loop for everything but decoding and computing, so it needs no lock."""

    def __init__(self, max_batch: int, metrics: Metrics, parallel_batches: int = 1, decode_threads: int = 1) -> None:
        self._max_batch, self._metrics = max_batch, metrics
        self._load = ClientLoad()
        self._lane = _Lane("engine", parallel_batches, decode_threads)
        self._heavy_lane = _Lane("engine-heavy", parallel_batches, decode_threads, lower_priority)
        # Threads of their own, so that a small image never waits for one that takes a second to decode.
        self._large_decoders = ThreadPoolExecutor(
            decode_threads, thread_name_prefix="decode-large", initializer=lower_priority
        )
        self._running: set[asyncio.Task[None]] = set()
        self._schedulers: list[asyncio.Task[None]] = []
        self._failures: dict[int, int] = {}  # failed batches in a row, by version
        self._probes: set[asyncio.Task[None]] = set()
        self.broken: dict[int, str] = {}  # versions that cannot compute even a blank image, and why
        self.seconds_per_image = 0.05  # a guess until the first batch
        metrics.queue_depth.set_function(lambda: sum(len(lane.queue) for lane in self._lanes))

    @property
    def _lanes(self) -> tuple[_Lane, _Lane]:
        return self._lane, self._heavy_lane

    def start(self) -> None:
        self._schedulers = [asyncio.create_task(self._schedule(lane), name=lane.name) for lane in self._lanes]

    async def stop(self) -> None:
        """Call it after the last request."""
        background = [*self._probes, *self._schedulers]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await asyncio.gather(*self._running, return_exceptions=True)
        for lane in self._lanes:
            lane.close()
        self._large_decoders.shutdown(wait=True)

    async def decode(self, client: str, model: ServableModel, data: bytes) -> Array:
        """The pixels of an encoded image; raises ImageError."""
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        self._load.count(client)
        try:
            pixels = await loop.run_in_executor(self._lane_of(client).decoders, model.decode, data, True)
        except LargeImage:
            pixels = await loop.run_in_executor(self._large_decoders, model.decode, data)
        self._metrics.stages["decode"].observe(time.monotonic() - started)
        return pixels

    def submit(self, client: str, model: ServableModel, pixels: Array, deadline: float) -> asyncio.Future[Scored]:
        """Queue one image. Cancel the future to withdraw it."""
        future: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        lane = self._lane_of(client)
        lane.queue.append(_QueuedImage(model, pixels, deadline, future))
        lane.not_empty.set()
        return future

    def _lane_of(self, client: str) -> _Lane:
        return self._heavy_lane if self._load.is_heavy(client) else self._lane

    async def _schedule(self, lane: _Lane) -> None:
        while True:
            await lane.not_empty.wait()
            await lane.free_threads.acquire()  # before the batch is taken, so that more images can join it
            batch = self._next_batch(lane.queue)
            if not lane.queue:
                lane.not_empty.clear()
            if batch:
                # ONNX Runtime's own threads do not have the low priority of the heavy lane.
                all_threads = lane is self._lane and not self._running and not lane.queue
                task = asyncio.create_task(self._compute(lane, batch, all_threads))
                self._running.add(task)
                task.add_done_callback(partial(self._finished, lane))
            else:
                lane.free_threads.release()
            del batch  # a version that was replaced is freed after its last batch, not with the next one

    def _finished(self, lane: _Lane, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        lane.free_threads.release()

    def _next_batch(self, queue: deque[_QueuedImage]) -> list[_QueuedImage]:
        """The next images of one model, in order, without those that were cancelled or have expired."""
        batch: list[_QueuedImage] = []
        now = time.monotonic()
        while queue and len(batch) < self._max_batch:
            image = queue[0]
            if batch and image.model is not batch[0].model:
                break
            queue.popleft()
            if image.future.done():
                continue
            if image.deadline <= now:
                image.future.set_exception(DeadlinePassed("the deadline passed while the image was queued"))
                continue
            self._metrics.stages["queue"].observe(now - image.queued_at)
            batch.append(image)
        return batch

    async def _compute(self, lane: _Lane, batch: Sequence[_QueuedImage], all_threads: bool) -> None:
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            scored = await loop.run_in_executor(
                lane.threads, batch[0].model.score, [image.pixels for image in batch], all_threads
            )
        except Exception as error:
            log.exception("a batch of %d images could not be computed", len(batch))
            for image in batch:
                if not image.future.done():
                    image.future.set_exception(error)
            self._count_failure(batch[0])
            return
        self._failures.pop(batch[0].model.version, None)
        self.broken.pop(batch[0].model.version, None)
        seconds = time.monotonic() - started
        self.seconds_per_image += SMOOTHING * (seconds / len(batch) - self.seconds_per_image)
        self._metrics.stages["score"].observe(seconds)
        self._metrics.batch_size.observe(len(batch))
        for image, result in zip(batch, scored, strict=True):
            if not image.future.done():
                image.future.set_result(result)

    # Persistent failures

    def _count_failure(self, image: _QueuedImage) -> None:
        self._metrics.engine_failures.inc()
        version = image.model.version
        self._failures[version] = self._failures.get(version, 0) + 1
        if self._failures[version] == FAILURES_BEFORE_PROBE:
            task = asyncio.create_task(self._probe(ref(image.model), version, np.zeros_like(image.pixels)))
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)

    async def _probe(self, model: Callable[[], ServableModel | None], version: int, blank: Array) -> None:
        """Compute a blank image until it succeeds. Without requests nothing else would show that it works again."""
        backoff = Backoff(FIRST_PROBE, LONGEST_PROBE)
        loop = asyncio.get_running_loop()
        while version in self._failures and (probed := model()) is not None:
            try:
                await loop.run_in_executor(self._lane.threads, probed.score, [blank], False)
            except Exception as error:
                if version not in self.broken:
                    log.error("version %d computes no answers: %s", version, error)
                self.broken[version] = str(error) or type(error).__name__
                del probed  # a version that was replaced is freed
                await asyncio.sleep(backoff.next())
            else:
                if version in self.broken:
                    log.info("version %d computes answers again", version)
                break
        self._failures.pop(version, None)
        self.broken.pop(version, None)
