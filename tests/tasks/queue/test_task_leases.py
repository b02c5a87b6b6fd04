"""Leases: one worker at a time, in order; an expired lease is taken over, and its late calls are refused."""

import threading
import time
from collections.abc import Callable

import pytest
import redis

from tasks.errors import LeaseLost
from tasks.queue import Lease, TaskProgress
from tasks.queue import queue as queue_module
from tasks.queue.queue import GROUP, TaskQueue
from tests.support.redis_servers import (
    EVERY_CALL,
    PREFIX,
    SERVERS_AND_PROTOCOLS,
    age_lease,
    assert_every_call_is_refused,
    claim_next,
    expire_lease,
    make_task,
    move_lease_to_the_future,
    queue_fixtures,
)

SHORT_LEASE = 0.3  # seconds


address, client, queue = queue_fixtures(SERVERS_AND_PROTOCOLS)


def test_tasks_are_leased_in_order_one_at_a_time(queue: TaskQueue) -> None:
    ids = [queue.submit(make_task(name)).task.id for name in "abc"]
    for task_id in ids:
        lease = claim_next(queue)
        assert (lease.task.id, lease.task.state, lease.task.attempts) == (task_id, "learning", 1)
        assert queue.claim("worker") is None
        assert queue.claim("other") is None
        lease.publish(1)
    assert queue.claim("worker") is None


def test_concurrent_workers_get_one_lease(queue: TaskQueue) -> None:
    queue.submit(make_task("a"))
    queue.submit(make_task("b"))
    leases: list[Lease | None] = []
    threads = [threading.Thread(target=lambda n=n: leases.append(queue.claim(f"worker {n}"))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(lease is not None for lease in leases) == 1


def test_a_waiting_worker_gets_a_new_task_at_once(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a notice the worker would wait for longer than the client waits for a reply.
    monkeypatch.setattr(queue_module, "POLL_SECONDS", 600)
    monkeypatch.setattr(queue_module, "SOCKET_SECONDS", 600)
    timer = threading.Timer(0.1, lambda: queue.submit(make_task("a")))
    timer.start()
    assert queue.claim("worker", block_seconds=100)
    timer.join()


def test_a_claim_blocks_no_longer_than_asked(queue: TaskQueue) -> None:
    queue.submit(make_task("a"))
    claim_next(queue)
    queue.submit(make_task("b"))
    started = time.monotonic()
    assert queue.claim("other", block_seconds=0.2) is None
    assert 0.15 < time.monotonic() - started < 20


def test_a_lease_lasts_as_long_as_it_is_renewed(client: redis.Redis) -> None:
    queue = TaskQueue(client, PREFIX, lease_seconds=600)
    queue.submit(make_task("a"))
    lease = claim_next(queue)
    for renew in (lease.renew, lambda: lease.progress(TaskProgress(phase="heads")), lease.renew):
        age_lease(client, queue, 400)
        assert queue.claim("other") is None
        renew()
        [row] = client.xpending_range(f"{PREFIX}:tasks", GROUP, "-", "+", 10)
        assert row["time_since_delivered"] < 300_000
    assert lease.publish(1).attempts == 1


def test_an_expired_lease_is_taken_over_and_the_old_worker_refused(client: redis.Redis) -> None:
    queue = TaskQueue(client, PREFIX, lease_seconds=SHORT_LEASE)
    queue.submit(make_task("a"))
    queue.submit(make_task("b"))
    old = claim_next(queue)
    started = time.monotonic()
    lease = queue.claim("other", block_seconds=30)
    assert time.monotonic() - started >= SHORT_LEASE * 0.9
    assert lease
    assert (lease.task.id, lease.task.attempts) == (old.task.id, 2)
    before = queue.get(lease.task.id)
    assert_every_call_is_refused(old)
    assert queue.get(lease.task.id) == before
    lease.publish(1)
    assert_every_call_is_refused(old)
    assert queue.get(lease.task.id).version == 1


def test_a_lease_expires_although_the_clock_was_set_back(client: redis.Redis, address: tuple[str, int]) -> None:
    queue = TaskQueue(client, PREFIX, lease_seconds=SHORT_LEASE)
    queue.submit(make_task("a"))
    old = claim_next(queue)
    move_lease_to_the_future(address[0], f"{PREFIX}:tasks", 31 * 86400)
    assert queue.claim("other") is None
    assert old.renew() is False  # its worker may live
    move_lease_to_the_future(address[0], f"{PREFIX}:tasks", 31 * 86400)
    lease = queue.claim("other", block_seconds=30)
    assert lease
    assert (lease.task.id, lease.task.attempts) == (old.task.id, 2)
    lease.publish(1)


def test_an_old_worker_with_the_same_name_is_refused_too(queue: TaskQueue, client: redis.Redis) -> None:
    queue.submit(make_task("a"))
    old = claim_next(queue, "trainer-0")
    expire_lease(client, queue)
    lease = claim_next(queue, "trainer-0")
    assert_every_call_is_refused(old)
    lease.renew()


def test_the_lease_of_an_earlier_run_of_a_retried_task_is_refused(queue: TaskQueue) -> None:
    queue.submit(make_task("a"))
    old = claim_next(queue)
    held_once = queue.get(old.task.id)
    old.fail("no", retry=False)
    queue.retry(held_once.id)
    claim_next(queue).renew()
    assert_every_call_is_refused(old)


def test_a_worker_that_handed_its_task_back_is_refused_once_another_holds_it(queue: TaskQueue) -> None:
    queue.submit(make_task("a"))
    before = claim_next(queue)
    before.hand_back()
    assert before.hand_back().state == "queued"
    claim_next(queue).renew()
    assert_every_call_is_refused(before)


def test_an_expired_lease_that_was_not_taken_over_is_still_valid(queue: TaskQueue, client: redis.Redis) -> None:
    queue.submit(make_task("a"))
    lease = claim_next(queue)
    expire_lease(client, queue)
    lease.renew()
    assert queue.claim("other") is None
    expire_lease(client, queue)
    assert lease.publish(1).state == "published"


def test_a_lease_ended_in_one_way_cannot_end_in_another(queue: TaskQueue) -> None:
    queue.submit(make_task("a"))
    lease = claim_next(queue)
    task = lease.publish(1)
    assert lease.publish(1) == task
    for call in EVERY_CALL[:2] + EVERY_CALL[3:]:
        with pytest.raises(LeaseLost):
            call(lease)


# Attempts


def test_a_task_whose_workers_all_died_ends_as_failed_and_is_listed_with_its_reason(
    queue: TaskQueue, client: redis.Redis
) -> None:
    task = queue.submit(make_task("a")).task
    other = queue.submit(make_task("b")).task
    for attempt in (1, 2, 3):
        assert claim_next(queue).task.attempts == attempt
        expire_lease(client, queue)
    assert claim_next(queue).task.id == other.id
    failed = queue.get(task.id)
    assert (failed.state, failed.attempts) == ("failed", 3)
    assert failed.reason
    assert failed.reason.startswith("given up after 3 attempts: the worker stopped without a report")
    [listed] = queue.list_tasks(states=["failed"])
    assert (listed.id, listed.reason, listed.attempts) == (task.id, failed.reason, 3)
    assert listed.updated == failed.updated


def test_a_task_that_fails_too_often_ends_as_failed_and_is_listed_with_its_reason(queue: TaskQueue) -> None:
    first, second = (queue.submit(make_task(name)).task for name in "ab")
    for attempt in (1, 2):
        lease = claim_next(queue)
        assert (lease.task.id, lease.task.attempts) == (first.id, attempt)
        waiting = lease.fail(f"no disk {attempt}", retry=True)
        assert (waiting.state, waiting.reason) == ("queued", f"no disk {attempt}")
    failed = claim_next(queue).fail("no disk 3", retry=True)
    assert (failed.state, failed.reason) == ("failed", "given up after 3 attempts: no disk 3")
    assert [listed.reason for listed in queue.list_tasks(states=["failed"])] == [failed.reason]
    assert claim_next(queue).task.id == second.id


def test_the_last_reason_is_kept_when_the_last_worker_dies(client: redis.Redis) -> None:
    queue = TaskQueue(client, PREFIX, max_attempts=2)
    task = queue.submit(make_task("a")).task
    claim_next(queue).fail("no disk", retry=True)
    claim_next(queue)
    expire_lease(client, queue)
    assert queue.claim("other") is None
    assert (queue.get(task.id).reason or "").endswith("; before that: no disk")


def test_a_failure_without_retry_is_final(queue: TaskQueue) -> None:
    queue.submit(make_task("a"))
    failed = claim_next(queue).fail("not an image: \udcff" + "x" * 9000, retry=False)
    assert (failed.state, failed.attempts) == ("failed", 1)
    assert failed.reason
    assert failed.reason.startswith("not an image: ?x")
    assert len(failed.reason) == 4000
    assert len(queue.list_tasks(states=["failed"])) == 1


def test_a_task_handed_back_is_requeued_at_the_head_without_counting_the_attempt(queue: TaskQueue) -> None:
    first, second = (queue.submit(make_task(name)).task for name in "ab")
    for _ in range(5):
        lease = claim_next(queue)
        assert (lease.task.id, lease.task.attempts) == (first.id, 1)
        lease.progress(TaskProgress(phase="heads"))
        back = lease.hand_back()
        assert (back.state, back.attempts, back.progress) == ("queued", 0, None)
    claim_next(queue, "other").publish(1)
    assert claim_next(queue).task.id == second.id


def test_a_task_handed_back_can_be_cancelled(queue: TaskQueue) -> None:
    task = queue.submit(make_task("a")).task
    claim_next(queue).hand_back()
    assert queue.cancel(task.id).state == "cancelled"
    assert queue.claim("worker") is None


@pytest.mark.parametrize("end", [Lease.hand_back, lambda lease: lease.fail("no", retry=True)])
def test_a_cancelled_task_is_not_requeued(queue: TaskQueue, end: Callable[[Lease], object]) -> None:
    task = queue.submit(make_task("a")).task
    lease = claim_next(queue)
    queue.cancel(task.id)
    end(lease)
    assert queue.get(task.id).state == "cancelled"


def test_a_cancelled_task_whose_worker_died_is_not_leased_again(queue: TaskQueue, client: redis.Redis) -> None:
    task = queue.submit(make_task("a")).task
    claim_next(queue)
    queue.cancel(task.id)
    expire_lease(client, queue)
    assert queue.claim("other") is None
    assert queue.get(task.id).state == "cancelled"


@pytest.mark.parametrize("name", ["", "-"])
def test_a_worker_needs_a_name(queue: TaskQueue, name: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        queue.claim(name)


def let_it_die(client: redis.Redis, queue: TaskQueue, checkpoint: int = 0, stopping: bool = False) -> int:
    """Claim the task, work on it and let the lease expire; returns the attempts at that time."""
    lease = claim_next(queue)
    lease.progress(TaskProgress(phase="task 1"), checkpoint=checkpoint)
    if stopping:
        lease.renew(stopping=True)
    expire_lease(client, queue)
    return lease.task.attempts


def test_an_attempt_that_advanced_the_checkpoint_does_not_count(queue: TaskQueue, client: redis.Redis) -> None:
    task = queue.submit(make_task("a")).task
    assert [let_it_die(client, queue, epoch) for epoch in range(1, 6)] == [1] * 5
    # From here on the checkpoint stays where it is, or starts again.
    assert [let_it_die(client, queue, epoch) for epoch in (5, 3, 0)] == [1, 2, 3]
    assert queue.claim("worker") is None
    assert queue.get(task.id).state == "failed"
    assert "given up after 3 attempts" in str(queue.get(task.id).reason)
    assert queue.retry(task.id).attempts == 0
    assert [let_it_die(client, queue, epoch) for epoch in (1, 1, 1)] == [1, 1, 2]  # a retry starts from nothing


def test_a_failure_after_the_checkpoint_advanced_does_not_count(queue: TaskQueue) -> None:
    queue.submit(make_task("a"))
    for epoch in range(1, 5):
        lease = claim_next(queue)
        lease.progress(TaskProgress(phase="task 1"), checkpoint=epoch)
        assert (lease.fail("out of memory", retry=True).state, lease.task.attempts) == ("queued", 1)
    states = [claim_next(queue).fail("out of memory", retry=True).state for _ in range(3)]
    assert states == ["queued", "queued", "failed"]


def test_a_worker_that_is_killed_while_it_stops_costs_no_attempt(queue: TaskQueue, client: redis.Redis) -> None:
    queue.submit(make_task("a"))
    assert [let_it_die(client, queue, stopping=True) for _ in range(5)] == [1] * 5
    lease = claim_next(queue)
    lease.renew(stopping=True)
    assert lease.hand_back().attempts == 0
