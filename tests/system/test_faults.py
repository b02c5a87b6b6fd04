"""Killed at every step: what was accepted is learned exactly once, or is reported with its reason."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx2 as httpx
import pytest

from models.versions.store import VersionStore
from tasks.images.store import ImageStore
from tests.support.learning_loop import LEASE, Loop, batch, loop, wait_for_death

SERVER_STEPS = ["request accepted", "images stored", "task added"]
TRAINER_STEPS = [
    "task claimed",
    "mid-epoch",
    "back-updating",
    "written",  # the artefact
    "renamed",
    "logged",
    "promoted",  # CURRENT is replaced
    "before the acknowledgement",
]


def submitted(running: Loop, name: str) -> str:
    response = running.submit(batch(name, f"{name} too"))
    assert response.status_code == 202, response.text
    return str(response.json()["id"])


@pytest.mark.parametrize("step", SERVER_STEPS)
def test_a_server_killed_while_it_accepts_a_task_loses_none_that_it_accepted(tmp_path: Path, step: str) -> None:
    with loop(tmp_path) as running:
        server = running.start("serve", fault=step)
        running.start("train")
        with pytest.raises(httpx.TransportError):  # no 202: nothing was promised
            submitted(running, "fresh")
        wait_for_death(server)
        running.start("serve")
        # The client does what clients do: it sends the same again. Was the task in, it is that task.
        id = submitted(running, "fresh")
        running.check_learned_once(id)


@pytest.mark.parametrize("step", TRAINER_STEPS)
def test_a_trainer_killed_at_any_step_is_replaced_by_one_that_goes_on(tmp_path: Path, step: str) -> None:
    with loop(tmp_path) as running:
        running.start("serve")
        id = submitted(running, "fresh")
        wait_for_death(running.start("train", fault=step))
        running.start("train")
        running.check_learned_once(id)
        assert running.task(id)["attempts"] == 2


@pytest.mark.parametrize("step", ["task claimed", "mid-epoch", "renamed", "promoted", "before the acknowledgement"])
def test_a_redis_killed_under_a_working_trainer_costs_nothing(tmp_path: Path, step: str) -> None:
    with loop(tmp_path) as running:
        running.start("serve")
        id = submitted(running, "fresh")
        assert running.redis.pid is not None
        running.start("train", fault=step, victim=running.redis.pid)
        end = time.monotonic() + 60
        while running.redis.alive:
            assert time.monotonic() < end
            time.sleep(0.02)
        running.redis.start()
        running.check_learned_once(id)


def test_a_redis_killed_while_the_server_submits_costs_nothing(tmp_path: Path) -> None:
    with loop(tmp_path) as running:
        assert running.redis.pid is not None
        running.start("serve", fault="images stored", victim=running.redis.pid)
        refused = running.submit(batch("fresh", "fresh too"))
        assert (refused.status_code, refused.json()["code"]) == (503, "queue_unavailable")
        assert int(refused.headers["Retry-After"]) >= 1
        running.redis.start()
        running.start("train")
        running.check_learned_once(submitted(running, "fresh"))


def test_a_zombie_trainer_cannot_publish_over_the_one_that_took_over(tmp_path: Path) -> None:
    with loop(tmp_path) as running:
        running.start("serve")
        id = submitted(running, "fresh")
        running.settings["SLOW"] = "0.3"
        zombie = running.start("train")
        end = time.monotonic() + 60
        while running.task(id)["progress"] is None:
            assert time.monotonic() < end
            time.sleep(0.02)
        os.kill(zombie.pid, signal.SIGSTOP)
        running.settings["SLOW"] = ""
        time.sleep(2 * LEASE)
        heir = running.start("train")
        running.check_learned_once(id)
        other = submitted(running, "another")
        os.kill(zombie.pid, signal.SIGCONT)
        running.check_learned_once(id)
        running.check_learned_once(other)
        assert heir.poll() is None
        assert zombie.poll() is None  # it has dropped that task, and is a worker like any other


def test_twenty_batches_at_once_become_eighteen_versions_in_order(tmp_path: Path) -> None:
    """Two of them are the same, and one cannot be learned."""
    with loop(tmp_path, memory="200") as running:
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
        assert [letter.task_id for letter in running.queue.dead()] == [poisoned]
        assert VersionStore(running.data).current() == 21
        counts = running.queue.counts()
        assert (counts["queued"], counts["learning"], counts["published"], counts["failed"]) == (0, 0, 18, 1)
