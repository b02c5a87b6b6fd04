"""A lease: the right to work on a task, for as long as it is renewed.

Whoever holds it may be wrong about that: a process stops for a minute, the lease lapses, and another worker takes over.
Each call therefore proves inside Redis that the lease is still its own, and is refused with `LeaseLost` otherwise.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from tasks.errors import LeaseLost
from tasks.queue.records import as_json, task_from, text
from tasks.queue.task import Task, TaskProgress

if TYPE_CHECKING:
    from tasks.queue.queue import TaskQueue

_End = Literal["published", "rejected", "failed", "try again", "hand back"]


class Lease:
    """A task in the hands of one worker. May be used by threads: one renews it while another one learns."""

    def __init__(self, queue: "TaskQueue", task: Task, entry: str, consumer: str, delivery: int, claim: str) -> None:
        self.task = task  # as it was when it was handed out
        self.consumer = consumer
        self.delivery = delivery  # how often the stream has delivered it; with the consumer, what fences off a zombie
        self._queue = queue
        self._proof = (task.id, entry, consumer, str(delivery), claim)

    def __repr__(self) -> str:
        return f"Lease({self.task.id!r}, {self.consumer!r}, delivery={self.delivery})"

    def renew(self) -> bool:
        """Keep it for another lease; call it at least three times in one. True when somebody asked to cancel."""
        return self._renew({})

    def progress(self, progress: TaskProgress, state: Literal["learning", "evaluating"] = "learning") -> bool:
        """Record how far it is, and renew. True when somebody asked to cancel."""
        return self._renew({"state": state, "progress": progress.model_dump_json(), "updated": self._queue.now()})

    def publish(self, version: int, result: Mapping[str, Any] | None = None) -> Task:
        """It is learned, and `version` is on the disk."""
        return self._end("published", "", version, result)

    def reject(self, reason: str, result: Mapping[str, Any] | None = None) -> Task:
        """It was learned, but the gate refused the version."""
        return self._end("rejected", reason, None, result)

    def fail(self, reason: str, retry: bool) -> Task:
        """It could not be learned. `retry` puts it back at the head, unless this was the last attempt."""
        return self._end("try again" if retry else "failed", reason)

    def hand_back(self) -> Task:
        """Stop without a failure: requeue the task at the head without counting the attempt.

        If its cancellation was requested, the task ends as cancelled instead.
        """
        return self._end("hand back")

    def _renew(self, fields: dict[str, str]) -> bool:
        flat = [part for pair in fields.items() for part in pair]
        answer = self._queue.run("renew", *self._proof, *flat)
        if answer[0] == "lost":
            raise self._lost()
        return bool(answer[1])

    def _end(
        self, how: _End, reason: str = "", version: int | None = None, result: Mapping[str, Any] | None = None
    ) -> Task:
        fields = [] if version is None else ["version", str(version)]
        fields += [] if result is None else ["result", as_json(dict(result))]
        queue = self._queue
        limits = (str(queue.max_attempts), str(queue.history))
        answer = queue.run("end", *self._proof, how, text(reason), queue.now(), *limits, *fields)
        if answer[0] == "lost":
            raise self._lost()
        return task_from(answer[1])

    def _lost(self) -> LeaseLost:
        return LeaseLost(
            f"worker {self.consumer} no longer holds task {self.task.id}: its lease lapsed and another worker took "
            "over, or the task ended; drop this work"
        )
