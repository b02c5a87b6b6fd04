"""`openworld check` finds every kind of damage, and nothing in a healthy folder beside a running service."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.files import temporary_beside
from models.versions.folder_id import folder_id
from models.versions.store import VersionStore
from openworld.check import check_folder
from openworld.check import run as check_run
from openworld.cli import main
from service.inbox import Inbox
from service.inbox.snapshot import read_snapshot
from tasks.images import ImageStore, record_erasure
from tasks.queue import TaskQueue, connect, key_prefix
from tests.support.inbox import sighting
from tests.support.redis_servers import RedisServer, make_task
from tests.support.servers import learned_folder, novel_image
from tests.support.version_stores import flip_byte


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(check_run, "PAUSE_SECONDS", 0.01)
    return learned_folder(tmp_path / "robot")


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def queue(redis_server: RedisServer, folder: Path) -> Iterator[TaskQueue]:
    with connect(redis_server.url) as client:
        client.flushall()
        yield TaskQueue(client, key_prefix(folder_id(folder)))


def codes(root: Path, queue: TaskQueue | None = None, *, quick: bool = False) -> set[str]:
    return {finding.code for finding in check_folder(root, queue, quick=quick).problems}


def content(root: Path, role: str) -> Path:
    return VersionStore(root).content_path(3, role)


def republish(root: Path, change: Callable[[dict[str, Any], Any], None]) -> None:
    """Publish the current version again with changed tensors or samples: whole, but wrong."""
    store = VersionStore(root)
    loaded = store.load()
    tensors, samples = dict(loaded.tensors), loaded.samples
    change(tensors, samples)
    manifest = loaded.manifest.model_copy(update={"parent": 3, "task_id": "changed", "version": 0, "files": {}})
    store.publish(manifest, tensors, samples)


def shift_mean(tensors: dict[str, Any], samples: Any) -> None:
    tensors["task.1/frozen.means"] = tensors["task.1/frozen.means"] + np.float32(0.1)


def shift_task_mean(tensors: dict[str, Any], samples: Any) -> None:
    tensors["task.2/gaussians.means"] = tensors["task.2/gaussians.means"] + 0.1


def forget_one(tensors: dict[str, Any], samples: Any) -> None:
    name = sorted(samples["seen"])[0]
    samples["seen"][name] = samples["seen"][name][1:]


def first_image(root: Path) -> Path:
    return next((root / "images").glob("??/*"))


def memory_image(root: Path) -> Path:
    samples = VersionStore(root).load().samples
    sha = next(keys[0] for keys in samples["memory"].values() if keys)
    return root / "images" / sha[:2] / sha


def drop_last_promotion(root: Path) -> None:
    (root / "promotions" / "000000003.json").unlink()


def drop_middle_promotion(root: Path) -> None:
    (root / "promotions" / "000000002.json").unlink()


def leave_temporary(root: Path) -> None:
    path = temporary_beside(first_image(root))
    path.write_bytes(b"half")
    os.utime(path, (0, 0))


def learn_twice(root: Path) -> None:
    store = VersionStore(root)
    loaded = store.load()
    store.publish(loaded.manifest.model_copy(update={"parent": 3, "files": {}}), loaded.tensors, loaded.samples)


def add(root: Path, place: str) -> None:
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"?")


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "changed heads": ("version_damaged", lambda root: flip_byte(content(root, "heads"))),
    "a changed task": ("version_damaged", lambda root: flip_byte(content(root, "task.0"))),
    "a missing task": ("version_damaged", lambda root: content(root, "task.1").unlink()),
    "a missing parent": ("parent_missing", lambda root: (root / "versions" / "000002.json").unlink()),
    "an unknown file among the versions": ("unknown_file", lambda root: add(root, "versions/notes.txt")),
    "CURRENT names no version": ("current_missing", lambda root: (root / "CURRENT").write_text("9\n")),
    "CURRENT is no number": ("current_damaged", lambda root: (root / "CURRENT").write_text("?")),
    "no CURRENT": ("no_current", lambda root: (root / "CURRENT").unlink()),
    "a lost line of the log": ("log_disagrees", drop_last_promotion),
    "a lost line inside the log": ("log_gap", drop_middle_promotion),
    "a task learned twice": ("learned_twice", learn_twice),
    "a changed image": ("image_damaged", lambda root: flip_byte(first_image(root))),
    "a lost image of the memory": ("image_missing", lambda root: memory_image(root).unlink()),
    "a temporary file": ("temporary_file", leave_temporary),
    "an unused graph": ("orphan_graph", lambda root: add(root, f"graphs/{'0' * 64}.onnx")),
    "a checkpoint of a learned task": ("orphan_checkpoint", lambda root: add(root, "work/task-2/fingerprint")),
    "a damaged rejected version": ("rejected_damaged", lambda root: add(root, "rejected/task-9.json")),
    "a wrong mean": ("statistics_disagree", lambda root: republish(root, shift_mean)),
    "a wrong mean of a task": ("statistics_disagree", lambda root: republish(root, shift_task_mean)),
    "a wrong count": ("count_disagrees", lambda root: republish(root, forget_one)),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found(folder: Path, what: str) -> None:
    code, damage = DAMAGE[what]
    damage(folder)
    assert code in codes(folder)


def test_a_healthy_folder_has_no_problems(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--data", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["problems"], report["notes"]) == (True, [], [])
    assert report["checked"] == {"versions": 3, "rejected": 0, "images": 60, "novelties": 0, "classes": 5}
    assert set(report["skipped"]) == {"tasks"}


def test_problems_give_exit_code_1_and_no_folder_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_byte(first_image(folder))
    assert main(["check", "--data", str(folder)]) == 1
    assert "image_damaged" in capsys.readouterr().out
    assert main(["check", "--data", str(folder), "--quick"]) == 0
    assert main(["check", "--data", str(folder / "absent")]) == 2


def test_an_erased_image_is_not_a_lost_one(folder: Path) -> None:
    path = memory_image(folder)
    record_erasure(folder, [path.name], "operator")
    path.unlink()
    report = check_folder(folder, None)
    assert report.problems == []
    assert "1 of 5 classes" in report.skipped["statistics"]


def test_what_was_checked_is_said_in_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--data", str(folder)]) == 0
    words = "nothing is wrong; checked: 3 versions, 0 rejected versions, 60 images, 0 novel images, the statistics of "
    assert f"{words}5 classes\n" in capsys.readouterr().out
    images = list((folder / "images").glob("??/*"))
    record_erasure(folder, [path.name for path in images], "operator")
    for path in images:
        path.unlink()
    assert main(["check", "--data", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "not checked: statistics: 5 of 5 classes have images that are not kept" in out
    assert "0 classes" not in out


def test_rows_and_images_of_the_inbox_are_compared(folder: Path) -> None:
    inbox = Inbox(folder)
    ids = [inbox.add(sighting(novel_image(n))).id or "" for n in range(3)]
    assert codes(folder, quick=True) == set()  # while this process has the database open
    ImageStore(folder / "inbox").put(novel_image(9))
    assert codes(folder, quick=True) == {"novelty_without_row"}
    inbox.close()
    Inbox(folder).close()  # opening adds the row of the image without one
    (folder / "inbox" / "images" / ids[0][:2] / ids[0]).unlink()
    flip_byte(folder / "inbox" / "images" / ids[1][:2] / ids[1])
    assert codes(folder) == {"novelty_without_image", "novelty_damaged"}


def test_the_queue_is_compared_with_itself_and_with_the_versions(folder: Path, queue: TaskQueue) -> None:
    task = queue.submit(make_task("waiting")).task
    lease = queue.claim("worker")
    assert lease is not None
    assert codes(folder, queue, quick=True) == {"image_missing"}  # its images were never stored
    record_erasure(folder, [key for keys in task.classes.values() for key in keys], "operator")
    assert codes(folder, queue, quick=True) == set()
    lease.publish(3)
    assert codes(folder, queue, quick=True) == {"version_missing"}  # version 3 is of another task


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda client, prefix, id: client.delete(f"{prefix}:tasks"), "task_lost"),
        (lambda client, prefix, id: client.xadd(f"{prefix}:tasks", {"task": id}), "task_queued_twice"),
        (lambda client, prefix, id: client.zadd(f"{prefix}:ended", {id: 1}), "task_ended_and_queued"),
        (lambda client, prefix, id: client.delete(f"{prefix}:task:{id}"), "task_without_record"),
        (lambda client, prefix, id: client.zadd(f"{prefix}:ended", {"gone": 1}), "task_not_indexed"),
    ],
)
def test_a_damaged_queue_is_found(folder: Path, queue: TaskQueue, damage: Any, code: str) -> None:
    task = queue.submit(make_task("waiting")).task
    damage(queue._client, queue.prefix, task.id)
    assert code in codes(folder, queue, quick=True)


def test_a_folder_in_use_has_no_problems(folder: Path) -> None:
    """Novelties come and go, images are stored and versions are activated during the check."""
    inbox, store, images, stop = Inbox(folder), VersionStore(folder), ImageStore(folder), threading.Event()

    def work() -> None:
        for n in range(10**6):
            if stop.is_set():
                return
            added = inbox.add(sighting(novel_image(n)), requested=True)
            images.put(novel_image(n))
            if n % 3 == 0 and added.id:
                inbox.delete([added.id])
            if n % 10 == 0:
                store.activate(1 + n // 10 % 3, "operator", "for a test")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            assert check_folder(folder, None, quick=True).problems == []
    finally:
        stop.set()
        thread.join()
        inbox.close()


def test_a_copied_database_is_whole_while_it_is_written(folder: Path) -> None:
    inbox, stop = Inbox(folder), threading.Event()
    inbox.add(sighting(novel_image(0)))

    def work() -> None:
        for n in range(1, 10**6):
            if stop.is_set():
                return
            inbox.add(sighting(novel_image(n)), requested=True)

    thread = threading.Thread(target=work)
    thread.start()
    counts = [0]
    try:
        while len(counts) < 20 or counts[-1] < 100:
            with read_snapshot(folder / "inbox" / "inbox.sqlite3") as connection:
                assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
                counts.append(connection.execute("SELECT count(*) FROM novelties").fetchone()[0])
    finally:
        stop.set()
        thread.join()
        inbox.close()
    assert counts == sorted(counts)


def test_a_database_that_is_being_created_has_no_novelties(folder: Path) -> None:
    (folder / "inbox").mkdir()
    (folder / "inbox" / "inbox.sqlite3").touch()
    assert codes(folder, quick=True) == set()
