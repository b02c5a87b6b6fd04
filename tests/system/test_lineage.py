"""Roll backs and edits of classes while tasks are queued or being learned; trainings that share a folder or a Redis."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from models.versions.store import VersionStore
from tests.support.learning_loop import LEASE, Loop, batch, folder_loop, loop
from tests.support.waiting import wait_until
from trainer.data_folder import training_lock


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    with loop(tmp_path_factory.mktemp("lineage"), replay_size="200", gate_accuracy="1", gate_auc="1") as running:
        running.start("serve")
        running.start("train")
        yield running


def request(running: Loop, method: str, path: str, **arguments: Any) -> httpx.Response:
    return httpx.request(method, f"{running.url}{path}", timeout=30, **arguments)


def learned(running: Loop, name: str) -> tuple[str, int]:
    """Submit a batch and wait until it is published: (id of the task, version)."""
    id = running.submit(batch(name, f"{name} too")).json()["id"]
    task = running.wait_until_ended(id)
    assert task["state"] == "published", task
    return id, task["version"]


def test_a_task_that_a_roll_back_removed_can_be_learned_again(running: Loop) -> None:
    store = VersionStore(running.data)
    first, version = learned(running, "plum")
    second, later = learned(running, "fig")
    stale = request(running, "POST", f"/versions/{version}/activate", params={"replacing": version})
    assert (stale.status_code, stale.json()["code"]) == (409, "version_conflict")
    assert request(running, "POST", f"/versions/{version}/activate", params={"replacing": later}).status_code == 200
    kept = running.submit(batch("plum", "plum too"))
    assert (kept.json()["state"], kept.json()["fresh"]) == ("published", False)
    again = running.submit(batch("fig", "fig too"))
    assert (again.json()["id"], again.json()["state"], again.json()["fresh"]) == (second, "queued", True)
    task = running.wait_until_ended(second)
    assert (task["state"], store.manifest(task["version"]).parent) == ("published", version)
    assert store.lineage()[:2] == [task["version"], version]
    assert "fig" in store.manifest(task["version"]).classes
    # The same with a retry of the task
    assert request(running, "POST", f"/tasks/{first}/retry").status_code == 409
    assert request(running, "POST", f"/versions/{version}/activate").status_code == 200
    assert request(running, "POST", f"/tasks/{second}/retry").json()["state"] == "queued"
    assert running.wait_until_ended(second)["version"] > task["version"]


def test_edits_during_a_training_cost_no_attempt_and_apply_to_queued_tasks(running: Loop) -> None:
    store = VersionStore(running.data)
    assert request(running, "POST", "/versions/3/activate").status_code == 200
    with running.holding_trainers():
        training = running.submit(batch("kiwi", "kiwi too")).json()["id"]
        queued = running.submit(batch("class 0", "class 1", images=3, start=50)).json()["id"]
        running.wait_for_progress(training)
        for name, change in (("class 0", {"rename": "apple"}), ("class 1", {"merge_into": "class 2"})):
            assert request(running, "PATCH", f"/classes/{name}", json=change).status_code == 200
        edited = store.current() or 0
        assert running.task(training)["state"] == "learning"
    task = running.wait_until_ended(training)
    assert (task["state"], task["attempts"], store.manifest(task["version"]).parent) == ("published", 1, edited)
    assert store.manifest(task["version"]).classes[:2] == ["apple", "class 1"]
    later = running.wait_until_ended(queued)
    assert (later["state"], later["attempts"]) == ("published", 1)
    found = store.manifest(later["version"])
    assert found.metrics["images_per_class"] == {"apple": 3, "class 2": 3}
    assert found.tasks == store.manifest(task["version"]).tasks  # no new class


def test_a_roll_back_during_a_training_starts_it_again_without_an_attempt(running: Loop) -> None:
    store = VersionStore(running.data)
    assert request(running, "POST", "/versions/3/activate").status_code == 200
    with running.holding_trainers():
        id = running.submit(batch("melon", "melon too")).json()["id"]
        running.wait_for_progress(id)
        assert request(running, "POST", "/versions/1/activate").status_code == 200
    task = running.wait_until_ended(id)
    assert (task["state"], task["attempts"], store.manifest(task["version"]).parent) == ("published", 1, 1)


def test_two_data_folders_on_one_redis_do_not_take_each_others_tasks(running: Loop, tmp_path: Path) -> None:
    with folder_loop(tmp_path / "other", running.redis) as other:
        other.start("serve")
        # Claimed by the trainer of `running` if it were not for the id of the folder: it would find no images.
        id = other.submit(batch("peach", "peach too")).json()["id"]
        other_first = running.submit(batch("grape", "grape too")).json()["id"]
        assert running.wait_until_ended(other_first)["state"] == "published"
        assert (other.task(id)["state"], other.task(id)["attempts"]) == ("queued", 0)
        assert httpx.get(f"{running.url}/tasks/{id}", timeout=30).status_code == 404
        other.start("train")
        other.check_learned_once(id)
        assert "peach" not in (VersionStore(running.data).current_manifest() or pytest.fail("nothing")).classes


def test_a_worker_waits_for_the_training_lock_and_removes_only_checkpoints_of_its_own_tasks(running: Loop) -> None:
    work = running.data / "work"
    foreign = work / "of-openworld-learn"
    foreign.mkdir(parents=True)
    with training_lock(running.data):
        cancelled = running.submit(batch("quince", "quince too")).json()["id"]
        waiting = "waiting for another training"
        wait_until(lambda: (running.task(cancelled)["progress"] or {}).get("phase") == waiting, 60)
        (work / cancelled).mkdir()
        assert request(running, "POST", f"/tasks/{cancelled}/cancel").status_code == 200
        assert running.wait_until_ended(cancelled)["state"] == "cancelled"
        id = running.submit(batch("mango", "mango too")).json()["id"]
        running.wait_for_progress(id)
        time.sleep(2 * LEASE)  # longer than a worker waits for a worker that lost its lease
        assert running.task(id)["progress"]["phase"] == waiting
        assert running.versions_of(id) == []
    task = running.wait_until_ended(id)
    assert (task["state"], task["attempts"]) == ("published", 1)
    wait_until(lambda: not (work / cancelled).exists())
    assert [path for path in work.iterdir() if path.is_dir()] == [foreign]
