"""A lease: a worker's right to work on a task, which expires unless the worker renews it.

A worker may lose its lease without noticing: its process stops for a minute, the lease expires, and another worker
takes the task over. Every call therefore checks inside Redis that the lease is still valid, or raises `LeaseLost`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from tasks.errors import LeaseLost
from tasks.queue.task import Task, TaskProgress, clean_text, dump_json

_Outcome = Literal["published", "rejected", "failed", "retry", "hand back"]


class Lease:
    """A task that one worker holds. Threads may share it: one renews it while another one learns."""

    def __init__(
        self, run: Callable[..., list[Any]], task: Task, *, entry: str, consumer: str, delivery: int, claim: str
    ) -> None:
        self.task = task  # as it was when it was claimed
        self.consumer = consumer
        self.delivery = delivery  # how often the stream has delivered the task
        self._run = run
        self._identity = {"id": task.id, "entry": entry, "consumer": consumer, "delivery": delivery, "claim": claim}

    def __repr__(self) -> str:
        return f"Lease({self.task.id!r}, {self.consumer!r}, delivery={self.delivery})"

    def renew(self, *, stopping: bool = False) -> bool:
        """Extend the lease; call this at least three times per lease. True: stop, the task is to be cancelled.

        `stopping`: the worker was told to stop. If it is killed before it hands the task back, the attempt does not
        count.
        """
        return self._renew({}, uncounted=stopping or None)

    def progress(
        self, progress: TaskProgress, state: Literal["learning", "evaluating"] = "learning", checkpoint: int = 0
    ) -> bool:
        """Record the progress and extend the lease. Returns the same as `renew`.

        `checkpoint` is the number of epochs in the checkpoint. An attempt that makes it larger does not count.
        """
        return self._renew({"state": state, "progress": progress.model_dump_json()}, checkpoint=checkpoint)

    def publish(self, version: int, result: Mapping[str, Any] | None = None, reason: str | None = None) -> Task:
        """End the task as published. The version must be on disk. `reason`: why it stays provisional."""
        return self._release("published", reason, {"version": str(version)}, result)

    def reject(self, reason: str, result: Mapping[str, Any] | None = None) -> Task:
        """End the task as rejected by the gate."""
        return self._release("rejected", reason, {}, result)

    def fail(self, reason: str, retry: bool) -> Task:
        """End the task as failed, or with `retry` requeue it at the head unless its attempts are used up."""
        return self._release("retry" if retry else "failed", reason)

    def hand_back(self) -> Task:
        """Requeue the task at the head without counting the attempt, for example before a restart.

        If its cancellation was requested, the task ends as cancelled instead.
        """
        return self._release("hand back")

    def _renew(self, fields: Mapping[str, str], **arguments: Any) -> bool:
        return bool(self._checked(self._run("renew", fields, **self._identity, **arguments))[1])

    def _release(
        self,
        outcome: _Outcome,
        reason: str | None = None,
        fields: Mapping[str, str] | None = None,
        result: Mapping[str, Any] | None = None,
    ) -> Task:
        fields = dict(fields or {}) | ({} if result is None else {"result": dump_json(dict(result))})
        reason = None if reason is None else clean_text(reason)
        reply = self._run("release", fields, **self._identity, outcome=outcome, reason=reason)
        return Task.from_reply(self._checked(reply)[1])

    def _checked(self, reply: list[Any]) -> list[Any]:
        if reply[0] == "lost":
            raise LeaseLost(
                f"worker {self.consumer} no longer holds task {self.task.id}: its lease expired and another worker "
                "took over, or the task ended; drop this work"
            )
        return reply
