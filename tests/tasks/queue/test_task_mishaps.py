"""The queue when replies are lost, and when its keys are changed by hand."""

from collections.abc import Callable

import pytest
import redis

from tasks.queue import Lease, TaskQueue
from tests.support.redis_servers import (
    EVERY_CALL,
    FEWER_SERVERS_AND_PROTOCOLS,
    PREFIX,
    assert_every_call_is_refused,
    claim_next,
    expire_lease,
    make_task,
    queue_fixtures,
    run_script_twice,
)

address, client, queue = queue_fixtures(FEWER_SERVERS_AND_PROTOCOLS)


def test_a_claim_whose_reply_was_lost_is_one_claim(queue: TaskQueue) -> None:
    run_script_twice(queue, "claim")
    for name in "ab":
        queue.submit(make_task(name))
    lease = claim_next(queue)
    assert (lease.task.id, lease.task.attempts, lease.delivery) == (make_task("a").id, 1, 1)
    lease.renew()
    assert queue.claim("other") is None


@pytest.mark.parametrize("call", EVERY_CALL)
def test_a_call_whose_reply_was_lost_is_one_call(queue: TaskQueue, call: Callable[[Lease], object]) -> None:
    queue.submit(make_task("a"))
    lease = claim_next(queue)
    for step in ("renew", "release"):
        run_script_twice(queue, step)
    call(lease)
    assert len(queue.list_tasks()) == 1
    assert queue.get(lease.task.id).attempts in (0, 1)


def test_a_destroyed_group_is_created_again_and_no_task_is_skipped(queue: TaskQueue, client: redis.Redis) -> None:
    ids = [queue.submit(make_task(name)).task.id for name in "ab"]
    old = claim_next(queue)
    client.xgroup_destroy(f"{PREFIX}:tasks", "trainers")
    assert_every_call_is_refused(old)
    for task_id in ids:
        lease = claim_next(queue)
        assert lease.task.id == task_id
        assert_every_call_is_refused(old)
        lease.publish(1)


def test_a_task_deleted_by_hand_is_skipped(queue: TaskQueue, client: redis.Redis) -> None:
    for name in "abc":
        queue.submit(make_task(name))
    lease = claim_next(queue)
    client.delete(f"{PREFIX}:task:{lease.task.id}", f"{PREFIX}:task:{make_task('b').id}")
    client.xtrim(f"{PREFIX}:tasks", maxlen=2, approximate=False)
    expire_lease(client, queue)
    assert claim_next(queue).task.id == make_task("c").id
    assert [task.state for task in queue.list_tasks()] == ["learning"]
    assert queue.counts()["learning"] == 1


@pytest.mark.parametrize("consumer", ["worker", "other"])
def test_a_lease_whose_entry_is_claimed_by_hand_is_lost(queue: TaskQueue, client: redis.Redis, consumer: str) -> None:
    queue.submit(make_task("a"))
    lease = claim_next(queue, "worker")
    [(entry, _)] = client.xrange(f"{PREFIX}:tasks")
    client.xclaim(f"{PREFIX}:tasks", "trainers", consumer, 0, [entry])
    assert_every_call_is_refused(lease)
