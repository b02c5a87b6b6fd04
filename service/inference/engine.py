"""The engine decodes images, queues them and computes their answers in batches.

**Every image gets the answer of the model it was submitted to, or its own error; never another image's.**

No image waits for a batch to fill: a batch contains the images that queued while the engine was busy. An image whose
request was cancelled or has passed its deadline is skipped. A GPU computes one batch at a time. A CPU computes one
batch per core: one large batch is no faster there than several small ones in parallel, which do not wait for each other
after every layer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from models.inference.evidence import Array
from models.inference.predictor import Scored
from service.errors import DeadlinePassed
from service.inference.metrics import Metrics
from service.inference.servable import ServableModel

log = logging.getLogger(__name__)

SMOOTHING = 0.2  # weight of the newest batch in `seconds_per_image`


@dataclass(eq=False)
class _QueuedImage:
    model: ServableModel
    pixels: Array
    deadline: float
    future: asyncio.Future[Scored]  # cancelled when the request ends early
    queued_at: float = field(default_factory=time.monotonic)


class Engine:
    """Uses the event loop for everything but decoding and computing, so it needs no lock."""

    def __init__(self, max_batch: int, metrics: Metrics, parallel_batches: int = 1, decode_threads: int = 1) -> None:
        self._max_batch, self._metrics = max_batch, metrics
        self._queue: deque[_QueuedImage] = deque()
        self._not_empty = asyncio.Event()
        # Admission bounds what waits for these threads.
        self._decoders = ThreadPoolExecutor(decode_threads, thread_name_prefix="decode")
        self._threads = ThreadPoolExecutor(parallel_batches, thread_name_prefix="engine")
        self._free_threads = asyncio.Semaphore(parallel_batches)
        self._running: set[asyncio.Task[None]] = set()
        self._scheduler: asyncio.Task[None] | None = None
        self.seconds_per_image = 0.05  # a guess until the first batch
        metrics.queue_depth.set_function(lambda: len(self._queue))

    def start(self) -> None:
        self._scheduler = asyncio.create_task(self._schedule(), name="engine")

    async def stop(self) -> None:
        """Call it after the last request."""
        if self._scheduler is not None:
            self._scheduler.cancel()
            await asyncio.gather(self._scheduler, return_exceptions=True)
        await asyncio.gather(*self._running, return_exceptions=True)
        for image in self._queue:
            image.future.cancel()
        self._threads.shutdown(wait=True)
        self._decoders.shutdown(wait=True)

    async def decode(self, model: ServableModel, data: bytes) -> Array:
        """The pixels of an encoded image; raises ImageError."""
        started = time.monotonic()
        pixels = await asyncio.get_running_loop().run_in_executor(self._decoders, model.decode, data)
        self._metrics.stages["decode"].observe(time.monotonic() - started)
        return pixels

    def submit(self, model: ServableModel, pixels: Array, deadline: float) -> asyncio.Future[Scored]:
        """Queue one image. Cancel the future to withdraw it."""
        future: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        self._queue.append(_QueuedImage(model, pixels, deadline, future))
        self._not_empty.set()
        return future

    async def _schedule(self) -> None:
        while True:
            await self._not_empty.wait()
            await self._free_threads.acquire()  # before the batch is taken, so that more images can join it
            batch = self._next_batch()
            if not self._queue:
                self._not_empty.clear()
            if batch:
                all_threads = not self._running and not self._queue
                task = asyncio.create_task(self._compute(batch, all_threads))
                self._running.add(task)
                task.add_done_callback(self._finished)
            else:
                self._free_threads.release()

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._free_threads.release()

    def _next_batch(self) -> list[_QueuedImage]:
        """The next images of one model, in order, without those that were cancelled or have expired."""
        batch: list[_QueuedImage] = []
        now = time.monotonic()
        while self._queue and len(batch) < self._max_batch:
            image = self._queue[0]
            if batch and image.model is not batch[0].model:
                break
            self._queue.popleft()
            if image.future.done():
                continue
            if image.deadline <= now:
                image.future.set_exception(DeadlinePassed("the deadline passed while the image was queued"))
                continue
            self._metrics.stages["queue"].observe(now - image.queued_at)
            batch.append(image)
        return batch

    async def _compute(self, batch: Sequence[_QueuedImage], all_threads: bool) -> None:
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            scored = await loop.run_in_executor(
                self._threads, batch[0].model.score, [image.pixels for image in batch], all_threads
            )
        except Exception as error:
            log.exception("a batch of %d images could not be computed", len(batch))
            for image in batch:
                if not image.future.done():
                    image.future.set_exception(error)
            return
        seconds = time.monotonic() - started
        self.seconds_per_image += SMOOTHING * (seconds / len(batch) - self.seconds_per_image)
        self._metrics.stages["score"].observe(seconds)
        self._metrics.batch_size.observe(len(batch))
        for image, result in zip(batch, scored, strict=True):
            if not image.future.done():
                image.future.set_result(result)
