"""The model that answers: watches the data folder, loads a new current version in the background, and swaps it in.

**The active version keeps answering until another one is loaded, whatever happens in the data folder.** A version that
cannot be loaded is recorded with the reason and retried with back-off. The replaced version is freed after its last
batch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np

from models.backoff import Backoff
from models.errors import CorruptVersion, Damage, StoreError
from models.files import sha256_bytes
from models.images import ImageLimits
from models.inference.model_cache import ModelCache
from models.inference.predictor import Predictor
from models.inference.runtime import Runtime, RuntimeCache
from models.versions.backbone_spec import recorded_backbone
from models.versions.manifest import Manifest
from models.versions.promotions import Promoter
from models.versions.pruning import drop_discarded_copies
from models.versions.store import VersionStore
from service.errors import NotFound, NotReady, VersionUnusable
from service.inference.metrics import Metrics
from service.inference.pinned_versions import PinnedVersions
from service.inference.servable import EmptyModel, ServableModel
from service.wire.health import Swap
from service.wire.versions import LoadProblem

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_RETRY, LONGEST_RETRY = 1.0, 60.0
KEPT_SWAPS = 64


class ActiveVersion:
    """The active model and the pinned ones. Use it on the event loop; it loads versions in threads."""

    def __init__(
        self,
        store: VersionStore,
        runtimes: RuntimeCache,
        limits: ImageLimits,
        metrics: Metrics,
        *,
        poll_seconds: float,
        max_batch: int,
    ) -> None:
        self.store = store
        self.model: ServableModel = EmptyModel(limits)
        self.since = datetime.now(UTC)
        self.swaps: deque[Swap] = deque(maxlen=KEPT_SWAPS)
        self.failure: LoadProblem | None = None  # why the current version is not the active one
        self._backoff = Backoff(FIRST_RETRY, LONGEST_RETRY)
        self._retry_at = 0.0  # by the monotonic clock; `failure.next_try` is for people
        self._started = False
        self._runtimes, self._limits, self._metrics = runtimes, limits, metrics
        self._models = ModelCache(store)
        self._poll_seconds, self._max_batch = poll_seconds, max_batch
        self._warm: WeakSet[Runtime] = WeakSet()  # runtimes that have computed every batch size
        self._pinned = PinnedVersions(self._load_pinned)
        self._loading = asyncio.Lock()
        # Swaps must not wait for threads that wait for other files.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="versions")
        self._wake = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the current version, or the last one before it that can be loaded; then watch for new ones."""
        self._metrics.set_active_version(0, "")
        if await self.refresh() is not None:
            await self._fall_back()
        self._started = True
        self._watcher = asyncio.create_task(self._watch(), name="versions")

    async def stop(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        self._pinned.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def usable(self) -> bool:
        """Whether there is a model to answer with. The empty model counts only if nothing has been learned."""
        return self._started and not (self.failure is not None and self.model.version == 0)

    def wake(self) -> None:
        """Look for a new current version now."""
        self._wake.set()

    async def get(self, number: int | None) -> ServableModel:
        """The active model, or the model of a version that the request names, which is loaded if necessary."""
        if number is None and not self.usable:
            raise NotReady("no version can be loaded: see GET /versions", 1)
        if number is None or number == self.model.version:
            return self.model
        if number not in self._pinned:
            await self._require(number)
        return await self._pinned.get(number)

    async def activate(
        self, number: int, by: Promoter, reason: str, announce: Callable[[int], None], replacing: int | None = None
    ) -> None:
        """Make a version current, and active here; `announce` must not wait.

        VersionUnusable: it is current, but cannot be loaded here.
        """
        await self._require(number)
        await asyncio.to_thread(self.store.activate, number, by, reason, replacing)
        failure = await self.refresh(requested=True)
        announce(number)
        if failure is not None and failure.version == number:
            raise VersionUnusable(f"version {number} is current, but cannot be loaded here: {failure.reason}")

    async def _require(self, number: int) -> None:
        if number not in await asyncio.to_thread(self.store.versions):
            raise NotFound(f"there is no version {number}: see GET /versions")

    # Swapping

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._pause())
            self._wake.clear()
            await self.refresh()

    def _pause(self) -> float:
        if self.failure is None:
            return self._poll_seconds
        return min(self._poll_seconds, max(self._retry_at - time.monotonic(), 0.05))

    async def refresh(self, requested: bool = False) -> LoadProblem | None:
        """Make the current version active; without back-off if a person requested it. Returns why it is not active."""
        async with self._loading:
            current = None
            try:
                current = await self._in_thread(self.store.current)
                if current is None or current == self.model.version:
                    self.failure = None
                elif requested or self._may_try(current):
                    self._swap(*await self._in_thread(self._load_current, current))
            except Exception as error:  # any error: the active version must keep answering
                self._failed(current, error)
            return self.failure

    def _may_try(self, version: int) -> bool:
        failure = self.failure
        return failure is None or failure.version != version or self._retry_at <= time.monotonic()

    async def _fall_back(self) -> None:
        """Activate the last version before the damaged current one that can be loaded."""
        failure = self.failure
        for number in dict.fromkeys(line.version for line in reversed(await self._in_thread(self.store.log))):
            if failure is None or number == failure.version:
                continue
            try:
                self._swap(*await self._in_thread(self._load, number))
            except Exception as error:
                self._count_failure(error)
                log.error("version %d cannot be loaded either: %s", number, error)
            else:
                self.failure = failure
                return

    def _swap(self, model: ServableModel, manifest: Manifest) -> None:
        before, self.model = self.model, model
        self.failure = None
        self.since = datetime.now(UTC)
        self.swaps.append(Swap(time=self.since, previous=before.version, version=model.version))
        self._pinned.forget(model.version)
        self._metrics.swaps.inc()
        sha256 = sha256_bytes(manifest.to_json())
        self._metrics.set_active_version(model.version, sha256, model.reference_points, manifest)
        log.info("version %d is active, it replaces version %d", model.version, before.version)

    def _failed(self, version: int | None, error: Exception) -> None:
        now = datetime.now(UTC)
        before = self.failure if self.failure is not None and self.failure.version == version else None
        if before is None:
            self._backoff.reset()
        pause = self._backoff.next()
        self._retry_at = time.monotonic() + pause
        self.failure = LoadProblem(
            version=version,  # None: CURRENT itself cannot be read
            code=self._count_failure(error),
            reason=str(error),
            attempts=self._backoff.failures,
            since=before.since if before else now,
            next_try=now + timedelta(seconds=pause),
        )
        log.error(
            "version %s cannot be loaded (%s), version %d stays active, next try in %.0f s",
            *(version, error, self.model.version, pause),
        )

    def _count_failure(self, error: Exception) -> Damage:
        damage: Damage = error.damage if isinstance(error, CorruptVersion) else "runtime"
        self._metrics.load_failures.labels(damage).inc()
        return damage

    # Loading

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _load_pinned(self, number: int) -> ServableModel:
        try:
            return self._load(number)[0]
        except Exception as error:
            self._count_failure(error)
            raise

    def _load_current(self, number: int) -> tuple[ServableModel, Manifest]:
        """The version that was current, or the one that has replaced it since. Call it in a thread."""
        while True:
            try:
                loaded = self._load(number)
                break
            except CorruptVersion as error:
                if not self.store.is_superseded(number, error):
                    raise
                number = self.store.current() or number
        if loaded[1].keep == "statistics":
            with suppress(OSError, StoreError):  # of an object store; tried again with the next version
                drop_discarded_copies(self.store)
        return loaded

    def _load(self, number: int) -> tuple[ServableModel, Manifest]:
        """The model of a version, warmed up, and its manifest. Call it in a thread."""
        started = time.monotonic()
        recorded = recorded_backbone(self.store.storage)
        loaded = self._models.load(number, expect_backbone=recorded.sha256 if recorded else None)
        predictor = Predictor.from_version(loaded, self._runtimes, self._limits)
        self._warm_up(predictor)
        self._metrics.load_seconds.observe(time.monotonic() - started)
        return predictor, loaded.manifest

    def _warm_up(self, predictor: Predictor) -> None:
        """Compute every batch size once: the first pass of a size allocates memory, which is slow."""
        crop = predictor.preprocessing.crop
        # Not numbers: whatever the model, the frozen evidence is not sure of such an image, so that networks run.
        pixels = np.full((3, crop, crop), np.nan, np.float32)
        sizes = [1]
        if predictor.runtime not in self._warm:
            sizes += predictor.runtime.warm_up_sizes(self._max_batch)
            self._warm.add(predictor.runtime)
        for size in sizes:
            for all_threads in (True, False):
                predictor.score([pixels] * size, all_threads)
