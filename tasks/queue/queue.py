"""The queue of tasks, on Redis Streams.

**A task accepted with 202 is learned exactly once or reported as failed with its reason; killing any process at any
moment loses nothing.**

How that is kept: what `submit` has returned for is in the stream and, with `appendfsync always`, on the disk. Tasks
are handed out one at a time and in order, each with a lease. A worker that stops renewing it loses the task to the
next one; its late calls are refused (`LeaseLost`). A task that `max_attempts` workers could not finish ends as failed.
*Exactly once* is the work of two: the queue lets one worker finish a task, and the version
store lets one version of it become current. A worker that was killed between the two finds the version there
(`VersionStore.find_task`) and has only `publish` left to call.
"""

import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, Literal

import redis

from tasks.errors import IdempotencyConflict, QueueFull, UnknownTask, WrongState
from tasks.queue import lease_scripts, queue_scripts
from tasks.queue.connection import SOCKET_SECONDS, reaching_redis
from tasks.queue.lease import Lease
from tasks.queue.records import SUMMARY_FIELDS, fields_of, summary_from, task_from
from tasks.queue.task import STATES, Task, TaskState, TaskSummary

IDEMPOTENCY_KEYS_KEPT = timedelta(days=7)
# A new task ends the wait at once; a lease that lapsed, or a task that was handed back, is seen after this long.
LOOKS_AGAIN = 1.0

_Step = Literal["submit", "claim", "renew", "end", "cancel", "retry", "list", "counts", "oldest"]
_SCRIPTS: dict[_Step, str] = {
    "submit": queue_scripts.SUBMIT,
    "claim": lease_scripts.CLAIM,
    "renew": lease_scripts.RENEW,
    "end": lease_scripts.END,
    "cancel": queue_scripts.CANCEL,
    "retry": queue_scripts.RETRY,
    "list": queue_scripts.LIST,
    "counts": queue_scripts.COUNTS,
    "oldest": queue_scripts.OLDEST,
}


@dataclass(frozen=True)
class Submitted:
    """What became of a submission; `fresh` when it, and not an earlier one, put the task into the queue."""

    task: Task
    fresh: bool


def utc_now() -> datetime:
    return datetime.now(UTC)


def _hashed(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class TaskQueue:
    """Submit, claim and watch tasks. Threads may share it. `QueueUnavailable` when Redis is not there.

    `clock` dates the records. Leases are measured by the clock of Redis alone.
    """

    def __init__(
        self,
        client: redis.Redis,
        prefix: str = "openworld",
        lease_seconds: float = 30.0,
        max_attempts: int = 3,
        max_waiting: int = 100,
        history: int = 1000,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        if lease_seconds < 0.001 or max_attempts < 1 or max_waiting < 1 or history < 1:
            raise ValueError("lease_seconds, max_attempts, max_waiting and history must be positive")
        if not client.get_encoder().decode_responses:
            raise ValueError("the queue needs a client that decodes its answers: make it with `connect`")
        self.prefix, self.lease_seconds, self.max_attempts = prefix, lease_seconds, max_attempts
        self.max_waiting, self.history = max_waiting, history
        self._client, self._clock = client, clock
        self._scripts = {step: client.register_script(code) for step, code in _SCRIPTS.items()}

    def __repr__(self) -> str:
        return f"TaskQueue({self.prefix!r}, lease_seconds={self.lease_seconds:g}, max_attempts={self.max_attempts})"

    # For those who submit

    def submit(self, task: Task, idempotency_key: str | None = None) -> Submitted:
        """Accept a task, once: the same key, or the same batch, is the same task. Its images must be stored before.

        A batch that failed, was rejected or cancelled is queued anew, unless the key says that this is the same
        request again. Keys belong to who submits: two people may have the same idea of a key.
        """
        key = "" if idempotency_key is None else _hashed(f"{task.submitted_by}\0{idempotency_key}")
        fields = [part for pair in fields_of(task).items() for part in pair]
        answer = self.run(
            *("submit", task.id, task.batch_sha256, secrets.token_hex(8), self.now(), str(self.max_waiting)),
            *(key, str(int(IDEMPOTENCY_KEYS_KEPT.total_seconds())), *fields),
        )
        if answer[0] == "conflict":
            first = str(answer[1]).partition(" ")[0]
            raise IdempotencyConflict(
                f"this idempotency key was used for another batch, task {first}: use a new key for a new batch"
            )
        self._refuse_when_full(answer)
        return Submitted(task_from(answer[1]), fresh=answer[0] == "fresh")

    def cancel(self, task_id: str) -> Task:
        """A waiting task ends at once; one that is being learned is flagged, and ends when its worker sees that."""
        answer = self.run("cancel", task_id, self.now(), str(self.history))
        task = self._known(task_id, answer)
        if answer[0] == "ended":
            raise WrongState(f"task {task_id} is {task.state} already: there is nothing left to cancel")
        return task

    def retry(self, task_id: str) -> Task:
        """Queue a task that failed, was rejected or cancelled once more; one that is under way just goes on."""
        answer = self.run("retry", task_id, self.now(), str(self.max_waiting))
        self._refuse_when_full(answer)
        task = self._known(task_id, answer)
        if answer[0] == "published":
            raise WrongState(f"task {task_id} is learned already, as version {task.version}: there is nothing to retry")
        return task

    # For workers

    def claim(self, consumer: str, block_seconds: float = 0.0) -> Lease | None:
        """The next task, waiting for it that long; None while there is none, or an earlier one is being learned.

        `consumer` names the worker, for people. Two workers with one name still get two different leases.
        """
        if consumer in ("", queue_scripts.NOBODY):
            raise ValueError(f"{consumer!r} is not a name for a worker")
        claim, limits = secrets.token_hex(8), (str(self.max_attempts), str(self.history))
        deadline = time.monotonic() + block_seconds
        while True:
            answer = self.run("claim", consumer, claim, self.now(), str(round(self.lease_seconds * 1000)), *limits)
            if answer[0] == "lease":
                return Lease(self, task_from(answer[3]), answer[1], consumer, int(answer[2]), claim)
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._wait(after=answer[1], seconds=min(left, self.lease_seconds, LOOKS_AGAIN, SOCKET_SECONDS / 2))

    # For those who watch

    def get(self, task_id: str) -> Task:
        with reaching_redis():
            fields: Any = self._client.hgetall(f"{self.prefix}:task:{task_id}")
        if not fields:
            raise self._unknown(task_id)
        return task_from([part for pair in fields.items() for part in pair])

    def list_tasks(
        self, limit: int = 50, before: str | None = None, states: Collection[TaskState] = STATES
    ) -> list[TaskSummary]:
        """The newest first; for the next page, give the last id of this one as `before`."""
        answer = self.run(
            *("list", str(limit), before or "", f" {' '.join(states)} ", str(len(SUMMARY_FIELDS)), *SUMMARY_FIELDS)
        )
        if answer[0] == "unknown":
            raise self._unknown(before or "")
        return [summary_from(row) for row in answer[1:]]

    def counts(self) -> dict[TaskState, int]:
        """Tasks that are kept, by state."""
        flat = self.run("counts")
        found = dict(zip(flat[::2], flat[1::2], strict=True))
        return {state: int(found.get(state, 0)) for state in STATES}

    def oldest_age(self) -> float | None:
        """Seconds since the first unfinished task was queued; None when there is none."""
        age = self.run("oldest")[0]
        return None if age < 0 else age / 1000

    # Details

    def run(self, step: _Step, *arguments: str) -> list[Any]:
        """One step inside Redis, for the queue and its leases."""
        with reaching_redis():
            answer = self._scripts[step](keys=[self.prefix], args=arguments)
        return answer if isinstance(answer, list) else [answer]

    def now(self) -> str:
        return self._clock().isoformat()

    def _wait(self, after: str, seconds: float) -> None:
        """Until there is something in the stream after this entry; reading without the group takes nothing."""
        with reaching_redis():
            self._client.xread({f"{self.prefix}:tasks": after}, count=1, block=max(1, round(seconds * 1000)))

    def _known(self, task_id: str, answer: list[Any]) -> Task:
        if answer[0] == "unknown":
            raise self._unknown(task_id)
        return task_from(answer[1])

    def _unknown(self, task_id: str) -> UnknownTask:
        return UnknownTask(
            f"there is no task {task_id[:80]!r}: check the id; of those that ended, the last {self.history} are kept"
        )

    def _refuse_when_full(self, answer: list[Any]) -> None:
        if answer[0] == "full":
            raise QueueFull(f"{self.max_waiting} tasks are waiting already: try again later, or cancel one of them")
