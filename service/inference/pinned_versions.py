"""Versions that are loaded for requests with `?version=`.

**A version is loaded once, however many requests ask for it and give up; at most `MAX_PINNED` of them are in memory.**

A load belongs to no request: it goes on when the request that started it is cancelled, because a thread cannot be
stopped. Loads run one after the other in a thread of their own and hold no lock that a swap needs. A load that no
request waits for any more is skipped. A version that could not be loaded is not tried again before a pause, which grows
with every failure: verifying it means hashing all of its files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from weakref import finalize

from cachetools import LRUCache

from models.backoff import Backoff
from service.errors import Overloaded, VersionUnusable
from service.inference.servable import ServableModel
from service.thread_priority import lower_priority

MAX_PINNED = 2  # models in memory, those that requests still use included
MAX_LOADS = 4  # versions that are being loaded or wait for it; further ones are refused
FIRST_RETRY, LONGEST_RETRY = 1.0, 60.0  # seconds after which a version that failed is tried again


@dataclass
class _Load:
    """The only load of a version, shared by all requests that wait for it."""

    task: asyncio.Task[ServableModel]
    waiting: int = 0  # requests


@dataclass
class _Failure:
    reason: str = ""
    next_try: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_RETRY, LONGEST_RETRY))


class PinnedVersions:
    """Use it on the event loop. `load` is called in a thread."""

    def __init__(self, load: Callable[[int], ServableModel], clock: Callable[[], float] = time.monotonic) -> None:
        self._load, self._clock = load, clock
        # Low priority: a client that asks for many versions must not slow down other clients.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pinned", initializer=lower_priority)
        self._turn = asyncio.Lock()
        self._kept: LRUCache[int, ServableModel] = LRUCache(MAX_PINNED)
        self._loads: dict[int, _Load] = {}
        self._failures: dict[int, _Failure] = {}
        self._in_memory = 0
        self._freed = asyncio.Event()

    def __contains__(self, number: int) -> bool:
        """Whether the version is loaded or being loaded; such a version exists."""
        return number in self._kept or number in self._loads

    async def get(self, number: int) -> ServableModel:
        """The model of a version that exists; VersionUnusable if it cannot be loaded."""
        if (model := self._kept.get(number)) is not None:
            return model
        load = self._loads.get(number)
        if load is None:
            self._check_pause(number)
            if len(self._loads) >= MAX_LOADS:
                raise Overloaded(f"{MAX_LOADS} other versions are being loaded: ask for fewer versions at once", 1)
            load = self._loads[number] = _Load(asyncio.create_task(self._run(number), name=f"version {number}"))
            load.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be waiting
        load.waiting += 1
        try:
            return await asyncio.shield(load.task)
        finally:
            load.waiting -= 1

    def forget(self, number: int) -> None:
        """Drop the model of a version, because it is active now."""
        self._kept.pop(number, None)

    def close(self) -> None:
        for load in self._loads.values():
            load.task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check_pause(self, number: int) -> None:
        failure = self._failures.get(number)
        if failure is not None and (left := failure.next_try - self._clock()) > 0:
            raise VersionUnusable(f"version {number} cannot be loaded: {failure.reason}; next try in {left:.0f} s")

    async def _run(self, number: int) -> ServableModel:
        try:
            async with self._turn:
                await self._make_room()
                if not self._loads[number].waiting:
                    raise asyncio.CancelledError
                model = await asyncio.get_running_loop().run_in_executor(self._thread, self._load, number)
                self._in_memory += 1
                finalize(model, self._call_on_free, asyncio.get_running_loop()).atexit = False
        except Exception as error:
            failure = self._failures.setdefault(number, _Failure())
            failure.reason = str(error)
            failure.next_try = self._clock() + failure.backoff.next()
            raise VersionUnusable(f"version {number} cannot be loaded: {error}") from error
        finally:
            del self._loads[number]
        self._failures.pop(number, None)
        self._kept[number] = model
        return model

    async def _make_room(self) -> None:
        """Wait until one more model may be in memory: requests may still use those that are not kept any more."""
        while len(self._kept) >= MAX_PINNED:
            self._kept.popitem()
        while self._in_memory >= MAX_PINNED:
            self._freed.clear()
            await self._freed.wait()

    def _call_on_free(self, loop: asyncio.AbstractEventLoop) -> None:
        # A thread of the engine may hold the last reference.
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._on_free)

    def _on_free(self) -> None:
        self._in_memory -= 1
        self._freed.set()
