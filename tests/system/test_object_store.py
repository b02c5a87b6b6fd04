"""Servers and trainers on several machines, each with an empty folder of its own, and one object store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from deploy.fleet.object_store import environment_of
from models.files import sha256_bytes
from models.storage import open_storage
from openworld.cli import main
from tests.support.learning_loop import Loop, batch
from tests.support.object_stores import new_bucket, own_seaweedfs
from tests.support.redis_servers import RedisServer
from tests.support.servers import known_image, learned_folder, wait_until


@contextmanager
def moved_loop(root: Path, url: str) -> Iterator[Loop]:
    """A data folder with three versions that was moved into a bucket. Nothing else is on the machines."""
    assert main(["migrate", str(learned_folder(root / "source")), url]) == 0
    (root / "loop").mkdir()
    with RedisServer(root / "redis") as redis:
        storage = open_storage(root / "tests", url)
        running = Loop(root / "loop" / "a", redis, {"OPENWORLD_STORE": url}, storage=storage)
        try:
            yield running
            running.check()
        finally:
            running.stop()


@pytest.fixture
def loop(tmp_path: Path, seaweedfs: int) -> Iterator[Loop]:
    with moved_loop(tmp_path, new_bucket()) as running:
        yield running


def serving(url: str) -> int:
    return int(httpx.get(f"{url}/readyz", timeout=30).json()["version"])


def test_a_task_moves_to_another_machine_and_all_servers_swap(loop: Loop) -> None:
    loop.start("serve", machine="a")
    first = loop.url
    loop.start("serve", machine="b")
    second = loop.url
    assert (serving(first), serving(second)) == (3, 3)
    with loop.holding_trainers(epoch=2):
        killed = loop.start("train", machine="c")
        id = loop.submit(batch("new-1", "new-2")).json()["id"]
        wait_until(lambda: loop.finished_epochs(id) >= 2, 60)
        saved = {found.key: found.size for found in loop.storage.list("work/")} if loop.storage else {}
        killed.kill()
        killed.wait(20)
    assert {key.split("/")[1] for key in saved} == {id}
    assert not any(path.is_dir() for path in (loop.data.parent / "c" / "work").iterdir())
    loop.start("train", machine="d")
    loop.check_learned_once(id)
    assert loop.task(id)["progress"]["losses"] == []  # no epoch was computed again
    for url in (first, second):
        wait_until(lambda url=url: serving(url) == 4, 20)  # type: ignore[misc]
        answer = httpx.post(f"{url}/predict", content=known_image("new-1", 90), headers={"Content-Type": "image/png"})
        assert answer.json()["predictions"][0]["version"] == 4
    assert loop.storage is not None
    wait_until(lambda: list(loop.storage.list("work/")) == [], 20)  # type: ignore[union-attr]


def test_an_erased_image_disappears_from_all_machines(loop: Loop) -> None:
    loop.start("serve", machine="a")
    first = loop.url
    loop.start("serve", machine="b")
    second = loop.url
    assert loop.storage is not None
    sha256 = sha256_bytes(known_image("class 0", 0))
    thumbnail = f"/images/{sha256}/thumbnail"
    copies = [loop.data.parent / machine / "objects" / "images" / sha256[:2] / sha256 for machine in "ab"]
    for url in (first, second):
        assert httpx.get(url + thumbnail, timeout=30).status_code == 200
    assert all(copy.exists() for copy in copies)
    assert httpx.delete(f"{first}/images/{sha256}?force=true", timeout=30).status_code == 200
    assert httpx.get(second + thumbnail, timeout=30).status_code == 404
    wait_until(lambda: not any(copy.exists() for copy in copies), 20)
    assert loop.storage.find(f"images/{sha256[:2]}/{sha256}") is None


def test_servers_answer_and_tasks_wait_while_the_store_is_down(tmp_path: Path) -> None:
    with own_seaweedfs(tmp_path / "seaweedfs") as server, pytest.MonkeyPatch.context() as patch:
        for name, value in environment_of(server.port).items():
            patch.setenv(name, value)
        with moved_loop(tmp_path, new_bucket()) as loop:
            loop.start("serve", machine="a")
            with loop.holding_trainers():
                loop.start("train", machine="b")
                id = loop.submit(batch("new-1", "new-2")).json()["id"]
                wait_until(lambda: loop.task(id)["progress"] is not None, 60)
                server.kill()
            predicted = httpx.post(f"{loop.url}/predict", content=known_image("class 0"), timeout=30)
            assert predicted.json()["predictions"][0]["version"] == 3
            refused = loop.submit(batch("new-3"))
            assert (refused.status_code, refused.json()["code"]) == (503, "store_unavailable")
            assert int(refused.headers["Retry-After"]) >= 1
            assert httpx.get(f"{loop.url}/readyz", timeout=30).status_code == 200
            server.start()
            loop.check_learned_once(id)
            assert loop.task(id)["attempts"] == 1
            wait_until(lambda: serving(loop.url) == 4, 30)
