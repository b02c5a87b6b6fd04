"""What a task shows of its training: progress while it is learned, then its result; nothing is left to do."""

from collections.abc import Callable

import numpy as np
import redis

from tasks.queue import Lease, Task, TaskProgress
from tasks.queue.queue import TaskQueue
from tests.support.redis_servers import (
    PREFIX,
    SERVERS_AND_PROTOCOLS,
    claim_next,
    make_task,
    queue_fixtures,
)

address, client, queue = queue_fixtures(SERVERS_AND_PROTOCOLS)


def test_the_progress_that_a_worker_reports_can_be_read(queue: TaskQueue) -> None:
    task = queue.submit(make_task("a")).task
    lease = claim_next(queue)
    progress = TaskProgress(phase="heads", epoch=2, epochs=5, loss=0.5, progress=0.4, seconds_left=9, losses=(0.9, 0.5))
    lease.progress(progress)
    assert queue.get(task.id).progress == progress
    lease.progress(progress, "evaluating")
    assert queue.get(task.id).state == queue.list_tasks()[0].state == "evaluating"


def test_a_published_task_keeps_version_metrics_and_loss_curve(queue: TaskQueue) -> None:
    queue.submit(make_task("a"))
    lease = claim_next(queue)
    lease.progress(TaskProgress(phase="heads", losses=(0.5,)))
    result = {"tasks": ({"accuracy": np.float32(0.5)},), "auc": float("nan"), "n": np.arange(2), "other": {1j}}
    task = lease.publish(7, result)
    assert (task.state, task.version, task.reason) == ("published", 7, None)
    assert task.result == {"tasks": [{"accuracy": 0.5}], "auc": None, "n": [0, 1], "other": ["1j"]}
    assert task.progress
    assert task.progress.losses == (0.5,)
    assert queue.get(task.id) == task


def test_an_ended_task_has_no_seconds_left_and_a_learned_one_is_complete(queue: TaskQueue) -> None:
    ends: dict[str, Callable[[Lease], Task]] = {
        "published": lambda lease: lease.publish(7, {}),
        "rejected": lambda lease: lease.reject("forgot the cats", {}),
        "failed": lambda lease: lease.fail("a bad batch", retry=False),
    }
    for state, end in ends.items():
        id = queue.submit(make_task(state)).task.id
        lease = claim_next(queue)
        lease.progress(TaskProgress(phase="evaluating", progress=0.25, seconds_left=0.5, losses=(0.5,)), "evaluating")
        assert end(lease).state == state
        for found in (queue.get(id), queue.summary(id)):
            assert found.progress
            assert (found.progress.seconds_left, found.progress.losses) == (None, (0.5,))
            assert found.progress.progress == (0.25 if state == "failed" else 1)


def test_a_rejected_task_has_its_reason(queue: TaskQueue) -> None:
    queue.submit(make_task("a"))
    task = claim_next(queue).reject("forgot the cats", {"accuracy": 0.1})
    assert (task.state, task.version, task.reason, task.result) == (
        *("rejected", None, "forgot the cats"),
        {"accuracy": 0.1},
    )


def test_a_finished_task_leaves_nothing_in_the_stream(queue: TaskQueue, client: redis.Redis) -> None:
    for name in "ab":
        queue.submit(make_task(name))
    claim_next(queue, "one").publish(1)
    claim_next(queue, "two").hand_back()
    claim_next(queue, "three").fail("no", retry=False)
    assert client.xlen(f"{PREFIX}:tasks") == 0
    assert client.xpending(f"{PREFIX}:tasks", "trainers")["pending"] == 0
    assert client.xinfo_consumers(f"{PREFIX}:tasks", "trainers") == []


# Expired leases
