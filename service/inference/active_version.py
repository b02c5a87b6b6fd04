"""Which version answers: noticed, verified, loaded and warmed beside the running one, then swapped by one reference.

**Whatever lies in the data folder, the version that answers goes on answering until a better one is ready.** One that
cannot be loaded is remembered with its reason and tried again with back-off. The old version is freed by its last
batch: nobody else holds a reference to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from weakref import WeakSet

import numpy as np

from models.backoff import Backoff
from models.errors import CorruptVersion, Damage
from models.files import sha256_bytes
from models.images import ImageLimits
from models.inference.predictor import Predictor
from models.inference.runtime import Runtime, RuntimeCache
from models.versions.backbone_spec import recorded_backbone
from models.versions.store import By, VersionStore
from service.errors import NotFound, NotReady, VersionUnusable
from service.inference.metrics import Metrics
from service.inference.servable import EmptyModel, ServableModel

log = logging.getLogger(__name__)

FIRST_RETRY, LONGEST_RETRY = 1.0, 60.0


@dataclass(frozen=True)
class LoadFailure:
    """Why a version does not answer, and when it is tried again."""

    version: int | None  # None: CURRENT itself cannot be read
    damage: Damage
    reason: str
    attempts: int
    since: datetime
    next_try: datetime


class ActiveVersion:
    """The versions of one data folder, as far as they are loaded. Lives on the event loop; loads in threads."""

    def __init__(
        self,
        store: VersionStore,
        runtimes: RuntimeCache,
        limits: ImageLimits,
        metrics: Metrics,
        *,
        poll_seconds: float,
        pinned: int = 2,
        largest_batch: int,
    ) -> None:
        self.store = store
        self.model: ServableModel = EmptyModel(limits)
        self.failure: LoadFailure | None = None
        self._backoff = Backoff(FIRST_RETRY, LONGEST_RETRY)
        self.since = datetime.now(UTC)
        self._looked = False  # once at the data folder, whatever was found there
        self._runtimes, self._limits, self._metrics = runtimes, limits, metrics
        self._poll_seconds, self._largest_batch = poll_seconds, largest_batch
        self._warm: WeakSet[Runtime] = WeakSet()  # runtimes that have seen every size
        self._pinned: OrderedDict[int, ServableModel] = OrderedDict()
        self._max_pinned = pinned
        self._loading = asyncio.Lock()
        self._look = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    # Noticing

    async def start(self) -> None:
        """Load what is current, and watch for what comes after it."""
        self._metrics.serving(0, "")
        if await self._refresh() is not None:
            await self._fall_back()
        self._looked = True
        self._watcher = asyncio.create_task(self._watch(), name="versions")

    @property
    def usable(self) -> bool:
        """Something answers; `novel` to everything is an answer only where nothing has been learned."""
        return self._looked and not (self.failure is not None and self.model.version == 0)

    async def stop(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    def wake(self) -> None:
        """Somebody says that there is something new."""
        self._look.set()

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), self._wait())
            self._look.clear()
            await self._refresh()

    def _wait(self) -> float:
        if self.failure is None:
            return self._poll_seconds
        left = (self.failure.next_try - datetime.now(UTC)).total_seconds()
        return min(self._poll_seconds, max(left, 0.05))

    async def _refresh(self, requested: bool = False) -> LoadFailure | None:
        """Make the current version the one that answers, if it can be loaded; `asked` by people: no back-off."""
        async with self._loading:
            wanted = None
            try:
                wanted = await asyncio.to_thread(self.store.current)
                if wanted is None or wanted == self.model.version:
                    self.failure = None
                elif requested or self._may_try(wanted):
                    self._swap(*await self._open(wanted))
            except Exception as error:  # whatever it is: what answers must go on answering
                self._failed(wanted, error)
            return self.failure

    async def _fall_back(self) -> None:
        """A start beside a damaged version: the last one before it that is whole answers meanwhile."""
        failure = self.failure
        for number in dict.fromkeys(line.version for line in reversed(await asyncio.to_thread(self.store.log))):
            if failure is None or number == failure.version:
                continue
            try:
                self._swap(*await self._open(number))
            except Exception as error:
                self._count(error)
                log.error("version %d cannot be loaded either (%s)", number, error)
            else:
                self.failure = failure
                return

    def _may_try(self, version: int) -> bool:
        failure = self.failure
        return failure is None or failure.version != version or failure.next_try <= datetime.now(UTC)

    def _swap(self, version: ServableModel, sha256: str) -> None:
        before, self.model = self.model, version
        self.failure = None
        self.since = datetime.now(UTC)
        self._pinned.pop(version.version, None)
        self._metrics.swaps.inc()
        self._metrics.serving(version.version, sha256, version.reference_points)
        log.info("version %d answers, in place of %d", version.version, before.version)

    def _failed(self, version: int | None, error: Exception) -> None:
        now = datetime.now(UTC)
        before = self.failure if self.failure is not None and self.failure.version == version else None
        if before is None:
            self._backoff.reset()
        wait = self._backoff.next()
        since, next_try = before.since if before else now, now + timedelta(seconds=wait)
        self.failure = LoadFailure(version, self._count(error), str(error), self._backoff.failures, since, next_try)
        log.error(
            "version %s cannot be loaded (%s); version %d goes on answering; next try in %.0f s",
            version,
            error,
            self.model.version,
            wait,
        )

    def _count(self, error: Exception) -> Damage:
        damage: Damage = error.damage if isinstance(error, CorruptVersion) else "runtime"
        self._metrics.load_failures.labels(damage).inc()
        return damage

    # Loading

    async def _open(self, number: int) -> tuple[ServableModel, str]:
        started = time.monotonic()
        opened = await asyncio.to_thread(self._load, number)
        self._metrics.load_seconds.observe(time.monotonic() - started)
        return opened

    def _load(self, number: int) -> tuple[ServableModel, str]:
        recorded = recorded_backbone(self.store.root)
        loaded = self.store.load(number, expect_backbone=recorded.sha256 if recorded else None)
        predictor = Predictor.from_version(loaded, self._runtimes, self._limits)
        self._warm_up(predictor)
        return predictor, sha256_bytes(loaded.manifest.to_json())

    def _warm_up(self, predictor: Predictor) -> None:
        """The first pass of a size allocates; a robot should not be the one who waits for that."""
        crop = predictor.preprocessing.crop
        grey = np.zeros((3, crop, crop), np.float32)
        sizes = [1]
        if predictor.runtime not in self._warm:
            sizes += predictor.runtime.warm_up_sizes(self._largest_batch)
            self._warm.add(predictor.runtime)
        for size in sizes:
            for alone in (True, False):
                predictor.score([grey] * size, alone)

    async def get(self, number: int | None) -> ServableModel:
        """The version that answers, or one that a request asks for by number."""
        if number is None and not self.usable:
            raise NotReady("no version can be loaded: see GET /versions", 1)
        if number is None or number == self.model.version:
            return self.model
        if number not in self._pinned:
            async with self._loading:
                if number not in self._pinned:
                    await self._pin(number)
        self._pinned.move_to_end(number)
        return self._pinned[number]

    async def _pin(self, number: int) -> None:
        if number not in await asyncio.to_thread(self.store.versions):
            raise NotFound(f"there is no version {number}: see GET /versions")
        try:
            self._pinned[number], _ = await self._open(number)
        except Exception as error:
            self._count(error)
            raise VersionUnusable(f"version {number} cannot be loaded: {error}") from error
        while len(self._pinned) > self._max_pinned:
            self._pinned.popitem(last=False)

    # Switching

    async def refresh(self) -> None:
        """Look now, and come back when what was found answers, or cannot."""
        await self._refresh()

    async def activate(self, number: int, by: By, reason: str, announce: Callable[[int], None]) -> None:
        """Roll back or forward; when this returns, the version answers here."""
        if number not in await asyncio.to_thread(self.store.versions):
            raise NotFound(f"there is no version {number}: see GET /versions")
        await asyncio.to_thread(self.store.activate, number, by, reason)
        failure = await self._refresh(requested=True)
        await asyncio.to_thread(announce, number)
        if failure is not None and failure.version == number:
            raise VersionUnusable(f"version {number} is current, but cannot be loaded here: {failure.reason}")
