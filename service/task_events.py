"""Changes of tasks for server-sent events.

**One poller per task, however many streams follow it.** A poll reads a stamp of a few bytes; only if it differs is the
task read, without the names of its images, and written as JSON once for all streams. A stream that is read slowly
skips events: each event contains the whole task.

The id of an event is a hash of its content, so that a client can resume at any server: after `Last-Event-ID` it gets
an event as soon as the task differs from the one that it knows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from models.files import sha256_bytes
from service.errors import TooManyStreams
from service.wire.tasks import TaskAnswer
from tasks.errors import QueueUnavailable, UnknownTask
from tasks.queue import TaskQueue, TaskSummary

POLL_SECONDS = 0.5
HEARTBEAT_SECONDS = 15.0  # proxies close a connection that is silent for longer


@dataclass(frozen=True)
class TaskEvent:
    """A task as one event."""

    id: str
    state: str
    data: str  # JSON
    ended: bool

    @classmethod
    def of(cls, task: TaskSummary) -> TaskEvent:
        data = TaskAnswer.model_validate(task).model_dump_json()
        return cls(sha256_bytes(data.encode())[:16], task.state, data, task.ended)

    @property
    def text(self) -> str:
        return f"id: {self.id}\nevent: {self.state}\ndata: {self.data}\n\n"


@dataclass(eq=False)
class _Poller:
    """The latest event of a task, and the streams that wait for the next one."""

    event: TaskEvent
    streams: int = 0
    closed: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # replaced after every change
    task: asyncio.Task[None] | None = None

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class TaskEvents:
    """Use it on the event loop. `ask` runs a call of the queue in a thread; `draining` ends all streams."""

    def __init__(self, ask: Callable[..., Awaitable[Any]], max_streams: int, draining: Callable[[], bool]) -> None:
        self._ask, self._max_streams, self._draining = ask, max_streams, draining
        self._pollers: dict[str, _Poller] = {}
        self._streams = Counter[str]()

    async def open(self, queue: TaskQueue, task_id: str, client: str) -> TaskStream:
        """A stream, to be closed by the caller; UnknownTask, TooManyStreams or QueueUnavailable."""
        if self._streams[client] >= self._max_streams:
            raise TooManyStreams(f"key {client!r} follows {self._max_streams} tasks already: close a stream", 5)
        self._streams[client] += 1
        try:
            poller = self._pollers.get(task_id)
            if poller is None:
                event = TaskEvent.of(await self._ask(queue.summary, task_id))
                poller = self._pollers.get(task_id) or self._start(queue, task_id, event)
        except BaseException:
            self._leave(client)
            raise
        poller.streams += 1
        return TaskStream(poller, lambda: self._close(task_id, poller, client))

    def _start(self, queue: TaskQueue, task_id: str, event: TaskEvent) -> _Poller:
        poller = self._pollers[task_id] = _Poller(event)
        poller.task = asyncio.create_task(self._poll(queue, task_id, poller), name=f"events of task {task_id}")
        return poller

    async def _poll(self, queue: TaskQueue, task_id: str, poller: _Poller) -> None:
        last: object = None
        try:
            while not (poller.event.ended or self._draining()):
                await asyncio.sleep(POLL_SECONDS)
                with suppress(QueueUnavailable):  # Redis may come back; until then the last known state stands
                    stamp = await self._ask(queue.stamp, task_id)
                    if stamp != last:
                        event = TaskEvent.of(await self._ask(queue.summary, task_id))
                        last = stamp
                        if event != poller.event:
                            poller.event = event
                            poller.notify()
        except UnknownTask:
            pass  # removed from the history
        finally:
            self._end(task_id, poller)

    def _close(self, task_id: str, poller: _Poller, client: str) -> None:
        self._leave(client)
        poller.streams -= 1
        if not poller.streams and poller.task is not None:
            self._end(task_id, poller)  # at once: a new stream must not join a poller that is being cancelled
            poller.task.cancel()

    def _end(self, task_id: str, poller: _Poller) -> None:
        poller.closed = True
        poller.notify()
        if self._pollers.get(task_id) is poller:
            del self._pollers[task_id]

    def _leave(self, client: str) -> None:
        self._streams[client] -= 1
        if not self._streams[client]:
            del self._streams[client]


class TaskStream:
    """One client's view of a task."""

    def __init__(self, poller: _Poller, close: Callable[[], None]) -> None:
        self._poller = poller
        self.close = close

    def has_nothing_after(self, last_id: str | None) -> bool:
        """Whether the task has ended with the event that the client knows."""
        return self._poller.event.ended and self._poller.event.id == last_id

    async def follow(self, last_id: str | None) -> AsyncIterator[str]:
        """The text of each event, and of heartbeats, until the task ends."""
        poller = self._poller
        while True:
            changed, event = poller.changed, poller.event
            if event.id != last_id:
                last_id = event.id
                yield event.text
            elif event.ended or poller.closed:
                return
            else:
                try:
                    await asyncio.wait_for(changed.wait(), HEARTBEAT_SECONDS)
                except TimeoutError:
                    yield ": heartbeat\n\n"
