"""The worker: claims tasks from the queue one after another, learns each, and records its result.

**A task that this process has claimed ends as one version, or as one rejection or failure with its reason, or returns
to the queue. If the process is killed, another worker resumes after the last finished epoch.**

**Learning goes on while Redis does not answer**: a background thread talks to the queue (`lease_keeper`).
"""

import gc
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from models.backoff import Backoff
from models.errors import KeepError, OpenWorldError, StoreError
from models.files import is_full
from models.storage import DataFolder, Storage, is_unavailable, storage_of
from models.versions.keep import recorded_keep
from models.versions.pruning import discard_sums, drop_discarded_copies
from models.versions.store import VersionStore
from tasks.discarding import discard_ended, discard_task
from tasks.errors import BatchError, LeaseLost, QueueUnavailable, UnknownTask
from tasks.images import ErasureFollower, erase_copies, erased_images
from tasks.queue import Lease, Task, TaskQueue
from trainer.context import prepare_backbone
from trainer.data_folder import Turn, training_lock
from trainer.learning.checkpoint import checkpointed_tasks, remove_checkpoint
from trainer.learning.progress import Event
from trainer.learning.settings import LearnerSettings
from trainer.parent import Submission
from trainer.provisional import Dropped
from trainer.publish import RefinementDropped, learn_batch
from trainer.worker.lease_keeper import Interrupted, LeaseGone, LeaseKeeper
from trainer.worker.metrics import WorkerMetrics
from trainer.worker.pending import PendingTasks, submission_of, submissions_of

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0  # seconds between attempts to reach the queue
DISCARD_SECONDS = 60.0  # between two searches for images of ended tasks, in a folder that does not keep images
PAUSED_SECONDS = 1.0  # between two looks at the queue while refinement is paused

Report = Callable[[], Task]  # records the end of a task in the queue


class _CannotWrite(Interrupted):
    """The task waits until there is space, or the object store answers: that is no failed attempt."""


class Worker:
    """Learns one task at a time."""

    def __init__(
        self,
        folder: DataFolder,
        queue: TaskQueue,
        settings: LearnerSettings,
        name: str,
        metrics: WorkerMetrics,
        announce: Callable[[int], None] = lambda version: None,
        *,
        provisional: bool = True,
    ) -> None:
        self._storage, self._queue, self._settings, self._name = storage_of(folder), queue, settings, name
        self._metrics, self._announce = metrics, announce
        self._provisional = provisional and settings.weighs_frozen_evidence
        self._pending = PendingTasks(self._storage, queue, settings, announce)
        self._discarded = _Discarded(self._storage, queue)
        self._disk_backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self._stopping = threading.Event()
        self._preparing: int | None = None  # the thread that exports the backbone, which has no units of work

    def stop(self) -> None:
        """Make `run` return after the current unit of work. Safe to call from a signal handler."""
        self._stopping.set()
        if self._preparing == threading.get_ident():
            raise Interrupted

    def run(self) -> None:
        """Work on tasks until `stop` is called."""
        log.info("waiting for tasks")
        with suppress(StoreError):  # show the metrics of the current version again after a restart
            if (current := VersionStore(self._storage).current_manifest()) is not None:
                self._metrics.update_version(current)
        gc.freeze()  # the objects of libraries, half a million: to look at them again and again takes 0.1 s each time
        backoff, prepared = Backoff(FIRST_PAUSE, LONGEST_PAUSE), False
        erasures = _RemoteErasures(self._storage)
        while not self._stopping.is_set():
            self._metrics.beat()
            erasures.apply()
            try:
                self._metrics.update_queue(self._queue)
                self._pending.drop_ended()
                self._discarded.search()
                lease = None
                if self._queue.paused:
                    if self._provisional:
                        self._pending.publish_waiting()
                    self._stopping.wait(PAUSED_SECONDS)
                else:
                    lease = self._queue.claim(self._name, block_seconds=1.0)
                backoff.reset()
            except QueueUnavailable as error:
                pause = backoff.next()
                log.warning("%s; trying again in %.0f s", error, pause)
                self._stopping.wait(pause)
                continue
            if lease is not None:
                self.work(lease)
            elif not prepared:
                prepared = True
                self._prepare()

    def _prepare(self) -> None:
        """While no task waits, do for a new data folder what its first task would wait for."""
        try:
            store = VersionStore(self._storage)
            if store.current() is not None:
                return
            log.info("exporting the backbone for the first task")
            self._preparing = threading.get_ident()
            prepare_backbone(store, self._settings)
            log.info("ready for the first task")
        except OpenWorldError as error:
            log.error("no task can be learned now: %s", error)
        except Interrupted:
            log.info("stopping before the backbone was exported")
        except Exception:  # the first task reports it, with its reason
            log.exception("the backbone cannot be exported before the first task")
        finally:
            self._preparing = None

    def work(self, lease: Lease) -> None:
        """Learn one task and record its result in the queue."""
        task = lease.task
        log.info("learning task %s: %s (attempt %d)", task.id, ", ".join(task.classes), task.attempts)
        started, since, pause = time.monotonic(), time.time(), 0.0
        try:
            with LeaseKeeper(lease, self._queue, self._metrics, self._stopping) as keeper:
                report = self._learn(lease, keeper)
        except LeaseGone:
            log.warning("another worker took over task %s; dropping it here", task.id)
            return
        except _CannotWrite as error:
            reason = "the data folder is full or read-only" if is_full(error) else "the object store does not answer"
            log.error("task %s waits, %s: %s", task.id, reason, error)
            report, pause = lease.hand_back, self._disk_backoff.next()
        except Interrupted:
            log.info("handing task %s back to the queue", task.id)
            report = lease.hand_back
        gone = False
        if self._is_learned(task):  # before the report: when people read that it is published, its images are gone
            gone = self._discarded.discard(task, since)
        ended = self._report(task, report)
        if ended is not None and ended.ended and not gone:
            self._discarded.discard(task, since)
        self._metrics.task_finished(time.monotonic() - started)
        if ended is not None and ended.state == "published":
            self._sweep()
        if ended is not None and ended.state == "queued" and ended.reason:
            pause = FIRST_PAUSE * task.attempts  # it failed and was requeued: the cause may pass
        self._stopping.wait(pause)

    def _learn(self, lease: Lease, keeper: LeaseKeeper) -> Report:
        def on_event(event: Event) -> None:
            keeper.on_event(event)
            with suppress(QueueUnavailable):  # the keeper reports it
                self._discarded.search()  # `claim` may have ended a task, and a training takes hours

        dropped: dict[str, Dropped] = {}

        def on_dropped(one: Dropped) -> None:
            dropped[one.task_id] = one
            self._announce(one.version)

        with suppress(QueueUnavailable):
            self._pending.drop_ended()  # `claim` may have ended a task, and a training takes hours
        waiting = Event(lease.task.id, "waiting for another training", 0, 0, None, 0.0, None)
        try:
            outcome = learn_batch(
                self._storage,
                submission_of(self._storage, lease.task).batch,
                self._settings,
                on_event,
                images_stored=True,
                submission=lease.task.submission,
                submitted_at=lease.task.submitted_at,
                turn=Turn(self._queue.prefix, self._queue.lease_seconds, lambda: on_event(waiting)),
                provisional=self._provisional,
                waiting=lambda: submissions_of(self._storage, keeper.waiting),
                on_provisional=partial(self._on_provisional, keeper),
                cancelled=keeper.cancelled,
                on_dropped=on_dropped,
            )
        except BatchError as error:
            return self._failure(lease, "; ".join(error.problems), retry=False)
        except RefinementDropped as error:
            return self._failure(lease, str(error), retry=False)
        except Exception as error:
            if is_full(error) or is_unavailable(error):
                raise _CannotWrite(str(error)) from error
            if isinstance(error, OpenWorldError):
                return self._failure(lease, str(error), retry=True)
            log.exception("task %s failed", lease.task.id)
            return self._failure(lease, f"{type(error).__name__}: {error}", retry=True)
        self._disk_backoff.reset()
        manifest = outcome.manifest
        self._metrics.update_version(manifest)
        metrics = manifest.metrics
        result = {
            "tasks": metrics.get("tasks", []),
            "classes": len(manifest.classes),
            "accuracy": metrics.get("accuracy"),
            "novelty_auc": metrics.get("novelty_auc"),
            "capacity": metrics.get("capacity", {}),
            "advice": metrics.get("advice"),
            "stage": "provisional" if outcome.state == "provisional" else "refined",
        }
        reason = "; ".join(outcome.verdict.reasons) if outcome.verdict else ""
        if outcome.state == "rejected":
            if lease.task.id in dropped:
                reason = f"{reason}; {dropped[lease.task.id].note}"
            log.warning("task %s rejected: %s", lease.task.id, reason)
            return lambda: lease.reject(reason, result)
        if outcome.state == "provisional":
            log.warning("task %s stays provisional: %s", lease.task.id, reason)
            return lambda: lease.publish(manifest.version, result, reason)
        log.info("task %s is version %d (%s)", lease.task.id, manifest.version, outcome.state)
        self._announce(manifest.version)
        return lambda: lease.publish(manifest.version, result)

    def _on_provisional(self, keeper: LeaseKeeper, submission: Submission, version: int) -> None:
        keeper.unrecorded.append((submission.task_id, version, submission.id))
        self._announce(version)

    def _is_learned(self, task: Task) -> bool:
        with suppress(StoreError):
            return VersionStore(self._storage).find_task(task.id, task.submission) is not None
        return False

    def _sweep(self) -> None:
        """Remove the checkpoints of ended tasks of this queue; others belong to `openworld learn` or another queue.

        Call it after a version was published: until then a rejected, failed or cancelled task could resume from there.
        """
        with suppress(OSError, StoreError, QueueUnavailable), training_lock(self._storage):
            for task_id in checkpointed_tasks(self._storage):
                with suppress(UnknownTask):
                    if self._queue.get(task_id).ended:
                        remove_checkpoint(self._storage, task_id)

    def _failure(self, lease: Lease, reason: str, retry: bool) -> Report:
        version = VersionStore(self._storage).find_task(lease.task.id, lease.task.submission)
        if version is None:
            return lambda: lease.fail(reason, retry=retry)
        # The version was published before the error: the task is learned.
        log.warning("task %s is version %d, but an error followed: %s", lease.task.id, version, reason)
        return lambda: lease.publish(version)

    def _report(self, task: Task, report: Report) -> Task | None:
        """Retry until the queue has the result; None if the lease is lost or the worker stops."""
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            self._metrics.beat()
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


class _Discarded:
    """Discards the images of ended tasks, in a data folder that does not keep images."""

    def __init__(self, storage: Storage, queue: TaskQueue) -> None:
        self._store, self._queue = VersionStore(storage), queue
        self._next = 0.0  # search, by the monotonic clock

    def discard(self, task: Task, since: float) -> bool:
        """Those of one task, unless they were stored again after `since`. False: they remain until `search`."""
        try:
            if recorded_keep(self._store.storage) != "images":
                discard_task(self._store, self._queue, task, since)
            discard_sums(self._store)
            return True
        except (OSError, OpenWorldError) as error:
            log.error("the images or sums of task %s remain for now: %s", task.id, error)
            return False

    def search(self) -> None:
        """What a killed process or an error has left, at most once per minute. QueueUnavailable without Redis."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + DISCARD_SECONDS
        try:
            if recorded_keep(self._store.storage) != "images" and (count := discard_ended(self._store, self._queue)):
                log.info("discarded %d images of ended tasks", count)
            drop_discarded_copies(self._store)
        except (OSError, StoreError, KeepError) as error:
            log.error("images or sums of ended tasks remain for now: %s", error)


class _RemoteErasures:
    """Removes what this machine keeps of images that were erased through a server on another one."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._follower: ErasureFollower | None = None
        self._left: set[str] = set()  # erased images whose copies may remain: removing them has failed

    def apply(self) -> None:
        if not self._storage.shared:
            return  # the server that erases an image has the same folder
        try:
            if self._follower is None:
                follower = ErasureFollower(self._storage)
                self._left = erased_images(self._storage)
                self._follower = follower
            self._left |= self._follower.new()
            erase_copies(self._storage, self._left)
            self._left = set()
        except (OSError, StoreError) as error:
            log.error("copies of erased images remain on this machine for now: %s", error)
