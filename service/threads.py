"""Threads for calls that wait for something outside of this process.

Calls that wait for Redis have threads of their own: while Redis hangs, they occupy all of these, and no others. Further
calls are refused at once instead of waiting in a queue that grows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class BoundedThreads:
    """A thread pool with a bounded number of calls. Use it on the event loop; `refused` makes the error of others."""

    def __init__(self, name: str, threads: int, max_calls: int, refused: Callable[[], Exception]) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._max_calls, self._refused = max_calls, refused
        self._calls = 0

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """The result of the call. A cancelled caller does not stop a call that has begun: it still counts."""
        return await asyncio.wrap_future(self.submit(call, *arguments))

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Begin the call without waiting for it."""
        if self._calls >= self._max_calls:
            raise self._refused()
        self._calls += 1
        loop = asyncio.get_running_loop()
        future = self._pool.submit(call, *arguments)
        future.add_done_callback(lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(self._ended))
        return future

    def _ended(self) -> None:
        self._calls -= 1

    def close(self) -> None:
        """Drop the calls that have not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)
