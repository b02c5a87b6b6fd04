"""The thread that keeps the lease of a task while its worker learns.

It renews the lease, because an epoch may take longer than a lease, and sends the progress. After every unit of work
that the learner reports, `on_event` checks whether to go on. A worker that is told to stop, or whose task is to be
cancelled, hands the task back. One that has lost the lease drops the task, because another worker has it.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Literal, Self

from models.versions.manifest import PendingTask
from tasks.errors import LeaseLost, QueueUnavailable, UnknownTask
from tasks.queue import Lease, Task, TaskProgress, TaskQueue
from trainer.learning.progress import Event
from trainer.worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.5  # between two progress reports to Redis
RENEWALS_PER_LEASE = 3


class Interrupted(BaseException):
    """Leaves the learner without its rollback, so that the next attempt resumes from the checkpoint.

    Like KeyboardInterrupt, it is not an Exception.
    """


class LeaseGone(Interrupted):
    """Another worker holds the task."""


class LeaseKeeper:
    """Renews the lease in a thread, reports the learner's progress, and interrupts the learner when it must stop."""

    def __init__(self, lease: Lease, queue: TaskQueue, metrics: WorkerMetrics, stopping: threading.Event) -> None:
        self._lease, self._queue, self._metrics, self._stopping = lease, queue, metrics, stopping
        self._thread = threading.Thread(target=self._talk_to_queue, name="lease", daemon=True)
        self._done, self._give_back, self._lost = threading.Event(), threading.Event(), threading.Event()
        self._unsent: Event | None = None  # the last event, until it is sent
        self._losses: list[float] = []
        self._checkpoint = 0  # finished epochs
        self.waiting: list[Task] = []  # those that were submitted during the training
        self.unrecorded: list[tuple[str, int, str | None]] = []  # provisional versions: task, version, submission
        self._pending: Sequence[PendingTask] = ()  # of the current version
        self._cancelled: set[PendingTask] = set()  # of these

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def on_event(self, event: Event) -> None:
        """Called by the learner after each unit of work. Never waits for Redis."""
        if event.loss is not None:
            self._losses.append(event.loss)
        self._metrics.beat()
        self._metrics.progress.set(event.progress)
        if event.saved:
            self._checkpoint = event.epoch
        self._unsent = event
        if self._lost.is_set():
            raise LeaseGone
        if self._give_back.is_set() or self._stopping.is_set():
            raise Interrupted

    def cancelled(self, pending: Sequence[PendingTask]) -> list[PendingTask]:
        """Those of the pending tasks that were cancelled, as far as the thread knows. Never waits for Redis."""
        self._pending = [one for one in pending if one.task_id != self._lease.task.id]
        return [one for one in self._pending if one in self._cancelled]

    # In the thread

    def _talk_to_queue(self) -> None:
        """Send every new event, and renew the lease, until the task is done."""
        renewal = self._queue.lease_seconds / RENEWALS_PER_LEASE
        renewed, told = time.monotonic(), False
        while not self._done.wait(min(REPORT_SECONDS, renewal)):
            self._call_queue(self._look)
            self._send_progress()
            stopping = self._stopping.is_set()
            if time.monotonic() - renewed >= renewal or stopping != told:
                renewed, told = time.monotonic(), stopping
                self._call_queue(partial(self._lease.renew, stopping=stopping))
                self._call_queue(lambda: self._metrics.update_queue(self._queue))
        self._send_progress()

    def _look(self) -> bool:
        """Record provisional versions, see which tasks wait and were cancelled; True if refinement was paused."""
        while self.unrecorded:
            self._queue.record_provisional(*self.unrecorded[0])
            del self.unrecorded[0]
        self.waiting = self._queue.waiting(known=self.waiting)
        queued = {(task.id, task.submission) for task in self.waiting}
        left = [one for one in self._pending if (one.task_id, one.submission) not in queued]
        self._cancelled = {one for one in left if self._is_cancelled(one)}
        return self._queue.paused

    def _is_cancelled(self, one: PendingTask) -> bool:
        with suppress(UnknownTask):  # of another queue
            task = self._queue.get(one.task_id)
            return task.state == "cancelled" and one.submission in (None, task.submission)
        return False

    def _send_progress(self) -> None:
        event, self._unsent = self._unsent, None
        if event is not None:
            self._call_queue(lambda: self._record(event))

    def _record(self, event: Event) -> bool:
        fields = {name: value for name, value in asdict(event).items() if name not in ("task", "saved")}
        progress = TaskProgress(**fields, losses=tuple(self._losses))
        state: Literal["learning", "evaluating"] = "evaluating" if event.phase == "evaluating" else "learning"
        return self._lease.progress(progress, state, self._checkpoint)

    def _call_queue(self, operation: Callable[[], bool | None]) -> None:
        """`operation` returns True if the task is to be handed back: cancelled or paused."""
        try:
            if operation():
                self._give_back.set()
        except LeaseLost:
            self._lost.set()
        except QueueUnavailable as error:
            log.warning("%s", error)  # keep learning: if the lease expires, a later call raises LeaseLost
