"""Pinned versions: the number in memory is bounded, abandoned loads are skipped, failures pause."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import numpy as np
import pytest

from models.inference.evidence import Array
from models.inference.predictor import Scored
from service.errors import Overloaded, VersionUnusable
from service.inference.pinned_versions import MAX_LOADS, MAX_PINNED, PinnedVersions
from service.inference.servable import ServableModel


@dataclass(eq=False)
class FakeModel:
    version: int
    reference_points: int = 0

    def decode(self, data: bytes) -> Array:
        return np.zeros(0, np.float32)

    def score(self, pixels: Sequence[Array], all_threads: bool = True) -> list[Scored]:
        return []


@dataclass
class Loader:
    """Loads fake models while `go` is set, and counts those in memory."""

    loaded: list[int] = field(default_factory=list)
    alive: WeakSet[FakeModel] = field(default_factory=WeakSet)
    most_alive: int = 0
    damaged: bool = False
    now: float = 0.0
    go: threading.Event = field(default_factory=threading.Event)

    def __call__(self, number: int) -> ServableModel:
        assert self.go.wait(60)
        self.loaded.append(number)
        if self.damaged:
            raise OSError("a flipped byte")
        model = FakeModel(number)
        self.alive.add(model)
        self.most_alive = max(self.most_alive, len(self.alive))
        return model


def run(scenario: Callable[[Loader, PinnedVersions], Awaitable[None]]) -> None:
    async def with_versions() -> None:
        loader = Loader()
        pinned = PinnedVersions(loader, lambda: loader.now)
        try:
            await scenario(loader, pinned)
        finally:
            loader.go.set()
            pinned.close()

    asyncio.run(with_versions())


async def started(loader: Loader, pinned: PinnedVersions, *numbers: int) -> list[asyncio.Task[ServableModel]]:
    requests = [asyncio.create_task(pinned.get(number)) for number in numbers]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return requests


def test_all_requests_for_a_version_share_one_load() -> None:
    async def scenario(loader: Loader, pinned: PinnedVersions) -> None:
        requests = await started(loader, pinned, *[1] * 64)
        for request in requests[:63]:
            request.cancel()
        loader.go.set()
        assert (await requests[63]).version == 1
        assert (await pinned.get(1)).version == 1
        assert loader.loaded == [1]

    run(scenario)


def test_a_load_that_no_request_waits_for_is_skipped() -> None:
    async def scenario(loader: Loader, pinned: PinnedVersions) -> None:
        first, second, third = await started(loader, pinned, 1, 2, 3)
        second.cancel()
        loader.go.set()
        await asyncio.gather(first, third)
        assert loader.loaded == [1, 3]

    run(scenario)


def test_models_that_requests_still_use_count_as_loaded() -> None:
    async def scenario(loader: Loader, pinned: PinnedVersions) -> None:
        loader.go.set()
        in_use = [await pinned.get(number) for number in range(MAX_PINNED)]
        request = asyncio.create_task(pinned.get(9))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(request), 0.05)
        in_use.clear()
        gc.collect()
        assert (await asyncio.wait_for(request, 60)).version == 9
        assert loader.most_alive == MAX_PINNED

    run(scenario)


def test_a_request_for_one_more_version_is_refused_while_many_are_loading() -> None:
    async def scenario(loader: Loader, pinned: PinnedVersions) -> None:
        requests = await started(loader, pinned, *range(MAX_LOADS))
        with pytest.raises(Overloaded, match="being loaded"):
            await pinned.get(MAX_LOADS)
        for request in requests:
            request.cancel()

    run(scenario)


def test_a_version_that_cannot_be_loaded_is_tried_again_after_a_pause() -> None:
    async def scenario(loader: Loader, pinned: PinnedVersions) -> None:
        loader.go.set()
        loader.damaged = True
        for _ in range(3):
            with pytest.raises(VersionUnusable, match="a flipped byte"):
                await pinned.get(1)
        assert loader.loaded == [1]
        loader.damaged = False
        loader.now += 1.5
        assert (await pinned.get(1)).version == 1

    run(scenario)
