"""Submitting and reading tasks: accepted once, in order, within limits, and kept for a while after they ended."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import redis
from redis.crc import key_slot

from tasks.errors import IdempotencyConflict, QueueFull, QueueUnavailable, UnknownTask
from tasks.queue import STATES, TaskProgress, TaskQueue, TaskState, connect, key_prefix
from tests.support.redis_servers import (
    PREFIX,
    SERVERS_AND_PROTOCOLS,
    claim_next,
    make_ended_task,
    make_task,
    queue_fixtures,
    run_script_twice,
)

T = TypeVar("T")


address, client, queue = queue_fixtures(SERVERS_AND_PROTOCOLS)


def run_concurrently(calls: list[Callable[[], T]]) -> list[T | Exception]:
    """Make the calls at the same moment, one thread each, and return their results or errors."""
    results: list[T | Exception] = []
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> None:
        barrier.wait()
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# Submitting


def test_a_submitted_task_is_queued_as_it_was_given(queue: TaskQueue) -> None:
    task = make_task("a", duplicates=3, submitted_by="Zoë", classes={"čtyři": ["0" * 64]}, submitted_at=2)
    submitted = queue.submit(task)
    assert submitted.fresh
    assert submitted.task.submission
    assert submitted.task.model_copy(update={"updated": task.updated, "submission": ""}) == task
    assert queue.get(task.id) == submitted.task


def test_the_same_batch_is_the_same_task_while_it_is_queued_leased_and_published(queue: TaskQueue) -> None:
    task = queue.submit(make_task("a")).task
    assert not queue.submit(make_task("a")).fresh
    lease = claim_next(queue)
    assert queue.submit(make_task("a")).task.state == "learning"
    lease.publish(7)
    again = queue.submit(make_task("a"))
    assert (again.fresh, again.task.id, again.task.version) == (False, task.id, 7)
    assert queue.claim("worker") is None


@pytest.mark.parametrize("state", ["failed", "rejected", "cancelled"])
def test_a_batch_that_was_not_published_is_queued_again(queue: TaskQueue, state: TaskState) -> None:
    make_ended_task(queue, state)
    again = queue.submit(make_task("a", submitted_by="bob"))
    assert again.fresh
    assert again.task.state == "queued"
    assert (again.task.attempts, again.task.reason, again.task.submitted_by) == (0, None, "bob")
    assert queue.list_tasks(states=["failed"]) == []
    assert claim_next(queue).task.attempts == 1


@pytest.mark.parametrize("state", ["published", "failed", "rejected", "cancelled"])
def test_the_same_key_and_batch_is_the_first_task_in_any_final_state(queue: TaskQueue, state: TaskState) -> None:
    queue.submit(make_task("a"), "key")
    ended = make_ended_task(queue, state)
    again = queue.submit(make_task("a"), "key")
    assert (again.task, again.fresh) == (ended, False)


def test_the_same_key_with_another_batch_is_refused(queue: TaskQueue) -> None:
    first = queue.submit(make_task("a"), "key").task
    with pytest.raises(IdempotencyConflict, match=f"{first.id}: use a new key"):
        queue.submit(make_task("b"), "key")
    assert queue.counts()["queued"] == 1


def test_a_key_sent_with_a_known_batch_is_used_up_too(queue: TaskQueue) -> None:
    queue.submit(make_task("a"))
    assert not queue.submit(make_task("a"), "key").fresh
    with pytest.raises(IdempotencyConflict):
        queue.submit(make_task("b"), "key")


def test_keys_are_separate_per_submitter(queue: TaskQueue) -> None:
    queue.submit(make_task("a", submitted_by="ann"), "1")
    assert queue.submit(make_task("b", submitted_by="bob"), "1").fresh


def test_a_key_is_stored_hashed_and_expires(queue: TaskQueue, client: redis.Redis) -> None:
    queue.submit(make_task("a"), "secret")
    [key] = client.keys(f"{PREFIX}:idempotency:*")
    assert "secret" not in key
    assert 6.9 * 86400 < client.ttl(key) <= 7 * 86400


def test_sixteen_concurrent_submissions_with_one_key_make_one_task(queue: TaskQueue, client: redis.Redis) -> None:
    results = run_concurrently([lambda: queue.submit(make_task("a"), "key")] * 16)
    assert sorted(result.fresh for result in results if not isinstance(result, Exception)) == [False] * 15 + [True]
    assert client.xlen(f"{PREFIX}:tasks") == 1


def test_of_sixteen_concurrent_batches_with_one_key_one_is_accepted(queue: TaskQueue) -> None:
    results = run_concurrently([lambda n=n: queue.submit(make_task(n), "key") for n in range(16)])
    assert sum(isinstance(result, IdempotencyConflict) for result in results) == 15
    assert queue.counts()["queued"] == 1


def test_sixteen_concurrent_tasks_are_all_accepted(queue: TaskQueue) -> None:
    results = run_concurrently([lambda n=n: queue.submit(make_task(n)) for n in range(16)])
    assert all(not isinstance(result, Exception) and result.fresh for result in results)
    assert queue.counts()["queued"] == 16


def test_a_repeated_submission_after_a_lost_reply_is_still_fresh(queue: TaskQueue) -> None:
    run_script_twice(queue, "submit")
    assert queue.submit(make_task("a")).fresh
    assert queue.submit(make_task("b"), "key").fresh
    assert queue.counts()["queued"] == 2


def test_a_full_queue_refuses_new_tasks_and_accepts_known_ones(client: redis.Redis) -> None:
    queue = TaskQueue(client, PREFIX, max_waiting=2)
    failed = make_ended_task(queue, "failed", "f")
    for name in "abc":  # the leased task does not count as waiting
        queue.submit(make_task(name))
        if name == "a":
            lease = claim_next(queue)
    for refused in (lambda: queue.submit(make_task("d")), lambda: queue.retry(failed.id)):
        with pytest.raises(QueueFull, match="2 tasks are waiting already"):
            refused()
    assert not queue.submit(make_task("b")).fresh
    lease.publish(1)
    claim_next(queue)
    assert queue.submit(make_task("d")).fresh


# Reading


def test_tasks_are_listed_newest_first_in_pages_and_by_state(queue: TaskQueue) -> None:
    ids = [queue.submit(make_task(name)).task.id for name in "abcde"]
    claim_next(queue)
    assert [task.id for task in queue.list_tasks(limit=2)] == ids[:2:-1]
    assert [task.id for task in queue.list_tasks(limit=2, before=ids[3])] == [ids[2], ids[1]]
    assert [task.id for task in queue.list_tasks(before=ids[0])] == []
    assert [task.id for task in queue.list_tasks(states=["learning"])] == ids[:1]
    assert [task.id for task in queue.list_tasks(limit=1, states=["learning", "queued"])] == ids[4:]
    with pytest.raises(UnknownTask):
        queue.list_tasks(before="nothing")


def test_a_list_counts_images_and_a_task_names_them(queue: TaskQueue) -> None:
    task = queue.submit(make_task("a")).task
    [summary] = queue.list_tasks()
    assert summary.counts == task.counts == {"class a": 2}
    assert summary.model_dump(exclude={"counts"}) == task.model_dump(exclude={"classes", "submission", "submitted_at"})


def test_tasks_are_counted_by_state(queue: TaskQueue) -> None:
    assert queue.counts() == dict.fromkeys(STATES, 0)
    for state in ("published", "rejected", "failed", "cancelled"):
        make_ended_task(queue, state, state)
    queue.submit(make_task("a"))
    queue.submit(make_task("b"))
    claim_next(queue).progress(TaskProgress(phase="gate"), "evaluating")
    assert queue.counts() == dict.fromkeys(STATES, 1) | {"learning": 0}


def test_the_oldest_age_is_that_of_the_first_unfinished_task(queue: TaskQueue) -> None:
    assert queue.oldest_age() is None
    make_ended_task(queue, "failed", "x")
    assert queue.oldest_age() is None
    queue.submit(make_task("a"))
    age = queue.oldest_age()
    assert age is not None
    assert 0 <= age < 5


def test_the_images_of_unfinished_tasks_are_listed_per_task(queue: TaskQueue) -> None:
    assert queue.unfinished_images() == {}
    tasks = [queue.submit(make_task(name)).task for name in ("one", "two", "three")]
    queue.cancel(tasks[0].id)
    claim_next(queue)
    assert queue.unfinished_images() == {
        task.id: {sha for images in task.classes.values() for sha in images} for task in tasks[1:]
    }


def test_the_clock_dates_the_records(client: redis.Redis) -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    queue = TaskQueue(client, PREFIX, clock=lambda: now)
    task = queue.submit(make_task("a")).task
    assert task.updated == now
    now += timedelta(hours=1)
    assert claim_next(queue).task.updated == now
    assert queue.get(task.id).created == task.created


def test_only_the_last_ended_tasks_are_kept(client: redis.Redis) -> None:
    queue = TaskQueue(client, PREFIX, history=3)
    waiting = queue.submit(make_task("waiting")).task
    retried = make_ended_task(queue, "cancelled", "retried")
    ended = [make_ended_task(queue, "cancelled", n) for n in range(2)]
    queue.retry(retried.id)
    ended += [make_ended_task(queue, "cancelled", n) for n in range(2, 5)]
    kept = [task.id for task in queue.list_tasks()]
    assert sorted(kept) == sorted([waiting.id, retried.id, *(task.id for task in ended[-3:])])
    assert len(client.keys(f"{PREFIX}:task:*")) == 5
    with pytest.raises(UnknownTask, match="the last 3 are kept"):
        queue.get(ended[0].id)


def test_the_number_of_kept_failed_tasks_is_bounded_too(client: redis.Redis) -> None:
    queue = TaskQueue(client, PREFIX, history=2)
    for n in range(4):
        make_ended_task(queue, "failed", n)
    assert [task.id for task in queue.list_tasks(states=["failed"])] == [make_task(3).id, make_task(2).id]


@pytest.mark.parametrize("task_id", ["nothing", "", "*", "a b", "\udcff"])
def test_an_unknown_id_is_an_error(queue: TaskQueue, task_id: str) -> None:
    for call in (queue.get, queue.cancel, queue.retry):
        with pytest.raises(UnknownTask, match="check the id"):
            call(task_id)


# Without Redis


def test_the_queue_is_unavailable_without_redis(tmp_path: Path) -> None:
    queue = TaskQueue(connect(f"unix://{tmp_path}/nothing.sock"), PREFIX)
    with pytest.raises(QueueUnavailable, match="check that Redis runs"):
        queue.get("a")
    for call in (queue.counts, queue.list_tasks, lambda: queue.claim("worker"), lambda: queue.submit(make_task("a"))):
        with pytest.raises(QueueUnavailable):
            call()


def test_redis_without_memory_refuses_a_task_as_a_whole(queue: TaskQueue, client: redis.Redis) -> None:
    queue.submit(make_task("a"))
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(QueueUnavailable, match=r"memory .*then try again"):
            queue.submit(make_task("b"), "key")
    finally:
        client.config_set("maxmemory", 0)
    assert [task.id for task in queue.list_tasks()] == [make_task("a").id]
    assert queue.submit(make_task("b"), "key").fresh


def test_an_invalid_address_is_refused() -> None:
    with pytest.raises(QueueUnavailable, match="OPENWORLD_REDIS_URL"):
        connect("localhost:6379")


def test_a_client_that_does_not_decode_is_refused() -> None:
    with pytest.raises(ValueError, match="connect"):
        TaskQueue(redis.Redis(), PREFIX)


def test_every_key_starts_with_the_prefix_and_is_on_one_node_of_a_cluster(
    queue: TaskQueue, client: redis.Redis
) -> None:
    queue.submit(make_task("a"), "an idempotency key")
    queue.cancel(make_task("a").id)
    queue.submit(make_task("b"))
    claim_next(queue)
    keys = [str(key) for key in client.keys("*")]
    assert len(keys) >= 6
    assert all(key.startswith("openworld:{0123456789abcdef}:") for key in keys)
    assert len({key_slot(key.encode()) for key in keys}) == 1


def test_queues_of_two_data_folders_do_not_see_each_others_tasks(queue: TaskQueue, client: redis.Redis) -> None:
    other = TaskQueue(client, key_prefix("fedcba9876543210"))
    task = queue.submit(make_task("a")).task
    assert other.claim("worker") is None
    assert other.list_tasks() == []
    with pytest.raises(UnknownTask):
        other.get(task.id)
    assert claim_next(queue).task.id == task.id


def test_waiting_tasks_are_listed_in_order_and_known_ones_are_not_read_again(queue: TaskQueue) -> None:
    first, second = (queue.submit(make_task(name)).task for name in "ab")
    assert [task.id for task in queue.waiting()] == [first.id, second.id]
    again = queue.waiting(known=[first])
    assert again[0] is first
    assert again[1] == second
    queue.cancel(first.id)
    assert queue.waiting(known=[first, second]) == [second]
    queue.retry(first.id)
    assert [task.id for task in queue.waiting(known=[first, second])] == [first.id, second.id]
    assert queue.waiting(known=[first, second])[0] != first  # another submission
