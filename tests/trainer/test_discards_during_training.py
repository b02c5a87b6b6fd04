"""In a folder that keeps no images, a worker discards those of tasks that end while it learns another one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from models.versions.keep import RECORD
from tasks.errors import BatchError
from tasks.images import ImageStore
from tasks.queue import TaskQueue
from tests.support.images import make_image
from tests.support.redis_servers import PREFIX, RedisServer, client_of, make_task
from tests.support.tiny_model import tiny_settings
from trainer.learning.progress import Event
from trainer.worker import worker
from trainer.worker.metrics import WorkerMetrics


def test_images_of_a_task_that_ends_during_a_training_are_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / RECORD).write_text("features\n")
    images = ImageStore(tmp_path)
    learned, ended = images.put(make_image(1)), images.put(make_image(2))
    left: list[set[str]] = []

    def learn(storage: object, batch: object, settings: object, listener: Any, **more: object) -> None:
        listener(Event("a", "learning", 1, 2, None, 0.5, None))
        left.append({image.sha256 for image in images})
        raise BatchError(["ends the task"])

    monkeypatch.setattr(worker, "learn_batch", learn)
    monkeypatch.setattr(worker, "submission_of", lambda *arguments: SimpleNamespace(batch=None))
    with RedisServer(tmp_path / "redis") as server, client_of(server.url) as client:
        queue = TaskQueue(client, PREFIX)
        queue.submit(make_task("a", classes={"a": [learned]}))
        other = queue.submit(make_task("b", classes={"b": [ended]})).task
        lease = queue.claim("worker")
        assert lease is not None
        queue.cancel(other.id)  # as `claim` ends a task whose workers have died
        worker.Worker(tmp_path, queue, tiny_settings(), "worker", WorkerMetrics()).work(lease)
    assert left == [{learned}]
    assert list(images) == []
