"""Recent predictions that all servers of a data folder share: one that a server answered is labelled through another.

A prediction is kept in the memory of its server, and a thread copies it to Redis, with a time to live and within a
number of bytes. No answer waits for Redis: if it does not keep up, predictions are known to their server only.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from models.files import sha256_bytes
from service.inbox import Sighting
from service.inference.recent_predictions import MAX_COUNT, RecentPredictions
from service.shared import RedisState, pack_sighting, unpack_sighting
from tasks.errors import QueueUnavailable

MAX_WAITING = 32 * 2**20  # bytes of predictions that wait to be copied
LOG_SECONDS = 60.0  # between two messages about predictions that are not copied

log = logging.getLogger(__name__)


class SharedPredictions(RecentPredictions):
    """`max_bytes` apply to the memory of a server, and to Redis for all servers together.

    `rewrite`: no file of Redis may contain an image after its erasure, because the data folder does not keep images.
    """

    def __init__(self, state: RedisState, max_bytes: int, seconds: float, *, rewrite: bool = False) -> None:
        super().__init__(max_bytes)
        self._state, self._max_bytes, self._milliseconds = state, max_bytes, round(seconds * 1000)
        # One thread: an erasure comes after the copies of predictions that were put before.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recent")
        self.rewrite = rewrite
        self._lock = threading.Lock()
        self._waiting = 0  # bytes
        self._logged = -LOG_SECONDS

    def put(self, sighting: Sighting) -> None:
        super().put(sighting)
        size = len(sighting.data)
        if size >= self._max_bytes:  # it is not kept at all
            return
        with self._lock:
            taken = self._waiting + size <= MAX_WAITING
            self._waiting += size if taken else 0
        if taken:
            self._thread.submit(self._copy, sighting)
        else:
            self._report("Redis does not keep up")

    def get(self, prediction_id: str) -> Sighting | None:
        """Waits for Redis if this server did not answer the prediction: call it in a thread."""
        found = super().get(prediction_id)
        if found is not None:
            return found
        packed = self._state.get(f"recent:{prediction_id}")
        return None if packed is None else unpack_sighting(packed)

    async def erase(self, sha256s: Collection[str]) -> int:
        """QueueUnavailable if the copies in Redis may remain, until their time to live ends."""
        here = await super().erase(sha256s)
        loop = asyncio.get_running_loop()
        shared = await loop.run_in_executor(self._thread, self._state.run, "recent_erase", *sha256s)
        if self.rewrite:  # also if they have expired
            await loop.run_in_executor(self._thread, self._state.rewrite_log)
        return max(here, int(shared))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _copy(self, sighting: Sighting) -> None:
        try:
            sha256 = sighting.sha256 or sha256_bytes(sighting.data)
            packed = pack_sighting(replace(sighting, sha256=sha256))
            limits = (self._milliseconds, self._max_bytes, MAX_COUNT)
            if len(packed) <= self._max_bytes:
                self._state.run("recent_put", sighting.prediction_id, sha256, packed, *limits)
        except QueueUnavailable as error:
            self._report(str(error))
        finally:
            with self._lock:
                self._waiting -= len(sighting.data)

    def _report(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            log.warning("recent predictions are known to this server only for now: %s", reason)
