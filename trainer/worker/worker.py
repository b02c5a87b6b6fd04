"""The worker: claims tasks from the queue one after another, learns each, and records its result.

**A task that this process has claimed ends as one version, or as one rejection or failure with its reason, or returns
to the queue. If the process is killed, another worker resumes after the last finished epoch.**

A background thread renews the lease, because an epoch may take longer than a lease. After every unit of work that the
learner reports, the worker checks whether to go on: told to stop, or if the task is to be cancelled, it hands the task
back; if it has lost the lease, it drops the task, because another worker has it.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Self

from models.backoff import Backoff
from models.errors import OpenWorldError, StoreError
from models.versions.store import VersionStore
from tasks.batch import LabelledBatch, LabelledImage
from tasks.errors import BatchError, LeaseLost, QueueUnavailable
from tasks.images import ImageStore
from tasks.queue import Lease, Task, TaskProgress, TaskQueue
from trainer.learning.progress import Event
from trainer.learning.settings import LearnerSettings
from trainer.publish import learn_batch
from trainer.worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.5  # between two progress reports to Redis
RENEWALS_PER_LEASE = 3
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0  # seconds between attempts to reach the queue

Report = Callable[[], Task]  # records the end of a task in the queue


class _Interrupted(BaseException):
    """Leaves the learner without its rollback, so that the next attempt resumes from the checkpoint.

    Like KeyboardInterrupt, it is not an Exception.
    """


class _LeaseGone(_Interrupted):
    """Another worker holds the task."""


class Worker:
    """Learns one task at a time."""

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
        """Make `run` return after the current unit of work. Safe to call from a signal handler."""
        self._stopping.set()

    def run(self) -> None:
        """Work on tasks until `stop` is called."""
        log.info("waiting for tasks")
        with suppress(StoreError):  # show the metrics of the current version again after a restart
            if (current := VersionStore(self._root).current_manifest()) is not None:
                self._metrics.update_version(current)
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while not self._stopping.is_set():
            try:
                self._metrics.update_queue(self._queue)
                lease = self._queue.claim(self._name, block_seconds=1.0)
                backoff.reset()
            except QueueUnavailable as error:
                pause = backoff.next()
                log.warning("%s; trying again in %.0f s", error, pause)
                self._stopping.wait(pause)
                continue
            if lease is not None:
                self.work(lease)

    def work(self, lease: Lease) -> None:
        """Learn one task and record its result in the queue."""
        task = lease.task
        log.info("learning task %s: %s (attempt %d)", task.id, ", ".join(task.classes), task.attempts)
        started = time.monotonic()
        try:
            with _LeaseKeeper(lease, self._queue, self._metrics, self._stopping) as keeper:
                report = self._learn(lease, keeper.on_event)
        except _LeaseGone:
            log.warning("another worker took over task %s; dropping it here", task.id)
            return
        except _Interrupted:
            log.info("handing task %s back to the queue", task.id)
            report = lease.hand_back
        ended = self._report(task, report)
        self._metrics.task_finished(time.monotonic() - started)
        if ended is not None and ended.state == "queued" and ended.reason:
            self._stopping.wait(FIRST_PAUSE * task.attempts)  # it failed and was requeued: the cause may pass

    def _learn(self, lease: Lease, on_event: Callable[[Event], None]) -> Report:
        try:
            outcome = learn_batch(
                self._root,
                self._batch(lease.task),
                self._settings,
                on_event,
                images_stored=True,
                lock_timeout=0.0 if lease.delivery > 1 else self._queue.lease_seconds,
            )
        except BatchError as error:
            return self._failure(lease, "; ".join(error.problems), retry=False)
        except OpenWorldError as error:
            return self._failure(lease, str(error), retry=True)
        except Exception as error:
            log.exception("task %s failed", lease.task.id)
            return self._failure(lease, f"{type(error).__name__}: {error}", retry=True)
        manifest = outcome.manifest
        self._metrics.update_version(manifest)
        metrics = manifest.metrics
        result = {
            "tasks": metrics.get("tasks", []),
            "capacity": metrics.get("capacity", {}),
            "advice": metrics.get("advice"),
        }
        if outcome.state == "rejected":
            reason = "; ".join(outcome.verdict.reasons) if outcome.verdict else "rejected"
            log.warning("task %s rejected: %s", lease.task.id, reason)
            return lambda: lease.reject(reason, result)
        log.info("task %s is version %d (%s)", lease.task.id, manifest.version, outcome.state)
        self._announce(manifest.version)
        return lambda: lease.publish(manifest.version, result)

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

    def _failure(self, lease: Lease, reason: str, retry: bool) -> Report:
        version = VersionStore(self._root).find_task(lease.task.id)
        if version is None:
            return lambda: lease.fail(reason, retry=retry)
        # The version was published before the error: the task is learned.
        log.warning("task %s is version %d, but an error followed: %s", lease.task.id, version, reason)
        return lambda: lease.publish(version)

    def _report(self, task: Task, report: Report) -> Task | None:
        """Retry until the queue has the result; None if the lease is lost or the worker stops."""
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            try:
                ended = report()
                log.info("task %s: %s%s", task.id, ended.state, f" ({ended.reason})" if ended.reason else "")
                return ended
            except LeaseLost as error:
                log.warning("%s", error)
                return None
            except QueueUnavailable as error:
                pause = backoff.next()
                log.warning("%s; trying again in %.0f s", error, pause)
                if self._stopping.wait(pause):
                    return None  # the next worker finds the version or the checkpoint


class _LeaseKeeper:
    """Renews the lease in a thread, reports the learner's progress, and interrupts the learner when it must stop."""

    def __init__(self, lease: Lease, queue: TaskQueue, metrics: WorkerMetrics, stopping: threading.Event) -> None:
        self._lease, self._queue, self._metrics, self._stopping = lease, queue, metrics, stopping
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._done, self._cancel_requested, self._lost = threading.Event(), threading.Event(), threading.Event()
        self._reported = 0.0
        self._losses: list[float] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def on_event(self, event: Event) -> None:
        """Called by the learner after each unit of work."""
        if event.loss is not None:
            self._losses.append(event.loss)
        self._metrics.progress.set(event.progress)
        if time.monotonic() - self._reported >= REPORT_SECONDS or event.progress >= 1:
            self._reported = time.monotonic()
            self._call_queue(lambda: self._record(event))
        if self._lost.is_set():
            raise _LeaseGone
        if self._cancel_requested.is_set() or self._stopping.is_set():
            raise _Interrupted

    def _record(self, event: Event) -> bool:
        fields = {name: value for name, value in asdict(event).items() if name != "task"}
        progress = TaskProgress(**fields, losses=tuple(self._losses))
        return self._lease.progress(progress, "evaluating" if event.phase == "evaluating" else "learning")

    def _renew(self) -> None:
        while not self._done.wait(self._queue.lease_seconds / RENEWALS_PER_LEASE):
            self._call_queue(self._lease.renew)
            self._call_queue(lambda: self._metrics.update_queue(self._queue))

    def _call_queue(self, operation: Callable[[], bool | None]) -> None:
        """`operation` returns True if the task is to be cancelled."""
        try:
            if operation():
                self._cancel_requested.set()
        except LeaseLost:
            self._lost.set()
        except QueueUnavailable as error:
            log.warning("%s", error)  # keep learning: if the lease expires, a later call raises LeaseLost
