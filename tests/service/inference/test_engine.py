"""The engine: order, batches of one model, no work for cancelled images, and separate errors."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.images import ImageLimits
from models.inference.answer import NOTHING_KNOWN
from models.inference.evidence import Array
from models.inference.predictor import Scored
from service.errors import DeadlinePassed
from service.inference import engine as engine_module
from service.inference.engine import Engine
from service.inference.metrics import Metrics
from service.inference.servable import EmptyModel
from tests.support.bad_images import png

CLIENT = "robot"


@dataclass
class FakeModel:
    """An image is a number, and its embedding is that number. `score` waits until `go` is set."""

    version: int = 1
    batches: list[list[float]] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    fails_on: float | None = None

    def decode(self, data: bytes, small_only: bool = False) -> Array:
        raise AssertionError("the engine does not decode")

    def score(self, pixels: Sequence[Array], all_threads: bool = True) -> list[Scored]:
        self.entered.set()
        assert self.go.wait(60)
        self.batches.append([float(one[0]) for one in pixels])
        if self.fails_on in self.batches[-1]:
            raise RuntimeError("out of memory")
        return [Scored(NOTHING_KNOWN, one) for one in pixels]


def image(number: float) -> Array:
    return np.array([number], np.float32)


def soon() -> float:
    return time.monotonic() + 60


@asynccontextmanager
async def running(max_batch: int = 4, parallel_batches: int = 1) -> AsyncIterator[Engine]:
    engine = Engine(max_batch, Metrics(), parallel_batches)
    engine.start()
    yield engine
    await engine.stop()


async def keep_busy(engine: Engine, version: FakeModel) -> asyncio.Future[Scored]:
    """Occupy the engine with a first image, so that the following ones queue."""
    first = engine.submit(CLIENT, version, image(-1), soon())
    while not version.entered.is_set():
        await asyncio.sleep(0.001)
    return first


def numbers(results: Sequence[Scored]) -> list[float]:
    return [float(one.embedding[0]) for one in results if one.embedding is not None]


def test_a_batch_contains_the_images_that_queued_while_the_engine_was_busy() -> None:
    async def scenario() -> None:
        version = FakeModel()
        async with running(max_batch=4) as engine:
            first = await keep_busy(engine, version)
            futures = [engine.submit(CLIENT, version, image(n), soon()) for n in range(6)]
            version.go.set()
            assert numbers(await asyncio.gather(first, *futures)) == [-1, 0, 1, 2, 3, 4, 5]
        assert version.batches == [[-1], [0, 1, 2, 3], [4, 5]]

    asyncio.run(scenario())


def test_batches_are_computed_in_parallel_and_the_rest_queues() -> None:
    async def scenario() -> None:
        slow, quick = FakeModel(1), FakeModel(2)
        quick.go.set()
        async with running(max_batch=4, parallel_batches=2) as engine:
            held = await keep_busy(engine, slow)
            assert numbers([await engine.submit(CLIENT, quick, image(7), soon())]) == [7]
            assert not held.done()
            slow.go.set()
            await held

    asyncio.run(scenario())


def test_an_idle_engine_computes_a_single_image_immediately() -> None:
    async def scenario() -> None:
        version = FakeModel()
        version.go.set()
        async with running() as engine:
            for n in range(3):
                assert numbers([await engine.submit(CLIENT, version, image(n), soon())]) == [n]
        assert version.batches == [[0], [1], [2]]

    asyncio.run(scenario())


def test_images_of_two_models_never_share_a_batch_and_keep_their_order() -> None:
    async def scenario() -> None:
        old, new = FakeModel(1), FakeModel(2)
        new.go.set()
        async with running(max_batch=8) as engine:
            await keep_busy(engine, old)
            futures = [engine.submit(CLIENT, new if n % 3 == 2 else old, image(n), soon()) for n in range(6)]
            old.go.set()
            assert numbers(await asyncio.gather(*futures)) == [0, 1, 2, 3, 4, 5]
        assert old.batches == [[-1], [0, 1], [3, 4]]
        assert new.batches == [[2], [5]]

    asyncio.run(scenario())


def test_a_client_does_not_wait_for_one_that_sends_far_more() -> None:
    async def scenario() -> None:
        pinned, current = FakeModel(1), FakeModel(2)
        current.go.set()
        async with running(max_batch=4, parallel_batches=1) as engine:
            for client in (CLIENT, *["flood"] * 9):
                await engine.decode(client, EmptyModel(ImageLimits()), png(64, 64))
            many = [engine.submit("flood", pinned, image(n), soon()) for n in range(9)]
            while not pinned.entered.is_set():
                await asyncio.sleep(0.001)
            assert numbers([await engine.submit(CLIENT, current, image(7), soon())]) == [7]
            assert not any(future.done() for future in many)
            pinned.go.set()
            assert numbers(await asyncio.gather(*many)) == list(range(9))

    asyncio.run(scenario())


def test_cancelled_and_expired_images_are_not_computed() -> None:
    async def scenario() -> None:
        version = FakeModel()
        async with running() as engine:
            await keep_busy(engine, version)
            wanted, given_up = (engine.submit(CLIENT, version, image(n), soon()) for n in (1, 2))
            late = engine.submit(CLIENT, version, image(3), time.monotonic() + 0.01)
            given_up.cancel()
            await asyncio.sleep(0.05)
            version.go.set()
            await wanted
            with pytest.raises(DeadlinePassed):
                await late
        assert version.batches == [[-1], [1]]

    asyncio.run(scenario())


def test_a_batch_that_fails_fails_alone() -> None:
    async def scenario() -> None:
        version = FakeModel(fails_on=1)
        async with running(max_batch=2) as engine:
            await keep_busy(engine, version)
            futures = [engine.submit(CLIENT, version, image(n), soon()) for n in range(4)]
            version.go.set()
            results = await asyncio.gather(*futures, return_exceptions=True)
            assert [type(one) for one in results] == [RuntimeError, RuntimeError, Scored, Scored]
            assert numbers([await engine.submit(CLIENT, version, image(9), soon())]) == [9]

    asyncio.run(scenario())


def test_the_event_loop_runs_while_the_engine_computes() -> None:
    async def scenario() -> None:
        version = FakeModel()
        async with running() as engine:
            future = await keep_busy(engine, version)
            ticks = 0
            for _ in range(20):
                await asyncio.sleep(0.001)
                ticks += 1
            assert ticks == 20
            assert not future.done()
            version.go.set()
            await future

    asyncio.run(scenario())


def test_a_model_is_freed_after_its_last_batch() -> None:
    async def scenario() -> None:
        version = FakeModel()
        version.go.set()
        gone = weakref.ref(version)
        async with running() as engine:
            await engine.submit(CLIENT, version, image(0), soon())
            del version
            async with asyncio.timeout(30):
                while gone() is not None:  # the thread of the batch drops its arguments after the answer
                    await asyncio.sleep(0.001)

    asyncio.run(scenario())


@pytest.mark.parametrize(("fails_on", "broken"), [(7.0, False), (0.0, True)], ids=["one image", "every image"])
def test_a_version_is_broken_if_a_blank_image_fails_as_well(
    fails_on: float, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "FIRST_PROBE", 0.01)

    async def scenario() -> None:
        bad, good = FakeModel(1, fails_on=fails_on), FakeModel(2)
        bad.go.set()
        good.go.set()
        async with running(max_batch=1) as engine:
            for _ in range(3):
                with pytest.raises(RuntimeError):
                    await engine.submit(CLIENT, bad, image(fails_on), soon())
            await engine.submit(CLIENT, good, image(1), soon())
            while bad.batches[-1:] != [[0.0]] or len(bad.batches) < 4:  # the probe
                await asyncio.sleep(0.01)
            while not engine.broken if broken else engine._probes:
                await asyncio.sleep(0.01)
            assert engine.broken == ({1: "out of memory"} if broken else {})
            bad.fails_on = None
            while engine.broken:
                await asyncio.sleep(0.01)

    asyncio.run(scenario())


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["wanted", "cancelled", "late"])), max_size=30),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_every_image_gets_its_own_answer(images: list[tuple[int, str]], max_batch: int, parallel_batches: int) -> None:
    async def scenario() -> None:
        versions = {number: FakeModel(number) for number in (1, 2, 3)}
        async with running(max_batch, parallel_batches) as engine:
            await keep_busy(engine, versions[1])
            futures = []
            for n, (number, fate) in enumerate(images):
                deadline = time.monotonic() - 1 if fate == "late" else soon()
                futures.append(engine.submit(CLIENT, versions[number], image(n), deadline))
                if fate == "cancelled":
                    futures[-1].cancel()
            for version in versions.values():
                version.go.set()
            results = await asyncio.gather(*futures, return_exceptions=True)
        for n, ((_, fate), result) in enumerate(zip(images, results, strict=True)):
            expected = {"cancelled": asyncio.CancelledError, "late": DeadlinePassed, "wanted": Scored}[fate]
            assert isinstance(result, expected)
            if isinstance(result, Scored):
                assert numbers([result]) == [n]
        computed = [n for version in versions.values() for batch in version.batches for n in batch if n >= 0]
        assert sorted(computed) == [n for n, (_, fate) in enumerate(images) if fate == "wanted"]
        assert all(len(batch) <= max_batch for version in versions.values() for batch in version.batches)

    asyncio.run(scenario())


class HeldModel(EmptyModel):
    """Decodes images that are not small once `go` is set."""

    def __init__(self) -> None:
        super().__init__(ImageLimits())
        self.entered, self.go = asyncio.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()

    def decode(self, data: bytes, small_only: bool = False) -> Array:
        if not small_only:
            self._loop.call_soon_threadsafe(self.entered.set)
            assert self.go.wait(60)
        return super().decode(data, small_only)


def test_a_small_image_does_not_wait_for_a_large_one() -> None:
    large, small = png(7000, 7000), png(64, 64)

    async def decode_both() -> None:
        model = HeldModel()
        async with running() as engine:  # with one thread that decodes
            slow = asyncio.create_task(engine.decode(CLIENT, model, large))
            await asyncio.wait_for(model.entered.wait(), 30)
            await asyncio.wait_for(engine.decode(CLIENT, model, small), 30)
            assert not slow.done()
            model.go.set()
            await slow

    asyncio.run(decode_both())
