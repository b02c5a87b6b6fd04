"""The worker: takes tasks from the queue one after the other, learns each, and says what became of it.

**A task that this process has claimed ends as one version, as one rejection or failure with its reason, or goes back
to the queue; killed at any moment, another worker goes on from the last finished epoch.**

The lease is renewed by a thread of its own, because an epoch may take longer than a lease. Whether to go on is asked
at the end of every unit of work that the learner reports: a worker that was told to stop hands its task back, one
whose task was cancelled drops it, and one that has lost its lease stops at once, for somebody else has the task.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from models.backoff import Backoff
from models.errors import OpenWorldError, StoreError
from models.versions.store import VersionStore
from tasks.batch.check import LabelledBatch, LabelledImage
from tasks.errors import BatchError, LeaseLost, QueueUnavailable
from tasks.images import ImageStore
from tasks.queue import Lease, Task, TaskProgress, TaskQueue
from trainer.learning.progress import Event
from trainer.learning.settings import LearnerSettings
from trainer.publish import Outcome, learn_batch
from trainer.worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)

REPORT_EVERY = 0.5  # seconds between two progress reports to Redis
RENEWALS = 3  # in the time of one lease
PAUSE = 1.0  # seconds before asking an unreachable queue again
SLOWEST_PAUSE = 15.0


class _Stop(BaseException):
    """Leave the learner without its clean-up: the epochs so far are what the next attempt goes on from.

    Like KeyboardInterrupt not an Exception, for the same reason.
    """


class _Cancelled(_Stop):
    """Somebody does not want this task any more."""


class _Lost(_Stop):
    """Somebody else has this task by now."""


class Worker:
    """One process, one task at a time."""

    def __init__(
        self,
        root: Path,
        queue: TaskQueue,
        settings: LearnerSettings,
        name: str,
        metrics: WorkerMetrics,
        announce: Callable[[int], None] = lambda version: None,
    ) -> None:
        self._root, self._queue, self._settings, self._name = root, queue, settings, name
        self._metrics, self._announce = metrics, announce
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End after the unit of work at hand; from a signal handler, too."""
        self._stopping.set()

    def run(self) -> None:
        """Until told to stop."""
        log.info("waiting for tasks")
        self._show_current()
        backoff = Backoff(PAUSE, SLOWEST_PAUSE)
        while not self._stopping.is_set():
            try:
                self._metrics.watch(self._queue)
                lease = self._queue.claim(self._name, block_seconds=1.0)
                backoff.reset()
            except QueueUnavailable as error:
                pause = backoff.next()
                log.warning("%s; trying again in %.0f s", error, pause)
                self._stopping.wait(pause)
                continue
            if lease is not None:
                self.work(lease)

    def _show_current(self) -> None:
        """What the last version can do, so that dashboards know it again after a restart."""
        with suppress(StoreError):
            if (current := VersionStore(self._root).current_manifest()) is not None:
                self._metrics.learned(current)

    def work(self, lease: Lease) -> None:
        """Learn one task and tell the queue."""
        task = lease.task
        log.info("learning task %s: %s (attempt %d)", task.id, ", ".join(task.classes), task.attempts)
        started = time.monotonic()
        try:
            with self._renewing(lease) as watch:
                end = self._learn(lease, watch)
        except _Lost:
            log.warning("another worker has task %s by now; dropping it here", task.id)
            return
        except _Cancelled:
            end = lease.hand_back  # ends as cancelled, unless the request was withdrawn
        except _Stop:
            log.info("handing task %s back", task.id)
            end = lease.hand_back
        told = self._tell(task, end)
        self._metrics.finished(time.monotonic() - started)
        if told is not None and told.state == "queued" and told.reason:
            self._stopping.wait(PAUSE * task.attempts)  # what failed a moment ago fails again: give it time to mend

    def _learn(self, lease: Lease, watch: _Watch) -> Callable[[], Task]:
        """What to tell the queue in the end."""
        try:
            batch = self._batch(lease.task)
            lock_timeout = 0.0 if lease.delivery > 1 else self._queue.lease_seconds
            outcome = learn_batch(
                self._root, batch, self._settings, watch.heard, images_stored=True, lock_timeout=lock_timeout
            )
        except BatchError as error:
            problems = "; ".join(error.problems)
            return self._failed(lease, problems, retry=False)
        except OpenWorldError as error:
            return self._failed(lease, str(error), retry=True)
        except Exception as error:
            log.exception("task %s failed", lease.task.id)
            return self._failed(lease, f"{type(error).__name__}: {error}", retry=True)
        return self._ending(lease, outcome)

    def _failed(self, lease: Lease, reason: str, retry: bool) -> Callable[[], Task]:
        """Unless the version is there all the same: what failed then came after it, and the task is learned."""
        version = VersionStore(self._root).find_task(lease.task.id)
        if version is None:
            return lambda: lease.fail(reason, retry=retry)
        log.warning("task %s is version %d, but then: %s", lease.task.id, version, reason)
        return lambda: lease.publish(version)

    def _ending(self, lease: Lease, outcome: Outcome) -> Callable[[], Task]:
        result = _result(outcome)
        self._metrics.learned(outcome.manifest)
        if outcome.state == "rejected":
            reason = "; ".join(outcome.verdict.reasons) if outcome.verdict else "rejected"
            log.warning("task %s rejected: %s", lease.task.id, reason)
            return lambda: lease.reject(reason, result)
        version = outcome.manifest.version
        log.info("task %s is version %d (%s)", lease.task.id, version, outcome.state)
        self._announce(version)
        return lambda: lease.publish(version, result)

    def _tell(self, task: Task, end: Callable[[], Task]) -> Task | None:
        """Until the queue knows: the version is there, and only the record of it is missing."""
        backoff = Backoff(PAUSE, SLOWEST_PAUSE)
        while True:
            try:
                ended = end()
                log.info("task %s: %s%s", task.id, ended.state, f" ({ended.reason})" if ended.reason else "")
                return ended
            except LeaseLost as error:
                log.warning("%s", error)
                return None
            except QueueUnavailable as error:
                pause = backoff.next()
                log.warning("%s; trying again in %.0f s", error, pause)
                if self._stopping.wait(pause):
                    return None  # who takes it over finds the version, or the checkpoint

    def _batch(self, task: Task) -> LabelledBatch:
        images = tuple(
            LabelledImage(sha, name, f"image {sha[:12]}")
            for name, keys in sorted(task.classes.items())
            for sha in sorted(keys)
        )
        batch = LabelledBatch(images, ImageStore(self._root).read, task.duplicates)
        if batch.sha256 != task.batch_sha256:
            raise StoreError(f"the images of task {task.id} are not those that were submitted: submit the batch again")
        return batch

    @contextmanager
    def _renewing(self, lease: Lease) -> Iterator[_Watch]:
        watch = _Watch(lease, self._stopping, self._metrics, self._queue)
        thread = threading.Thread(target=watch.renew, args=(self._queue.lease_seconds / RENEWALS,), daemon=True)
        thread.start()
        try:
            yield watch
        finally:
            watch.done.set()
            thread.join()


class _Watch:
    """Between the learner, the lease and the signals: renews, reports, and stops the learner when it must."""

    def __init__(self, lease: Lease, stopping: threading.Event, metrics: WorkerMetrics, queue: TaskQueue) -> None:
        self._lease, self._stopping, self._metrics, self._queue = lease, stopping, metrics, queue
        self.done = threading.Event()
        self._cancelled, self._lost = threading.Event(), threading.Event()
        self._reported = 0.0
        self._losses: list[float] = []

    def renew(self, every: float) -> None:
        """In a thread of its own, because an epoch may be longer than a lease."""
        while not self.done.wait(every):
            self._ask(self._lease.renew)
            self._ask(self._count)

    def _count(self) -> bool:
        """What waits grows meanwhile, and the task at hand gets older: that is how a stalled queue is noticed."""
        self._metrics.watch(self._queue)
        return False

    def heard(self, event: Event) -> None:
        """The learner has finished a unit of work."""
        if event.loss is not None:
            self._losses.append(event.loss)
        self._metrics.progress.set(event.progress)
        if time.monotonic() - self._reported >= REPORT_EVERY or event.progress >= 1:
            self._reported = time.monotonic()
            self._ask(lambda: self._report(event))
        if self._lost.is_set():
            raise _Lost
        if self._cancelled.is_set():
            raise _Cancelled
        if self._stopping.is_set():
            raise _Stop

    def _report(self, event: Event) -> bool:
        progress = TaskProgress(
            phase=event.phase,
            epoch=event.epoch,
            epochs=event.epochs,
            loss=event.loss,
            progress=event.progress,
            seconds_left=event.seconds_left,
            losses=tuple(self._losses),
        )
        return self._lease.progress(progress, "evaluating" if event.phase == "evaluating" else "learning")

    def _ask(self, question: Callable[[], bool]) -> None:
        try:
            if question():
                self._cancelled.set()
        except LeaseLost:
            self._lost.set()
        except QueueUnavailable as error:
            # The lease may lapse meanwhile; then the next answer says so. Until then the work is worth going on with.
            log.warning("%s", error)


def _result(outcome: Outcome) -> dict[str, Any]:
    manifest = outcome.manifest
    return {"tasks": manifest.metrics.get("tasks", []), "capacity": manifest.metrics.get("capacity", {})}
