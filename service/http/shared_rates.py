"""The rate per key over all servers, counted in Redis. While Redis does not answer, each server limits by itself."""

from __future__ import annotations

import asyncio
import logging
import time

from service.errors import RateLimited
from service.http.limits import RateLimiter
from service.shared import RedisState
from service.threads import BoundedThreads
from tasks.errors import QueueUnavailable

SECONDS = 0.25  # that a request waits for Redis
THREADS, CALLS = 4, 64
LOG_SECONDS = 60.0  # between two messages about a Redis that does not answer

log = logging.getLogger(__name__)


class SharedRateLimiter(RateLimiter):
    """A `RateLimiter` whose buckets are in Redis."""

    def __init__(self, state: RedisState, rate: float, max_images: int) -> None:
        super().__init__(rate, max_images)
        self._state = state
        self._threads = BoundedThreads("rates", THREADS, CALLS, _busy)
        self._logged = -LOG_SECONDS

    async def admit(self, client: str, images: int, paid: int = 0) -> None:
        if not self._rate or images == paid:
            return
        arguments = ("rate_take", client, images, paid, self._rate, self._burst)
        try:
            async with asyncio.timeout(SECONDS):
                milliseconds = int(await self._threads.run(self._state.run, *arguments))
        except (QueueUnavailable, TimeoutError) as error:
            self._report(error)
            self.take(client, images, paid)
            return
        if milliseconds > 0:
            raise self._limited(client, milliseconds / 1000)

    def close(self) -> None:
        self._threads.close()

    def _limited(self, client: str, wait: float) -> RateLimited:
        return RateLimited(f"key {client!r} may send {self._rate:g} images per second to all servers: slow down", wait)

    def _report(self, error: Exception) -> None:
        now = time.monotonic()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            log.warning("rates are limited per server for now, Redis does not answer: %s", error or "too late")


def _busy() -> QueueUnavailable:
    return QueueUnavailable(f"{CALLS} requests wait for Redis already")
