"""Labelled batches on their way in: how many are received at once, and the threads that check them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

from service.http.limits import Admission, Permit, Quota
from service.thread_priority import lower_priority

CHECK_THREADS = 2  # batches that are checked and stored at the same time
SECONDS_PER_BATCH = 5.0  # a guess, for Retry-After

T = TypeVar("T")


class Uploads:
    """Admits batches, and checks them after they are received.

    **A batch that arrives slowly takes no thread, and a key has at most one batch in the threads.**
    """

    def __init__(self, limit: Quota, per_key: Quota, has_keys: Callable[[], bool] = lambda: True) -> None:
        self._admission = Admission(limit, per_key, lambda: SECONDS_PER_BATCH, ratio=1.0, has_keys=has_keys)
        self._has_keys = has_keys
        self._threads = ThreadPoolExecutor(CHECK_THREADS, thread_name_prefix="batches", initializer=lower_priority)
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)

    def enter(self, client: str) -> Permit:
        """A permit for one batch, before its body is read; Overloaded or KeyBusy if there are too many."""
        return self._admission.enter(client)

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """The result of the work, which decodes images and waits for the disk, in a thread."""
        async with self._turns[client] if self._has_keys() else nullcontext():
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
