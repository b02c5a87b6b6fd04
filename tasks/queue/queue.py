"""The queue of tasks, on Redis Streams.

**A task accepted with 202 is learned exactly once or reported as failed with its reason. Killing any process at any
moment loses no task.**

How the promise is kept:
- When `submit` returns, the task is in the stream and, with `appendfsync always`, on disk. With `replicas`, so many of
  them have it: replication is asynchronous, and a primary that fails would take an unconfirmed task with it.
- Tasks are leased one at a time and in order. A worker that stops renewing its lease loses the task to the next
  worker, and its late calls raise `LeaseLost`. A task that `max_attempts` workers could neither finish nor advance to
  a further checkpoint ends as failed.
- The queue lets one worker finish a task, and the version store lets one version of it become current. A worker that
  takes over a task whose version exists already (`VersionStore.find_task`) only has to call `publish`.
"""

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

import redis

from tasks.errors import IdempotencyConflict, QueueFull, UnknownTask, WrongState
from tasks.queue.connection import SOCKET_SECONDS, call_redis, unavailable
from tasks.queue.lease import Lease
from tasks.queue.script_runner import Scripts
from tasks.queue.task import ENDED, STATES, Task, TaskState, TaskSummary, clean_text

IDEMPOTENCY_KEYS_KEPT = timedelta(days=7)
POLL_SECONDS = 1.0  # a waiting worker sees a new task at once, and an expired lease or a requeued task after this long
GROUP = "trainers"  # the consumer group of the stream
UNHELD = "-"  # the consumer of requeued entries: a delivered entry cannot become undelivered

_LEASE_FIELDS = ("entry", "claim", "released", "checkpoint", "uncounted")  # they have no meaning in another Redis


@dataclass(frozen=True)
class Submitted:
    """The task of a submission. `fresh`: this submission queued it, not an earlier one."""

    task: Task
    fresh: bool


class TaskQueue:
    """Submit, claim and read tasks. Threads may share it. Raises `QueueUnavailable` when Redis cannot be used.

    `prefix` is the `key_prefix` of a data folder. `history` is the number of ended tasks to keep. `replicas` of Redis
    confirm a submission before it returns. `clock` dates the records; leases use the clock of Redis.
    """

    def __init__(
        self,
        client: redis.Redis,
        prefix: str,
        lease_seconds: float = 30.0,
        max_attempts: int = 3,
        max_waiting: int = 100,
        history: int = 1000,
        replicas: int = 0,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        if lease_seconds < 0.001 or max_attempts < 1 or max_waiting < 1 or history < 1:
            raise ValueError("lease_seconds, max_attempts, max_waiting and history must be positive")
        if not client.get_encoder().decode_responses:
            raise ValueError("the queue needs a client that decodes replies: make it with `connect`")
        self.prefix, self.lease_seconds, self.max_attempts = prefix, lease_seconds, max_attempts
        self.max_waiting, self.history, self.replicas = max_waiting, history, replicas
        self._client = client
        settings = {  # what every script gets to know
            "group": GROUP,
            "unheld": UNHELD,
            "lease_ms": round(lease_seconds * 1000),
            "max_attempts": max_attempts,
            "max_waiting": max_waiting,
            "history": history,
            "idempotency_seconds": int(IDEMPOTENCY_KEYS_KEPT.total_seconds()),
        }
        self._scripts = Scripts(client, prefix, settings, replicas, clock)
        self._run, self._run_confirmed = self._scripts.run, self._scripts.run_confirmed

    def __repr__(self) -> str:
        return f"TaskQueue({self.prefix!r}, lease_seconds={self.lease_seconds:g}, max_attempts={self.max_attempts})"

    # Submit

    def submit(self, task: Task, idempotency_key: str | None = None, *, learned: bool = True) -> Submitted:
        """Accept a task once: the same idempotency key or the same batch is the same task. Store its images before.

        A failed, rejected or cancelled batch is queued again, unless the idempotency key shows that this is a repeated
        request. So is a published one that is not `learned`, after a roll back (`VersionStore.find_task`). Idempotency
        keys are separate per submitter. `TaskNotReplicated`: the task is queued, but a failure of Redis may still lose
        it. Submit it again.
        """
        key = None if idempotency_key is None else f"{task.submitted_by}\0{idempotency_key}"
        reply = self._run_confirmed(
            "submit",
            task.submission_record(),
            id=task.id,
            batch_sha256=task.batch_sha256,
            submission=secrets.token_hex(8),
            learned=learned,
            idempotency=None if key is None else sha256(key.encode("utf-8", "surrogatepass")).hexdigest(),
        )
        if reply[0] == "conflict":
            first = str(reply[1]).partition(" ")[0]
            raise IdempotencyConflict(
                f"this idempotency key was used for another batch, task {first}: use a new key for a new batch"
            )
        self._raise_if_full(reply)
        return Submitted(Task.from_reply(reply[1]), fresh=reply[0] == "queued")

    def cancel(self, task_id: str) -> Task:
        """Cancel a queued task at once. A leased task is marked, and ends when its worker notices."""
        reply = self._run_confirmed("cancel", id=task_id)
        task = self._known(task_id, reply)
        if reply[0] == "ended":
            raise WrongState(f"task {task_id} is {task.state} already: there is nothing left to cancel")
        return task

    def retry(self, task_id: str, *, learned: bool = True) -> Task:
        """Queue a failed, rejected or cancelled task again, or a published one that is not `learned` any more.

        A task under way continues.
        """
        reply = self._run_confirmed("retry", id=task_id, submission=secrets.token_hex(8), learned=learned)
        self._raise_if_full(reply)
        task = self._known(task_id, reply)
        if reply[0] == "published":
            raise WrongState(f"task {task_id} is learned already, as version {task.version}: there is nothing to retry")
        return task

    # Work

    def claim(self, consumer: str, block_seconds: float = 0.0) -> Lease | None:
        """Lease the next task; wait up to `block_seconds` for one. None: no task waits, or another one is leased.

        `consumer` is the worker's name in messages. Two workers with one name still get different leases.
        """
        if consumer in ("", UNHELD):
            raise ValueError(f"{consumer!r} is not a name for a worker")
        claim = secrets.token_hex(8)
        deadline = time.monotonic() + block_seconds
        while True:
            reply = self._run("claim", consumer=consumer, claim=claim)
            if reply[0] == "lease":
                _, entry, delivery, record = reply
                task = Task.from_reply(record)
                return Lease(self._run, task, entry=entry, consumer=consumer, delivery=delivery, claim=claim)
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._wait(after=reply[1], seconds=min(left, self.lease_seconds, POLL_SECONDS, SOCKET_SECONDS / 2))

    def _wait(self, after: str, seconds: float) -> None:
        """Block until the stream has an entry after this one. A read without the group claims nothing."""
        stream, milliseconds = f"{self.prefix}:tasks", max(1, round(seconds * 1000))
        call_redis(self._client, lambda: self._client.xread({stream: after}, count=1, block=milliseconds))

    def record_provisional(self, task_id: str, version: int, submission: str | None = None) -> None:
        """Record the version that answers with the classes of a task that is not learned yet.

        Without effect if the task has ended, or was submitted again since.
        """
        self._run("provisional", id=task_id, version=version, submission=submission)

    def add_note(self, task_id: str, note: str) -> None:
        """Add to the reason of a task that has ended; without effect on others, and if the note is there already."""
        self._run("note", id=task_id, note=clean_text(note))

    def waiting(self, known: Iterable[Task] = ()) -> list[Task]:
        """The tasks that wait for a worker, oldest first.

        Those that the caller knows are not read again: a task may name 20,000 images.
        """
        have = {(task.id, task.submission): task for task in known}
        tasks = []
        for summary in reversed(self.list_tasks(limit=None, states=["queued"])):
            with suppress(UnknownTask):  # ended since, and deleted from the history
                (submission,) = self._fields(summary.id, ("submission",))
                tasks.append(have.get((summary.id, submission or "")) or self.get(summary.id))
        return [task for task in tasks if task.state == "queued"]

    @property
    def paused(self) -> bool:
        """Whether workers claim no tasks; what is submitted answers provisionally."""
        return bool(call_redis(self._client, lambda: self._client.exists(f"{self.prefix}:paused")))

    def pause(self, paused: bool) -> None:
        """Let workers claim no further tasks, or let them claim again."""
        key = f"{self.prefix}:paused"
        call_redis(self._client, lambda: self._client.set(key, "1") if paused else self._client.delete(key))

    def identity(self) -> str:
        """A random id, made by the first call: a queue with the same prefix in another Redis server has another one."""
        key = f"{self.prefix}:id"
        call_redis(self._client, lambda: self._client.set(key, secrets.token_hex(8), nx=True))
        return str(call_redis(self._client, lambda: self._client.get(key)))

    # Read

    def get(self, task_id: str) -> Task:
        record: Any = call_redis(self._client, lambda: self._client.hgetall(f"{self.prefix}:task:{task_id}"))
        if not record:
            raise self._unknown(task_id)
        return Task.from_record(record)

    def summary(self, task_id: str) -> TaskSummary:
        """Read a task without the names of its images."""
        return TaskSummary.from_row(self._fields(task_id, TaskSummary.model_fields))

    def stamp(self, task_id: str) -> list[str | None]:
        """Return a few bytes that differ after every change of the task."""
        return self._fields(task_id, ("updated", "state", "cancel_requested", "provisional", "reason"))

    def _fields(self, task_id: str, names: Iterable[str]) -> list[str | None]:
        fields = list(names)
        row: Any = call_redis(self._client, lambda: self._client.hmget(f"{self.prefix}:task:{task_id}", fields))
        if all(text is None for text in row):
            raise self._unknown(task_id)
        return list(row)

    def list_tasks(
        self, limit: int | None = 50, before: str | None = None, states: Collection[TaskState] = STATES
    ) -> list[TaskSummary]:
        """List tasks, newest first. For the next page, pass the last id of this page as `before`."""
        fields = list(TaskSummary.model_fields)
        reply = self._run("list", limit=limit, before=before or None, states=list(states), fields=fields)
        if reply[0] == "unknown":
            raise self._unknown(before or "")
        return [TaskSummary.from_row(row) for row in reply[1:]]

    def unfinished_images(self) -> dict[str, set[str]]:
        """Return the keys of the images of each task that has not ended."""
        unfinished = [state for state in STATES if state not in ENDED]
        found: dict[str, set[str]] = {}
        for summary in self.list_tasks(limit=None, states=unfinished):
            try:
                task = self.get(summary.id)
            except UnknownTask:  # ended since, and deleted from the history
                continue
            found[task.id] = task.images
        return found

    def counts(self) -> dict[TaskState, int]:
        """Return the number of kept tasks per state."""
        flat = self._run("counts")
        found = dict(zip(flat[::2], flat[1::2], strict=True))
        return {state: int(found.get(state, 0)) for state in STATES}

    def oldest_age(self) -> float | None:
        """Return the seconds since the first unfinished task was queued; None when there is none."""
        reply = self._run("oldest")
        return reply[0] / 1000 if reply else None

    def contradictions(self) -> list[tuple[str, str, str]]:
        """Return what contradicts the promise of the queue, at one moment: (kind, task, detail)."""
        return [(kind, id, detail) for kind, id, detail in self._run("check")[1:]]

    # Backup

    @property
    def client(self) -> redis.Redis:
        """The connection, with replies as text."""
        return self._client

    def export(self) -> dict[str, Any]:
        """Return all tasks at one moment as a JSON document, without idempotency keys."""
        sequence, unfinished, *rows = self._run("export")
        tasks = [
            {"id": id, "index": index, "ended": ended, "record": dict(zip(flat[::2], flat[1::2], strict=True))}
            for id, index, ended, flat in rows
        ]
        return {"sequence": int(sequence), "unfinished": unfinished, "tasks": tasks}

    def restore(self, document: Mapping[str, Any]) -> int:
        """Fill an empty queue with exported tasks; returns their number. Unfinished ones wait in their former order.

        `WrongState` if the queue has tasks.
        """
        prefix, place = self.prefix, {id: n + 1 for n, id in enumerate(document["unfinished"])}
        try:
            if self._client.exists(f"{prefix}:index", f"{prefix}:tasks"):
                raise WrongState(f"the queue {prefix} has tasks: restore into an empty one")
            pipeline = self._client.pipeline(transaction=True)
            pipeline.set(f"{prefix}:sequence", document["sequence"])
            for task in document["tasks"]:
                id, record = task["id"], dict(task["record"])
                for field in _LEASE_FIELDS:
                    record.pop(field, None)
                if id in place:
                    entry = f"{place[id]}-0"
                    record |= {"state": "queued", "entry": entry}
                    record.pop("progress", None)
                else:
                    pipeline.zadd(f"{prefix}:ended", {id: float(task["ended"])})
                pipeline.hset(f"{prefix}:task:{id}", mapping=record)
                pipeline.zadd(f"{prefix}:index", {id: float(task["index"])})
            for id, n in place.items():
                pipeline.xadd(f"{prefix}:tasks", {"task": id}, id=f"{n}-0")
            pipeline.execute()  # not repeated: Redis refuses the ids of entries that it has
        except redis.RedisError as error:
            raise unavailable(error) from error
        return len(document["tasks"])

    def _known(self, task_id: str, reply: list[Any]) -> Task:
        if reply[0] == "unknown":
            raise self._unknown(task_id)
        return Task.from_reply(reply[1])

    def _unknown(self, task_id: str) -> UnknownTask:
        return UnknownTask(
            f"there is no task {task_id[:80]!r}: check the id; of the ended tasks, the last {self.history} are kept"
        )

    def _raise_if_full(self, reply: list[Any]) -> None:
        if reply[0] == "full":
            raise QueueFull(f"{self.max_waiting} tasks are waiting already: try again later, or cancel one of them")
