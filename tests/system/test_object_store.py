"""Servers and trainers on several machines, each with an empty folder of its own, and one object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from models.storage import open_storage
from openworld.cli import main
from tests.support.learning_loop import Loop, batch
from tests.support.object_stores import new_bucket
from tests.support.redis_servers import RedisServer
from tests.support.servers import known_image, learned_folder, wait_until


@pytest.fixture
def loop(tmp_path: Path, seaweedfs: int) -> Iterator[Loop]:
    """A data folder with three versions that was moved into a bucket. Nothing else is on the machines."""
    url, source = new_bucket(), learned_folder(tmp_path / "source")
    assert main(["migrate", str(source), url]) == 0
    (tmp_path / "loop").mkdir()
    with RedisServer(tmp_path / "redis") as redis:
        storage = open_storage(tmp_path / "tests", url)
        running = Loop(tmp_path / "loop" / "a", redis, {"OPENWORLD_STORE": url}, storage=storage)
        try:
            yield running
            running.check()
        finally:
            running.stop()


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
        wait_until(lambda: loop.task(id)["progress"] and loop.task(id)["progress"]["epoch"] >= 2, 60)
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
