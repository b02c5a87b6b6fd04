"""Cancelling and retrying a task, in every state that it can be in."""

import pytest

from tasks.errors import WrongState
from tasks.queue import TaskProgress, TaskQueue, TaskState
from tests.support.redis_servers import (
    FEWER_SERVERS_AND_PROTOCOLS,
    claim_next,
    make_ended_task,
    make_task,
    queue_fixtures,
)

address, client, queue = queue_fixtures(FEWER_SERVERS_AND_PROTOCOLS)


def test_a_waiting_task_is_cancelled_at_once(queue: TaskQueue) -> None:
    first, second = (queue.submit(make_task(name)).task for name in "ab")
    assert queue.cancel(first.id).state == "cancelled"
    assert queue.cancel(first.id).state == "cancelled"
    assert claim_next(queue).task.id == second.id


def test_a_task_that_is_being_learned_is_flagged_and_its_worker_ends_it(queue: TaskQueue) -> None:
    task = queue.submit(make_task("a")).task
    lease = claim_next(queue)
    assert not lease.renew()
    asked = queue.cancel(task.id)
    assert (asked.state, asked.cancel_requested) == ("learning", True)
    assert lease.renew()
    assert lease.progress(TaskProgress(phase="gate"), "evaluating")
    assert queue.cancel(task.id).state == "evaluating"
    ended = lease.hand_back()
    assert (ended.state, ended.cancel_requested, ended.reason) == (
        *("cancelled", False),
        "cancelled while it was being learned",
    )
    assert queue.claim("worker") is None


def test_a_cancelled_task_whose_worker_is_done_already_is_published(queue: TaskQueue) -> None:
    task = queue.submit(make_task("a")).task
    lease = claim_next(queue)
    queue.cancel(task.id)
    assert lease.publish(1).cancel_requested is False


@pytest.mark.parametrize("again", ["submit", "retry"])
def test_a_request_to_cancel_is_withdrawn_by_asking_for_the_task_again(queue: TaskQueue, again: str) -> None:
    task = queue.submit(make_task("a")).task
    lease = claim_next(queue)
    queue.cancel(task.id)
    if again == "submit":
        queue.submit(make_task("a"))
    else:
        queue.retry(task.id)
    assert not lease.renew()
    assert lease.hand_back().state == "queued"  # the worker had seen the request, but not that it was withdrawn
    assert claim_next(queue).task.id == task.id


@pytest.mark.parametrize("state", ["published", "failed", "rejected"])
def test_a_task_that_ended_cannot_be_cancelled(queue: TaskQueue, state: TaskState) -> None:
    ended = make_ended_task(queue, state)
    with pytest.raises(WrongState, match=f"is {state} already"):
        queue.cancel(ended.id)
    assert queue.get(ended.id) == ended


@pytest.mark.parametrize("state", ["failed", "rejected", "cancelled"])
def test_a_task_that_was_not_learned_can_be_retried(queue: TaskQueue, state: TaskState) -> None:
    ended = make_ended_task(queue, state)
    later = queue.submit(make_task("later")).task
    again = queue.retry(ended.id)
    assert (again.state, again.attempts, again.reason, again.created) == ("queued", 0, None, ended.created)
    assert queue.retry(ended.id).state == "queued"
    assert queue.list_tasks(states=["failed"]) == []
    for task_id in (later.id, ended.id):  # it has lost its place
        lease = claim_next(queue)
        assert lease.task.id == task_id
        lease.publish(1)


def test_a_task_under_way_is_not_disturbed_by_a_retry(queue: TaskQueue) -> None:
    task = queue.submit(make_task("a")).task
    lease = claim_next(queue)
    assert queue.retry(task.id).state == "learning"
    lease.publish(4)
    with pytest.raises(WrongState, match="as version 4"):
        queue.retry(task.id)
