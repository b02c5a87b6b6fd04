"""Known in seconds: classes answer before they are learned, through server, queue and trainer, also after kills."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from models.versions.store import VersionStore
from tests.support.learning_loop import ENDED, Loop, batch, loop, wait_for_death
from tests.support.tiny_model import TinyImages
from tests.support.waiting import wait_until


def submitted(running: Loop, *names: str) -> str:
    response = running.submit(batch(*names, images=8))
    assert response.status_code == 202, response.text
    return str(response.json()["id"])


def labels(running: Loop, name: str) -> list[str | None]:
    images = [TinyImages().read(f"{name}/{number}") for number in range(500, 504)]
    answers = [httpx.post(f"{running.url}/predict", content=image, headers=PNG, timeout=30) for image in images]
    return [answer.json()["predictions"][0]["label"] for answer in answers]


PNG = {"Content-Type": "image/png"}


def is_answered(running: Loop, name: str) -> bool:
    return labels(running, name).count(name) >= 3


def get(running: Loop, path: str) -> Any:
    return httpx.get(f"{running.url}/{path}", timeout=30).json()


def pause(running: Loop, paused: bool) -> Any:
    response = httpx.put(f"{running.url}/refinement", json={"paused": paused}, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


@contextmanager
def started(tmp_path: Path) -> Iterator[Loop]:
    """A server and a trainer, with more epochs than `advance_held_trainer` needs."""
    with loop(tmp_path, provisional="on", epochs="30") as running:
        running.start("serve")
        running.start("train")
        yield running


def pending(running: Loop) -> str:
    """A task of plum and fig that is learned and answers already; hold the trainer until the test is done with it."""
    id = submitted(running, "plum", "fig")
    wait_until(lambda: running.task(id)["provisional"] is not None, 60)
    wait_until(lambda: running.finished_epochs(id) >= 1, 60)
    return id


def test_a_class_answers_while_its_task_is_learned(tmp_path: Path) -> None:
    with loop(tmp_path, provisional="on") as running:
        running.start("serve")
        with running.holding_trainers(epoch=1):
            running.start("train")
            id = submitted(running, "plum", "fig")
            wait_until(lambda: running.task(id)["provisional"] == 4, 60)
            wait_until(lambda: get(running, "versions")["serving"] == 4, 60)
            assert running.task(id)["state"] == "learning"
            assert is_answered(running, "plum")
            assert is_answered(running, "class 0")
            classes = {entry["name"]: entry["provisional"] for entry in get(running, "classes")["classes"]}
            assert classes == {"plum": True, "fig": True, **{f"class {n}": False for n in range(5)}}
            version = get(running, "versions/4")
            assert (version["stage"], version["pending"], version["rule"]) == ("provisional", [id], "provisional")
            assert "openworld_pending_tasks 1.0" in httpx.get(f"{running.url}/metrics", timeout=30).text
            evidence = httpx.post(
                f"{running.url}/explain", content=TinyImages().read("plum/500"), headers=PNG, timeout=30
            ).json()
            assert evidence["label"] == "plum"
            assert [task["ran"] for task in evidence["tasks"]] == [False] * 4
        running.check_learned_once(id)
        task = running.task(id)
        assert (task["version"], task["provisional"], task["result"]["stage"]) == (5, 4, "refined")
        assert is_answered(running, "plum")


def test_a_task_that_is_submitted_meanwhile_answers_too(tmp_path: Path) -> None:
    with started(tmp_path) as running:
        with running.holding_trainers(epoch=1):
            first = pending(running)
            second = submitted(running, "kiwi", "lime")
            running.advance_held_trainer(first, lambda: running.task(second)["provisional"] is not None)
            assert running.task(second)["state"] == "queued"
            wait_until(lambda: is_answered(running, "kiwi"), 60)
            assert is_answered(running, "plum")
        running.check_learned_once(first)
        running.check_learned_once(second)
        assert get(running, "versions")["versions"][0]["stage"] in ("refined", "provisional")
        assert VersionStore(running.data).current_manifest().stage == "refined"  # type: ignore[union-attr]


@pytest.mark.parametrize("step", ["written", "numbered", "logged", "promoted"])
def test_a_trainer_killed_while_it_publishes_a_provisional_version_loses_nothing(tmp_path: Path, step: str) -> None:
    with loop(tmp_path, provisional="on") as running:
        running.start("serve")
        id = submitted(running, "plum", "fig")
        wait_for_death(running.start("train", fault=step))  # the first version that it publishes is provisional
        running.check()
        assert VersionStore(running.data).find_task(id) is None
        running.start("train")
        running.check_learned_once(id)
        stages = [VersionStore(running.data).manifest(n).stage for n in VersionStore(running.data).versions()[3:]]
        assert stages == ["provisional", "refined"]


def test_while_learning_is_paused_new_classes_answer_and_are_learned_after_it(tmp_path: Path) -> None:
    with loop(tmp_path, provisional="on") as running:
        running.start("serve")
        assert get(running, "refinement") == {"paused": False}
        assert pause(running, True) == {"paused": True}
        running.start("train")
        id = submitted(running, "plum", "fig")
        wait_until(lambda: running.task(id)["provisional"] == 4, 60)
        wait_until(lambda: is_answered(running, "plum"), 60)
        assert running.task(id)["state"] == "queued"
        assert get(running, "tasks")["paused"] is True
        pause(running, False)
        running.check_learned_once(id)
        assert running.task(id)["version"] == 5
        actions = [entry["action"] for entry in get(running, "audit")["items"]]
        assert actions.count("refinement.pause") == 2


def test_pausing_hands_a_running_task_back(tmp_path: Path) -> None:
    with started(tmp_path) as running:
        with running.holding_trainers(epoch=1):
            id = pending(running)
            pause(running, True)
            running.advance_held_trainer(id, lambda: running.task(id)["state"] == "queued")
        wait_until(lambda: is_answered(running, "plum"), 60)
        httpx.post(f"{running.url}/tasks/{id}/cancel", timeout=30)
        wait_until(lambda: VersionStore(running.data).current_manifest().stage == "refined", 60)  # type: ignore[union-attr]
        assert running.task(id)["state"] == "cancelled"
        wait_until(lambda: not is_answered(running, "plum"), 60)


def test_a_cancelled_task_is_forgotten_again(tmp_path: Path) -> None:
    with started(tmp_path) as running:
        with running.holding_trainers(epoch=1):
            id = pending(running)
            httpx.post(f"{running.url}/tasks/{id}/cancel", timeout=30)
            running.advance_held_trainer(id, lambda: running.task(id)["state"] in ENDED)
        assert running.task(id)["state"] == "cancelled"
        wait_until(lambda: VersionStore(running.data).current_manifest().stage == "refined", 60)  # type: ignore[union-attr]
        wait_until(lambda: not is_answered(running, "plum"), 60)
        assert is_answered(running, "class 0")
        retried = httpx.post(f"{running.url}/tasks/{id}/retry", timeout=30)
        assert retried.json()["provisional"] is None
        running.check_learned_once(id)


def test_a_roll_back_ends_the_refinement(tmp_path: Path) -> None:
    with started(tmp_path) as running:
        with running.holding_trainers(epoch=1):
            id = pending(running)
            httpx.post(f"{running.url}/versions/3/activate", timeout=30)
            running.advance_held_trainer(id, lambda: running.task(id)["state"] in ENDED)
        task = running.task(id)
        assert task["state"] == "failed"
        assert "does not have the classes of this task" in task["reason"]
        assert get(running, "versions")["serving"] == 3
