"""A Redis primary that fails: sentinels promote a replica, and no accepted task is lost or learned twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import aclosing, closing, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from deploy.fleet.replicated_redis import ReplicatedRedis, replicated_redis
from models.versions.store import VersionStore
from tasks.errors import TaskNotReplicated
from tasks.queue import TaskQueue, announce, connect, listen
from tests.support.learning_loop import batch, folder_loop
from tests.support.redis_servers import PREFIX, RedisServer, claim_next, make_task
from tests.support.sentinels import needs_sentinel

pytestmark = needs_sentinel
SUBMISSIONS, KILLED_AFTER = 20, 7


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicatedRedis]:
    with replicated_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def redis(servers: ReplicatedRedis) -> ReplicatedRedis:
    """All servers run, and hold nothing."""
    servers.restart_killed()
    with closing(servers.client(servers.primary())) as client:
        client.flushall()
    return servers


@contextmanager
def stopped_replicas(redis: ReplicatedRedis) -> Iterator[None]:
    primary = redis.primary()
    others = [process for port, process in redis.servers.items() if port != primary]
    for process in others:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in others:
            process.send_signal(signal.SIGCONT)


def test_a_task_is_accepted_once_a_replica_has_it(redis: ReplicatedRedis) -> None:
    with closing(connect(redis.url)) as client:
        queue = TaskQueue(client, PREFIX, replicas=1)
        assert queue.submit(make_task("a"), "key a").fresh
        with stopped_replicas(redis):
            for _ in range(2):  # also the repeated request, which finds the task
                with pytest.raises(TaskNotReplicated, match="send the same request again"):
                    queue.submit(make_task("b"), "key b")
            with pytest.raises(TaskNotReplicated):
                queue.cancel(make_task("a").id)
        again = queue.submit(make_task("b"), "key b")
        assert (again.task.id, again.fresh) == (make_task("b").id, False)
        assert [task.id for task in queue.list_tasks()] == [make_task("b").id, make_task("a").id]
        assert queue.contradictions() == []
        assert claim_next(queue).task.id == make_task("b").id  # the other one is cancelled


def test_calls_and_notices_continue_with_the_new_primary(redis: ReplicatedRedis) -> None:
    async def heard_after_the_failover() -> list[int]:
        async with aclosing(listen(redis.url, PREFIX)) as versions:
            found = [await anext(versions)]  # connected
            await asyncio.to_thread(redis.kill_primary)
            found.append(await anext(versions))  # connected again
            with closing(connect(redis.url)) as client:
                await asyncio.to_thread(announce, client, 8, PREFIX)
            found.append(await anext(versions))
            return found

    with closing(connect(redis.url)) as client:
        queue = TaskQueue(client, PREFIX, replicas=1)
        queue.submit(make_task("a"))
        lease = claim_next(queue)
        assert asyncio.run(asyncio.wait_for(heard_after_the_failover(), 30)) == [0, 0, 8]
        assert not lease.renew()
        assert lease.publish(4).state == "published"


def more_fruit(number: int) -> list[tuple[str, tuple[str, bytes]]]:
    return batch("fruit", images=2, start=2 * number)


def test_no_accepted_task_is_lost_or_learned_twice(redis: ReplicatedRedis, tmp_path: Path) -> None:
    with folder_loop(tmp_path / "robot", cast(RedisServer, redis)) as running:
        running.start("serve")
        running.start("train")
        accepted: list[dict[str, Any]] = []
        refused = 0
        for number in range(SUBMISSIONS):
            if number == KILLED_AFTER:
                redis.kill_primary()
            while (response := running.submit(more_fruit(number), f"key {number}")).status_code == 503:
                refused += 1
                assert response.json()["code"] in ("queue_unavailable", "task_not_replicated")
                assert refused < 50
            assert response.status_code == 202, response.text
            accepted.append(response.json())
        for task in accepted:
            running.check_learned_once(task["id"])
        assert len({task["id"] for task in accepted}) == SUBMISSIONS
        learned = [entry.version for entry in VersionStore(running.data).log()]
        assert len(learned) == len(set(learned))
