"""The delivery promise: whatever is killed and in whatever order calls come, no task is lost or leased twice."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tasks.errors import LeaseLost, QueueUnavailable, WrongState
from tasks.queue import ENDED, Lease, Task, TaskProgress, TaskState, connect
from tasks.queue.queue import UNHELD, TaskQueue
from tests.support.paths import ROOT
from tests.support.redis_servers import (
    PREFIX,
    REDIS_SERVERS,
    RedisServer,
    claim_next,
    client_of,
    expire_lease,
    make_task,
)
from tests.support.waiting import wait_until

EXAMPLES = 10  # thousands were run when this test was written

WORKER = """
import sys, time
from tasks.queue import TaskQueue, connect

lease = TaskQueue(connect(sys.argv[1]), sys.argv[2], lease_seconds=2).claim("victim", block_seconds=5)
print(lease.task.id, flush=True)
while True:
    lease.renew()
    time.sleep(0.05)
"""


@pytest.fixture(params=REDIS_SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", request.param) as server:
        yield server


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with client_of(server.url) as client:
        yield client


def kill_and_restart(server: RedisServer) -> None:
    assert server.pid
    os.kill(server.pid, signal.SIGKILL)
    while server.alive:
        pass
    server.start()


def snapshot(client: redis.Redis) -> dict[str, Any]:
    """Return all that Redis holds, except the age of leases."""
    found: dict[str, Any] = {}
    for key in client.scan_iter():
        kind = client.type(key)
        if kind == "hash":
            found[key] = client.hgetall(key)
        elif kind == "zset":
            found[key] = client.zrange(key, 0, -1, withscores=True)
        elif kind == "stream":
            found[key] = client.xrange(key)
        else:
            found[key] = client.get(key)
    rows = client.xpending_range(f"{PREFIX}:tasks", "trainers", "-", "+", 10)
    found["pending"] = [(row["message_id"], row["consumer"], row["times_delivered"]) for row in rows]
    return found


def test_nothing_is_lost_when_the_server_is_killed_after_any_call(server: RedisServer, client: redis.Redis) -> None:
    queue = TaskQueue(client, PREFIX)

    def after(result: Any) -> Any:
        before = snapshot(client)
        kill_and_restart(server)
        assert snapshot(client) == before
        return result

    a, b, c = (after(queue.submit(make_task(name), f"key {name}")).task for name in "abc")
    lease = after(claim_next(queue))
    after(lease.renew())
    after(lease.progress(TaskProgress(phase="heads", losses=(1.0,))))
    after(lease.hand_back())
    after(claim_next(queue).fail("no disk", retry=True))
    old = after(claim_next(queue))
    expire_lease(client, queue)
    lease = after(claim_next(queue, "other"))
    with pytest.raises(LeaseLost):
        old.renew()
    after(lease.publish(1, {"accuracy": 1.0}))
    lease = claim_next(queue)
    after(queue.cancel(b.id))
    after(lease.hand_back())
    after(claim_next(queue).fail("bad luck", retry=False))
    after(queue.retry(c.id))
    after(queue.cancel(c.id))
    assert not after(queue.submit(make_task("a"), "key a")).fresh
    assert [queue.get(task.id).state for task in (a, b, c)] == ["published", "cancelled", "cancelled"]


def test_tasks_accepted_while_the_server_is_killed_exist_exactly_once(server: RedisServer, client: redis.Redis) -> None:
    queue = TaskQueue(client, PREFIX, max_waiting=100_000)
    accepted: list[str] = []
    names, stop = count(), threading.Event()

    def submit() -> None:
        while not stop.is_set():
            task = make_task(next(names))
            try:
                accepted.append(queue.submit(task).task.id)
            except QueueUnavailable:
                continue

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for kill in range(3):
        wait_until(lambda kill=kill: len(accepted) > 5 * kill, 60)
        stop.wait(random.uniform(0.05, 0.15))
        kill_and_restart(server)
    stop.set()
    for thread in threads:
        thread.join()
    entries = [fields["task"] for _, fields in client.xrange(f"{PREFIX}:tasks")]
    assert len(entries) == len(set(entries))
    assert set(accepted) <= set(entries)
    assert len(accepted) > 10


@pytest.mark.parametrize("server", REDIS_SERVERS[:1], indirect=True)
def test_a_killed_worker_loses_no_task(server: RedisServer, client: redis.Redis) -> None:
    queue = TaskQueue(client, PREFIX, lease_seconds=2)
    queue.submit(make_task("a"))
    command = [sys.executable, "-c", WORKER, server.url, PREFIX]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout
        task_id = worker.stdout.readline().strip()
        assert queue.claim("other", block_seconds=2.5) is None  # it renews
        worker.kill()
    lease = queue.claim("other", block_seconds=30)
    assert lease
    assert (lease.task.id, lease.task.attempts) == (task_id, 2)
    lease.publish(1)


class QueueMachine(RuleBasedStateMachine):
    """Compare the queue with a model: the state of each task, the order, and the holder of the lease."""

    prefixes = count()

    def __init__(self, server: RedisServer) -> None:
        super().__init__()
        self.server = server
        self.client = connect(server.url)
        self.queue = TaskQueue(self.client, prefix=f"machine {next(self.prefixes)}", lease_seconds=3600)
        self.states: dict[str, TaskState] = {}
        self.attempts: dict[str, int] = {}
        self.line: list[str] = []  # unfinished tasks, in order
        self.flagged: set[str] = set()
        self.leases: list[Lease] = []
        self.holder: Lease | None = None
        self.expired = False
        self.endings: dict[Lease, str] = {}

    def teardown(self) -> None:
        self.client.close()

    def end(self, task_id: str, state: TaskState) -> None:
        self.states[task_id] = state
        self.line.remove(task_id)
        self.flagged.discard(task_id)

    @rule(name=st.integers(0, 3))
    def submit(self, name: int) -> None:
        task = make_task(name)
        fresh = self.states.get(task.id, "failed") in ENDED - {"published"}
        assert self.queue.submit(task).fresh == fresh
        self.flagged.discard(task.id)
        if fresh:
            self.requeue(task.id)

    def requeue(self, task_id: str) -> None:
        self.states[task_id], self.attempts[task_id] = "queued", 0
        self.line.append(task_id)

    @rule(worker=st.sampled_from(["one", "two"]))
    def claim(self, worker: str) -> None:
        lease = self.queue.claim(worker)
        if self.holder and not self.expired:
            assert lease is None
            return
        self.holder, self.expired = None, False
        while self.line:
            first = self.line[0]
            if first in self.flagged:
                self.end(first, "cancelled")
            elif self.attempts[first] >= self.queue.max_attempts:
                self.end(first, "failed")
            else:
                break
        assert (lease.task.id if lease else None) == (self.line[0] if self.line else None)
        if lease:
            self.states[lease.task.id] = "learning"
            self.attempts[lease.task.id] += 1
            self.holder = lease
            self.leases.append(lease)

    @precondition(lambda self: self.holder is not None)
    @rule()
    def expire(self) -> None:
        expire_lease(self.client, self.queue)
        self.expired = True

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases[-3:]))
        if lease is not self.holder:
            with pytest.raises(LeaseLost):
                lease.renew()
        else:
            assert lease.renew() == (lease.task.id in self.flagged)
            self.expired = False

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), how=st.sampled_from(["publish", "reject", "fail", "try again", "hand back"]))
    def end_lease(self, data: st.DataObject, how: str) -> None:
        calls: dict[str, Callable[[Lease], Task]] = {
            "publish": lambda lease: lease.publish(1),
            "reject": lambda lease: lease.reject("no"),
            "fail": lambda lease: lease.fail("no", retry=False),
            "try again": lambda lease: lease.fail("no", retry=True),
            "hand back": Lease.hand_back,
        }
        lease = data.draw(st.sampled_from(self.leases[-3:]))
        if lease is not self.holder:
            try:
                calls[how](lease)
            except LeaseLost:
                return
            assert self.endings[lease] == how  # a repeated call; the invariants check that it took effect once
            return
        task_id = lease.task.id
        calls[how](lease)
        self.holder, self.expired, self.endings[lease] = None, False, how
        ends: dict[str, TaskState] = {"publish": "published", "reject": "rejected", "fail": "failed"}
        if how in ends:
            self.end(task_id, ends[how])
        elif task_id in self.flagged:
            self.attempts[task_id] -= how == "hand back"  # it does not count
            self.end(task_id, "cancelled")
        elif how == "try again" and self.attempts[task_id] >= self.queue.max_attempts:
            self.end(task_id, "failed")
        else:
            self.states[task_id] = "queued"
            self.attempts[task_id] -= how == "hand back"

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.states)))
        state = self.states[task_id]
        if state in ENDED - {"cancelled"}:
            with pytest.raises(WrongState):
                self.queue.cancel(task_id)
            return
        self.queue.cancel(task_id)
        if state == "queued":
            self.end(task_id, "cancelled")
        elif state == "learning":
            self.flagged.add(task_id)

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.states)))
        if self.states[task_id] == "published":
            with pytest.raises(WrongState):
                self.queue.retry(task_id)
            return
        self.queue.retry(task_id)
        self.flagged.discard(task_id)
        if self.states[task_id] in ENDED:
            self.requeue(task_id)

    @precondition(lambda self: self.states)
    @rule()
    def kill(self) -> None:
        kill_and_restart(self.server)

    @invariant()
    def every_task_is_where_the_model_says(self) -> None:
        kept = {task.id: task for task in self.queue.list_tasks()}
        assert {task_id: task.state for task_id, task in kept.items()} == self.states
        assert {task_id for task_id, task in kept.items() if task.cancel_requested} == self.flagged
        assert {task_id: task.attempts for task_id, task in kept.items()} == self.attempts
        entries = self.client.xrange(f"{self.queue.prefix}:tasks")
        assert [fields["task"] for _, fields in entries] == self.line
        failed = {task.id for task in self.queue.list_tasks(states=["failed"])}
        assert failed == {task_id for task_id, state in self.states.items() if state == "failed"}

    @invariant()
    def at_most_one_worker_holds_a_task(self) -> None:
        if not self.states:
            return
        rows = self.client.xpending_range(f"{self.queue.prefix}:tasks", "trainers", "-", "+", 10)
        workers = [row["consumer"] for row in rows if row["consumer"] != UNHELD]
        assert workers == ([self.holder.consumer] if self.holder else [])


def test_no_task_is_lost_or_leased_twice(server: RedisServer) -> None:
    with closing(connect(server.url)) as client:
        client.ping()
    run_state_machine_as_test(
        lambda: QueueMachine(server),
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
