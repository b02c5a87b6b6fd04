"""Processes killed at every step: an accepted task is learned exactly once, or reported as failed with its reason."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx2 as httpx
import pytest

from models.versions.store import VersionStore
from tasks.images import ImageStore
from tests.support.learning_loop import LEASE, Loop, batch, loop, wait_for_death
from tests.support.waiting import wait_until

SERVER_STEPS = ["request accepted", "images stored", "task added"]
TRAINER_STEPS = [
    "task claimed",
    "cache entry",  # half of one is written
    "mid-epoch",
    "back-updating",
    "task file",  # half of it is written
    "written",  # the contents of the version
    "numbered",  # its manifest
    "logged",
    "promoted",  # CURRENT is replaced
    "before the acknowledgement",
]


def submitted(running: Loop, name: str) -> str:
    response = running.submit(batch(name, f"{name} too"))
    assert response.status_code == 202, response.text
    return str(response.json()["id"])


@pytest.mark.parametrize("step", SERVER_STEPS)
def test_a_server_killed_while_accepting_a_task_loses_no_accepted_task(tmp_path: Path, step: str) -> None:
    with loop(tmp_path) as running:
        server = running.start("serve", fault=step)
        running.start("train")
        with pytest.raises(httpx.TransportError):  # no 202, so no promise
            submitted(running, "fresh")
        wait_for_death(server)
        running.start("serve")
        # The client retries with the same idempotency key and gets the same task if it was stored.
        id = submitted(running, "fresh")
        running.check_learned_once(id)


@pytest.mark.parametrize("step", TRAINER_STEPS)
def test_another_trainer_continues_the_task_of_a_killed_one(tmp_path: Path, step: str) -> None:
    with loop(tmp_path) as running:
        running.start("serve")
        id = submitted(running, "fresh")
        wait_for_death(running.start("train", fault=step))
        running.start("train")
        running.check_learned_once(id)
        # 1 if the trainer reported a checkpoint before it was killed
        assert running.task(id)["attempts"] in ([2] if step == "task claimed" else [1, 2])


def test_restarts_of_a_trainer_whose_checkpoint_advances_do_not_use_up_the_attempts(tmp_path: Path) -> None:
    with loop(tmp_path, max_attempts="1", epochs="4") as running:
        running.start("serve")
        id = submitted(running, "fresh")
        for epoch in (1, 2):
            with running.holding_trainers(epoch):
                trainer = running.start("train")
                wait_until(lambda epoch=epoch: running.finished_epochs(id) >= epoch, 60)
                trainer.kill()
                trainer.wait()
        running.start("train")
        running.check_learned_once(id)
        assert running.task(id)["attempts"] == 1


@pytest.mark.parametrize("step", ["task claimed", "mid-epoch", "numbered", "promoted", "before the acknowledgement"])
def test_a_redis_killed_during_training_loses_no_task(tmp_path: Path, step: str) -> None:
    with loop(tmp_path) as running:
        running.start("serve")
        id = submitted(running, "fresh")
        assert running.redis.pid is not None
        running.start("train", fault=step, victim=running.redis.pid)
        wait_until(lambda: not running.redis.alive, 120)
        running.redis.start()
        running.check_learned_once(id)


def test_a_redis_killed_during_submission_loses_no_task(tmp_path: Path) -> None:
    with loop(tmp_path) as running:
        assert running.redis.pid is not None
        running.start("serve", fault="images stored", victim=running.redis.pid)
        refused = running.submit(batch("fresh", "fresh too"))
        assert (refused.status_code, refused.json()["code"]) == (503, "queue_unavailable")
        assert int(refused.headers["Retry-After"]) >= 1
        running.redis.start()
        running.start("train")
        running.check_learned_once(submitted(running, "fresh"))


def test_a_trainer_that_lost_its_lease_cannot_publish(tmp_path: Path) -> None:
    with loop(tmp_path) as running:
        running.start("serve")
        id = submitted(running, "fresh")
        with running.holding_trainers():
            zombie = running.start("train")
            running.wait_for_progress(id)
            os.kill(zombie.pid, signal.SIGSTOP)
        time.sleep(2 * LEASE)
        heir = running.start("train")
        running.check_learned_once(id)
        other = submitted(running, "another")
        os.kill(zombie.pid, signal.SIGCONT)
        running.check_learned_once(id)
        running.check_learned_once(other)
        assert heir.poll() is None
        assert zombie.poll() is None  # it dropped the task and keeps working


def test_twenty_batches_at_once_become_eighteen_versions_in_order(tmp_path: Path) -> None:
    """Two of the batches are identical, and one cannot be learned."""
    with loop(tmp_path, replay_size="200") as running:
        running.start("serve")
        first = [f"kind {number}" for number in range(18)]
        ids = [running.submit(batch(name, f"{name} too"), key=name).json()["id"] for name in first]
        again = running.submit(batch(first[3], f"{first[3]} too"), key=first[3])
        assert (again.status_code, again.json()["id"], again.json()["fresh"]) == (202, ids[3], False)
        poisoned = running.submit(batch("poison", "poison too")).json()["id"]
        lost = next(iter(running.queue.get(poisoned).classes.values()))[0]
        ImageStore(running.data).remove(lost)
        running.start("train")
        for id in ids:
            running.check_learned_once(id)
        dead = running.wait_until_ended(poisoned)
        assert dead["state"] == "failed"
        assert lost in dead["reason"]
        versions = [running.task(id)["version"] for id in ids]
        assert versions == list(range(4, 22))
        failed = httpx.get(f"{running.url}/tasks", params={"state": "failed"}, timeout=30).json()["tasks"]
        assert [(task["id"], task["reason"]) for task in failed] == [(poisoned, dead["reason"])]
        assert VersionStore(running.data).current() == 21
        counts = running.queue.counts()
        assert (counts["queued"], counts["learning"], counts["published"], counts["failed"]) == (0, 0, 18, 1)
