"""The engine: one owner of the queue, and lanes that compute.

**Every image gets the answer of the version that it was admitted to, or an error of its own; never another image's.**

No request waits for a batch to fill: a batch is what queued while all lanes were busy. An image whose request was
given up or has passed its deadline is skipped when its turn comes. A GPU has one lane. A CPU has one a core: there a
large batch gains nothing over small ones side by side, which need not wait for each other within a layer.
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

SMOOTHING = 0.2  # weight of the newest batch in the estimate of the seconds an image takes


@dataclass(eq=False)
class _Waiting:
    """One decoded image and whoever awaits its answer; a cancelled future is a request that was given up."""

    version: ServableModel
    pixels: Array
    deadline: float
    future: asyncio.Future[Scored]
    since: float = field(default_factory=time.monotonic)


class Engine:
    """Everything but the arithmetic runs on the event loop, so that nothing here needs a lock."""

    def __init__(self, max_batch: int, metrics: Metrics, lanes: int = 1) -> None:
        self._max_batch, self._metrics = max_batch, metrics
        self._queue: deque[_Waiting] = deque()
        self._something = asyncio.Event()
        self._threads = ThreadPoolExecutor(lanes, thread_name_prefix="engine")
        self._free = asyncio.Semaphore(lanes)
        self._batches: set[asyncio.Task[None]] = set()  # under way
        self._owner: asyncio.Task[None] | None = None
        self.seconds_per_image = 0.05  # a guess until the first batch

    def start(self) -> None:
        self._owner = asyncio.create_task(self._run(), name="engine")

    async def stop(self) -> None:
        """Call it when no request is left."""
        if self._owner is not None:
            self._owner.cancel()
            await asyncio.gather(self._owner, return_exceptions=True)
        await asyncio.gather(*self._batches, return_exceptions=True)
        for waiting in self._queue:
            waiting.future.cancel()
        self._threads.shutdown(wait=True)

    def submit(self, version: ServableModel, pixels: Array, deadline: float) -> asyncio.Future[Scored]:
        """Queue one image. Cancel the future to give it up."""
        future: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(version, pixels, deadline, future))
        self._metrics.queue_depth.set(len(self._queue))
        self._something.set()
        return future

    async def _run(self) -> None:
        while True:
            await self._something.wait()
            await self._free.acquire()  # first the lane, then the batch: until then more may join it
            batch = self._take()
            if not self._queue:
                self._something.clear()
            if batch:
                alone = not self._batches and not self._queue
                under_way = asyncio.create_task(self._compute(batch, alone))
                self._batches.add(under_way)
                under_way.add_done_callback(self._done)
            else:
                self._free.release()

    def _done(self, under_way: asyncio.Task[None]) -> None:
        self._batches.discard(under_way)
        self._free.release()

    def _take(self) -> list[_Waiting]:
        """The next images of one version that are still wanted, in the order in which they came."""
        batch: list[_Waiting] = []
        now = time.monotonic()
        while self._queue and len(batch) < self._max_batch:
            waiting = self._queue[0]
            if batch and waiting.version is not batch[0].version:
                break
            self._queue.popleft()
            if waiting.future.done():
                continue
            if waiting.deadline <= now:
                waiting.future.set_exception(DeadlinePassed("the deadline passed while the image waited"))
                continue
            self._metrics.stage_seconds.labels("queue").observe(now - waiting.since)
            batch.append(waiting)
        self._metrics.queue_depth.set(len(self._queue))
        return batch

    async def _compute(self, batch: Sequence[_Waiting], alone: bool) -> None:
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            scored = await loop.run_in_executor(
                self._threads, batch[0].version.score, [waiting.pixels for waiting in batch], alone
            )
        except Exception as error:
            log.exception("a batch of %d images could not be computed", len(batch))
            for waiting in batch:
                if not waiting.future.done():
                    waiting.future.set_exception(error)
            return
        seconds = time.monotonic() - started
        self.seconds_per_image += SMOOTHING * (seconds / len(batch) - self.seconds_per_image)
        self._metrics.stage_seconds.labels("score").observe(seconds)
        self._metrics.batch_size.observe(len(batch))
        for waiting, result in zip(batch, scored, strict=True):
            if not waiting.future.done():
                waiting.future.set_result(result)
