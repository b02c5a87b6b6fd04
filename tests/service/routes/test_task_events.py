"""Server-sent events of tasks: few and small reads, a cap per key, and resuming."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx2 as httpx
import pytest
import redis

from tasks.queue import TaskProgress, connect
from tests.support.learning_loop import Loop, batch, loop
from tests.support.waiting import wait_until

STREAMS = 20  # per key
POLLS_PER_SECOND = 2


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    """A server and a queue without a trainer."""
    with loop(tmp_path_factory.mktemp("events"), event_streams=str(STREAMS)) as running:
        running.start("serve")
        yield running


@pytest.fixture
def task_id(idle: Loop, request: pytest.FixtureRequest) -> Iterator[str]:
    """The only task of the queue."""
    id = str(idle.submit(batch(request.node.name)).json()["id"])
    yield id
    httpx.post(f"{idle.url}/tasks/{id}/cancel", timeout=30)


class Stream:
    """The events of one response."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._lines = response.iter_lines()

    def next(self) -> dict[str, str]:
        """The fields of the next event."""
        fields: dict[str, str] = {}
        for line in self._lines:
            if line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                fields[name] = value
            elif fields:
                return fields
        return fields


@contextmanager
def follow(idle: Loop, task_id: str, last_id: str | None = None) -> Iterator[Stream]:
    headers = {} if last_id is None else {"Last-Event-ID": last_id}
    url = f"{idle.url}/tasks/{task_id}/events"
    with httpx.stream("GET", url, headers=headers, timeout=30) as response:
        yield Stream(response)


def calls(client: redis.Redis) -> dict[str, int]:
    """The number of calls per Redis command."""
    stats = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): int(line["calls"]) for name, line in stats.items()}


def test_all_streams_of_a_task_share_one_poller_with_small_reads(idle: Loop, task_id: str) -> None:
    client = connect(idle.redis.url)
    with ExitStack() as stack:
        streams = [stack.enter_context(follow(idle, task_id)) for _ in range(STREAMS)]
        for stream in streams:
            assert stream.next()["event"] == "queued"
        started = time.monotonic()
        client.config_resetstat()
        wait_until(lambda: sum(calls(client).get(name, 0) for name in ("hmget", "hgetall")) >= 4)
        found = calls(client)
        seconds = time.monotonic() - started
        assert found.get("hgetall", 0) == 0  # it would read the names of all images
        assert found["hmget"] <= POLLS_PER_SECOND * seconds + 3
        # All streams get the change.
        httpx.post(f"{idle.url}/tasks/{task_id}/cancel", timeout=30).raise_for_status()
        ids = {stream.next()["id"] for stream in streams}
        assert len(ids) == 1
        assert all(stream.next() == {} for stream in streams)  # the task has ended


def test_a_key_follows_a_limited_number_of_tasks(idle: Loop, task_id: str) -> None:
    with follow(idle, task_id) as kept:
        assert kept.next()["event"] == "queued"
        with ExitStack() as stack:
            streams = [stack.enter_context(follow(idle, task_id)) for _ in range(STREAMS - 1)]
            assert {stream.next()["event"] for stream in streams} == {"queued"}
            refused = httpx.get(f"{idle.url}/tasks/{task_id}/events", timeout=30)
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams")
            assert int(refused.headers["Retry-After"]) >= 1
        # A stream that its client has closed makes room.
        wait_until(lambda: _opens(idle, task_id))


def _opens(idle: Loop, task_id: str) -> bool:
    with follow(idle, task_id) as stream:
        return stream.response.status_code == 200


def test_a_client_resumes_after_the_last_event_that_it_knows(idle: Loop, task_id: str) -> None:
    with follow(idle, task_id) as stream:
        first = stream.next()
    with follow(idle, task_id, first["id"]) as stream:
        cancelled = httpx.post(f"{idle.url}/tasks/{task_id}/cancel", timeout=30).json()
        last = stream.next()  # not the first one again
        assert (last["event"], json.loads(last["data"])) == ("cancelled", cancelled)
        assert stream.next() == {}
    with follow(idle, task_id, first["id"]) as stream:  # the client missed the end
        assert stream.next() == last
    with follow(idle, task_id, last["id"]) as stream:
        assert stream.response.status_code == 204


def test_every_change_of_a_task_is_an_event(idle: Loop, task_id: str) -> None:
    lease = idle.queue.claim("worker")
    assert lease is not None
    assert lease.task.id == task_id
    with follow(idle, task_id) as stream:
        assert stream.next()["event"] == "learning"
        lease.progress(TaskProgress(phase="task 1", progress=0.5))
        assert json.loads(stream.next()["data"])["progress"]["progress"] == 0.5
        httpx.post(f"{idle.url}/tasks/{task_id}/cancel", timeout=30).raise_for_status()
        assert json.loads(stream.next()["data"])["cancel_requested"]
        httpx.post(f"{idle.url}/tasks/{task_id}/retry", timeout=30).raise_for_status()
        assert not json.loads(stream.next()["data"])["cancel_requested"]
        lease.reject("forgot too much")
        last = stream.next()
        assert last["event"] == "rejected"
        assert json.loads(last["data"])["progress"]["progress"] == 1  # the last report was 0.5
    assert httpx.get(f"{idle.url}/tasks/unknown/events", timeout=30).json()["code"] == "unknown_task"
