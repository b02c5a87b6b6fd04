"""Cancelling and retrying tasks in every state."""

import pytest

from tasks.errors import WrongState
from tasks.queue import Task, TaskProgress, TaskQueue, TaskState
from tests.support.redis_servers import (
    FEWER_SERVERS_AND_PROTOCOLS,
    claim_next,
    make_ended_task,
    make_task,
    queue_fixtures,
)

address, client, queue = queue_fixtures(FEWER_SERVERS_AND_PROTOCOLS)


def test_a_queued_task_is_cancelled_at_once(queue: TaskQueue) -> None:
    first, second = (queue.submit(make_task(name)).task for name in "ab")
    assert queue.cancel(first.id).state == "cancelled"
    assert queue.cancel(first.id).state == "cancelled"
    assert claim_next(queue).task.id == second.id


def test_a_leased_task_is_marked_and_its_worker_ends_it(queue: TaskQueue) -> None:
    task = queue.submit(make_task("a")).task
    lease = claim_next(queue)
    assert not lease.renew()
    marked = queue.cancel(task.id)
    assert (marked.state, marked.cancel_requested) == ("learning", True)
    assert lease.renew()
    assert lease.progress(TaskProgress(phase="gate"), "evaluating")
    assert queue.cancel(task.id).state == "evaluating"
    ended = lease.hand_back()
    assert (ended.state, ended.cancel_requested, ended.reason) == (
        *("cancelled", False),
        "cancelled while it was being learned",
    )
    assert queue.claim("worker") is None


def test_a_cancelled_task_is_published_when_its_worker_has_finished(queue: TaskQueue) -> None:
    task = queue.submit(make_task("a")).task
    lease = claim_next(queue)
    queue.cancel(task.id)
    assert lease.publish(1).cancel_requested is False


@pytest.mark.parametrize("again", ["submit", "retry"])
def test_a_submission_or_retry_withdraws_the_cancellation(queue: TaskQueue, again: str) -> None:
    task = queue.submit(make_task("a")).task
    lease = claim_next(queue)
    queue.cancel(task.id)
    if again == "submit":
        queue.submit(make_task("a"))
    else:
        queue.retry(task.id)
    assert not lease.renew()
    assert lease.hand_back().state == "queued"  # the worker saw the request, but not its withdrawal
    assert claim_next(queue).task.id == task.id


@pytest.mark.parametrize("state", ["published", "failed", "rejected"])
def test_an_ended_task_cannot_be_cancelled(queue: TaskQueue, state: TaskState) -> None:
    ended = make_ended_task(queue, state)
    with pytest.raises(WrongState, match=f"is {state} already"):
        queue.cancel(ended.id)
    assert queue.get(ended.id) == ended


@pytest.mark.parametrize("state", ["failed", "rejected", "cancelled"])
def test_a_task_that_was_not_published_can_be_retried(queue: TaskQueue, state: TaskState) -> None:
    ended = make_ended_task(queue, state)
    later = queue.submit(make_task("later")).task
    again = queue.retry(ended.id)
    assert (again.state, again.attempts, again.reason, again.created) == ("queued", 0, None, ended.created)
    assert queue.retry(ended.id).state == "queued"
    assert queue.list_tasks(states=["failed"]) == []
    for task_id in (later.id, ended.id):  # it is queued behind the later task
        lease = claim_next(queue)
        assert lease.task.id == task_id
        lease.publish(1)


def test_a_retry_does_not_disturb_a_task_under_way(queue: TaskQueue) -> None:
    task = queue.submit(make_task("a")).task
    lease = claim_next(queue)
    assert queue.retry(task.id).state == "learning"
    lease.publish(4)
    with pytest.raises(WrongState, match="as version 4"):
        queue.retry(task.id)


@pytest.mark.parametrize("again", ["submit", "retry"])
def test_a_published_task_that_a_roll_back_removed_is_queued_again(queue: TaskQueue, again: str) -> None:
    ended = make_ended_task(queue, "published")
    submission = queue.get(ended.id).submission

    def repeat(learned: bool) -> Task:
        if again == "retry":
            return queue.retry(ended.id, learned=learned)
        return queue.submit(make_task("a"), learned=learned).task

    if again == "submit":
        assert repeat(learned=True).state == "published"
    else:
        with pytest.raises(WrongState):
            repeat(learned=True)
    queued = repeat(learned=False)
    assert (queued.state, queued.version, queued.attempts) == ("queued", None, 0)
    assert queued.submission not in ("", submission)
    assert claim_next(queue).task.submission == queued.submission
