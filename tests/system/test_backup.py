"""`openworld backup` beside a service under load, and `openworld restore` into a new folder that serves and learns."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from models.versions.folder_id import folder_id
from models.versions.store import VersionStore
from openworld.check import check_folder
from openworld.cli import main
from service.shared import Lease, RedisState, SharedInbox
from tasks.images import ImageStore, record_erasure
from tasks.queue import ENDED, key_prefix
from tests.support.inbox import sighting
from tests.support.learning_loop import Loop, batch, loop
from tests.support.novelties import block_image
from tests.support.redis_servers import RedisServer
from tests.support.servers import learned_folder, novel_image
from tests.support.shared_inboxes import Server
from tests.support.version_stores import flip_byte


def under_load(running: Loop, work: Callable[[], None]) -> None:
    """Predict, submit, roll back and erase until `work` has ended."""
    stop, failed = threading.Event(), list[Exception]()

    def load() -> None:
        for n in range(10**6):
            if stop.is_set():
                return
            try:
                httpx.post(f"{running.url}/predict", content=novel_image(n), timeout=30)
                if n % 5 == 0:
                    running.submit(batch(f"load {n}", images=3))
                if n % 7 == 0:
                    body = {"reason": "for a test"}
                    httpx.post(f"{running.url}/versions/{1 + n // 7 % 3}/activate", json=body, timeout=30)
                if n % 9 == 0:
                    erased = next(iter(ImageStore(running.data))).sha256
                    httpx.delete(f"{running.url}/images/{erased}", params={"force": "true"}, timeout=30)
            except Exception as error:
                failed.append(error)
                return

    thread = threading.Thread(target=load)
    thread.start()
    try:
        work()
    finally:
        stop.set()
        thread.join()
    assert not failed


def test_a_backup_under_load_is_restored_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with loop(tmp_path) as running:
        running.start("serve")
        first = running.submit(batch("fresh", "fresh too")).json()["id"]
        running.start("train")
        running.check_learned_once(first)
        url = running.redis.url
        under_load(running, lambda: _backups(running.data, tmp_path, url))
        copied = json.loads((tmp_path / "copy-2" / "queue.json").read_text())
        assert first in {task["id"] for task in copied["tasks"]}

    restored = tmp_path / "elsewhere" / "restored"
    assert main(["restore", str(tmp_path / "copy-2"), "--data", str(restored)]) == 0
    with RedisServer(restored / "redis") as redis:
        again = Loop(restored, redis, running.settings)
        try:
            assert check_folder(restored, again.queue).problems == []
            again.start("serve")
            again.start("train")
            for task in copied["tasks"]:
                state = task["record"]["state"]
                assert again.wait_until_ended(task["id"])["state"] in (ENDED if state not in ENDED else {state})
            fresh = again.submit(batch("after", "after too")).json()["id"]
            again.check_learned_once(fresh)
            again.check()
        finally:
            again.stop()


def _backups(data: Path, folder: Path, url: str) -> None:
    for n in range(3):
        assert main(["backup", str(folder / f"copy-{n}"), "--data", str(data), "--redis-url", url]) == 0


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup without tasks."""
    folder = tmp_path_factory.mktemp("backup")
    data = learned_folder(folder / "robot")
    assert main(["backup", str(folder / "copy"), "--data", str(data)]) == 0
    return folder / "copy"


@pytest.mark.parametrize("exists", [False, True], ids=["new folder", "empty volume"])
def test_a_restored_folder_equals_the_original(backup: Path, tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "new").mkdir()
    assert main(["restore", str(backup), "--data", str(tmp_path / "new")]) == 0
    assert check_folder(tmp_path / "new", None).problems == []
    original, restored = VersionStore(backup.parent / "robot"), VersionStore(tmp_path / "new")
    assert restored.versions() == original.versions()
    assert restored.log() == original.log()
    assert {image.sha256 for image in ImageStore(tmp_path / "new")} == {
        image.sha256 for image in ImageStore(backup.parent / "robot")
    }


def test_the_inbox_that_servers_share_is_restored_without_what_was_erased(tmp_path: Path) -> None:
    data, restored = learned_folder(tmp_path / "robot"), tmp_path / "new"
    with RedisServer(tmp_path / "redis") as redis:
        with shared_inbox(data, redis) as inbox:
            kept, erased = (inbox.add(sighting(block_image(n)), requested=True).id for n in (1, 2))
            before = {one.id: one for one in inbox.list("new", 10).items}
        assert main(["backup", str(tmp_path / "copy"), "--data", str(data), "--redis-url", redis.url]) == 0
        record_erasure(tmp_path, [str(erased)], "operator")
        words = ["--data", str(restored), "--redis-url", redis.url, "--erasures", str(tmp_path)]
        assert main(["restore", str(tmp_path / "copy"), *words]) == 0
        with shared_inbox(restored, redis) as inbox:
            assert {one.id: one for one in inbox.list("new", 10).items} == {kept: before[str(kept)]}
            assert inbox.read_image(str(kept)) == block_image(1)


@contextmanager
def shared_inbox(data: Path, redis: RedisServer) -> Iterator[SharedInbox]:
    """The shared inbox of a data folder, of a server that owns it."""
    with closing(RedisState(redis.url, key_prefix(folder_id(data)))) as state:
        server, lease = Server(state, ImageStore(data, "novelties/"), "http://server"), Lease("token", "http://server")
        state.run("inbox_lease", *lease.arguments)
        with closing(server.open(lease)) as inbox:
            yield inbox


def test_folders_with_files_are_refused(backup: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert main(["restore", str(backup), "--data", str(tmp_path)]) == 2
    assert main(["backup", str(tmp_path), "--data", str(backup.parent / "robot")]) == 2
    assert main(["restore", str(tmp_path), "--data", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.count("error:") == 3
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_changed_backup_is_refused_and_leaves_nothing(
    backup: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = next((backup / "data" / "images").glob("*/*"))
    whole = changed.read_bytes()
    flip_byte(changed)
    try:
        assert main(["restore", str(backup), "--data", str(tmp_path / "new")]) == 2
    finally:
        changed.write_bytes(whole)
    assert "has changed since the backup was made" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_images_erased_since_the_backup_are_not_restored(backup: Path, tmp_path: Path) -> None:
    sha256 = next(iter(ImageStore(backup / "data"))).sha256
    record_erasure(tmp_path, [sha256], "operator")
    assert main(["restore", str(backup), "--data", str(tmp_path / "new"), "--erasures", str(tmp_path)]) == 0
    assert sha256 not in ImageStore(tmp_path / "new")
    assert check_folder(tmp_path / "new", None).problems == []


def test_a_damaged_image_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = learned_folder(tmp_path / "robot")
    flip_byte(path := next((data / "images").glob("*/*")))
    assert main(["backup", str(tmp_path / "copy"), "--data", str(data)]) == 1
    assert path.name in capsys.readouterr().out
    assert not (tmp_path / "copy" / "data" / "images" / path.name[:2] / path.name).exists()
