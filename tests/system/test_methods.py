"""The whole loop with each method that keeps no image of earlier tasks: teach over HTTP, learn, predict."""

from __future__ import annotations

from pathlib import Path

import httpx2 as httpx
import pytest

from models.inference.predictor import Predictor
from models.versions.store import VersionStore
from tests.support.learning_loop import Loop, batch
from tests.support.redis_servers import RedisServer
from tests.support.settings import variables
from tests.support.tiny_model import TinyImages

PNG = {"Content-Type": "image/png"}


def taught(running: Loop, *names: str) -> int:
    """The version in which these classes are learned."""
    response = running.submit(batch(*names, images=16))
    assert response.status_code == 202, response.text
    task = running.wait_until_ended(str(response.json()["id"]))
    assert task["state"] == "published", task
    return int(task["version"])


def labels(running: Loop, name: str) -> list[str | None]:
    images = [TinyImages().read(f"{name}/{number}") for number in range(500, 506)]
    answers = [httpx.post(f"{running.url}/predict", content=image, headers=PNG, timeout=30) for image in images]
    return [answer.json()["predictions"][0]["label"] for answer in answers]


@pytest.mark.parametrize("method", ["hat-csi", "sup-csi"])
def test_two_tasks_are_taught_and_recognised(tmp_path: Path, method: str) -> None:
    with RedisServer(tmp_path / "redis") as redis:
        running = Loop(tmp_path / "robot", redis, variables(method=method, epochs="4"))
        try:
            running.start("serve")
            running.start("train")
            taught(running, "apple", "pear")
            version = taught(running, "plum", "fig")
            for name in ("apple", "pear", "plum", "fig"):
                assert labels(running, name).count(name) >= 4, name
            manifest = VersionStore(running.folder).manifest(version)
            assert manifest.settings["method"] == method
            assert manifest.rule["rotations"] == 4
            detail = httpx.get(f"{running.url}/versions/{version}", timeout=30).json()
            assert (detail["method"], detail["rotations"]) == (method, 4)
            # Without torch, the answers of a version are those of the networks that were learned, rotations included.
            model = Predictor.open(running.folder, version, "cpu").model
            assert model.rule.uses_networks
            assert all(task.head.turned_weight is not None for task in model.tasks)
            assert all((task.supermask is not None) == (method == "sup-csi") for task in model.tasks)
            running.check()
        finally:
            running.stop()
