"""Tasks that end without being learned while their classes answer are dropped at once, with their sums and a note."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from models.errors import StoreError
from models.versions.contents import PROVISIONAL
from models.versions.folder_id import folder_id
from models.versions.keep import Keep
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from openworld.check import check_folder
from tasks.images import ImageStore
from tasks.queue import Task, TaskQueue, key_prefix
from tests.support.batches import check_batch
from tests.support.kept_features import cnn_folder, places_of, tiny_backbones
from tests.support.redis_servers import RedisServer, client_of
from tests.support.servers import IMAGES
from tests.support.tiny_model import tiny_settings
from tests.support.waiting import wait_until
from trainer.learning import gate
from trainer.learning.learner import Learned, Learner
from trainer.learning.progress import Progress
from trainer.worker.metrics import WorkerMetrics
from trainer.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("restore_torch_settings")


@dataclass
class Trainer:
    """A worker in a thread, on a data folder with two versions."""

    data: Path
    queue: TaskQueue
    announced: list[int] = field(default_factory=list)

    def submit(self, *names: str) -> str:
        batch = check_batch((name, f"{n}.png", IMAGES.read(f"{name}/{n}")) for name in names for n in range(6))
        ImageStore(self.data).put_all(batch.read(image.sha256) for image in batch.images)
        return self.queue.submit(Task.of(batch, "anna", VersionStore(self.data).current())).task.id

    def current(self) -> Manifest:
        manifest = VersionStore(self.data).current_manifest()
        assert manifest is not None
        return manifest

    def pending(self) -> list[str]:
        return [one.task_id for one in self.current().pending]

    def sums(self) -> bytes:
        """Of the pending tasks of the current version."""
        return VersionStore(self.data).content_path(self.current().version, PROVISIONAL).read_bytes()

    @contextmanager
    def running(self) -> Iterator[None]:
        settings = tiny_settings(replay_size=None, gate_accuracy=1, gate_auc=1)
        worker = Worker(self.data, self.queue, settings, "worker", WorkerMetrics(), self.announced.append)
        thread = threading.Thread(target=worker.run)
        with tiny_backbones():
            thread.start()
            try:
                yield
            finally:
                worker.stop()
                thread.join(60)
        assert not thread.is_alive()


@contextmanager
def trainer_of(tmp_path: Path, keep: Keep) -> Iterator[Trainer]:
    data = cnn_folder(tmp_path / "robot", keep)
    with RedisServer(tmp_path / "redis") as server, client_of(server.url) as client:
        yield Trainer(data, TaskQueue(client, key_prefix(folder_id(data)), max_attempts=1))


def failing(patch: pytest.MonkeyPatch, before: Callable[[], object] = lambda: None) -> None:
    def learn(*arguments: object) -> Learned:
        before()
        raise StoreError("a lasting error")

    patch.setattr(Learner, "learn", learn)


def test_a_failed_task_stops_answering_at_once_and_its_record_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with trainer_of(tmp_path, "statistics") as trainer:
        sums: list[bytes] = []
        failing(monkeypatch, lambda: sums.append(trainer.sums()))
        id = trainer.submit("plum", "fig")
        with trainer.running():
            wait_until(lambda: trainer.queue.get(id).ended and not trainer.pending(), 60)
            wait_until(lambda: places_of(sums, trainer.data) == [], 10)
        task = trainer.queue.get(id)
        assert task.state == "failed"
        note = "classes that answered provisionally do not answer any more: fig, plum"
        assert task.reason == f"given up after 1 attempts: a lasting error; {note}"
        assert f"does not answer any more: it failed, and {note}" in caplog.text
        assert (len(sums), trainer.current().version, trainer.announced) == (1, 4, [3, 4])
        assert check_folder(trainer.data, trainer.queue).problems == []


def test_a_failed_task_keeps_answering_where_later_versions_can_have_its_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer_of(tmp_path, "features") as trainer:
        failing(monkeypatch)
        id = trainer.submit("plum", "fig")
        with trainer.running():
            wait_until(lambda: trainer.queue.get(id).ended, 60)
            monkeypatch.undo()
            other = trainer.submit("kiwi", "lime")
            wait_until(lambda: trainer.queue.get(other).ended, 60)
        assert (trainer.queue.get(other).state, trainer.pending()) == ("published", [id])


def test_a_task_that_failed_right_before_a_kill_is_dropped_by_the_next_trainer(tmp_path: Path) -> None:
    with trainer_of(tmp_path, "statistics") as trainer:
        trainer.queue.pause(True)
        id = trainer.submit("plum", "fig")
        with trainer.running():
            wait_until(lambda: trainer.pending() == [id], 60)
        sums = trainer.sums()
        trainer.queue.pause(False)
        lease = trainer.queue.claim("killed")
        assert lease is not None
        lease.fail("killed here", retry=False)  # and the process is killed before it drops the task
        with trainer.running():
            wait_until(lambda: not trainer.pending(), 60)
            wait_until(lambda: places_of([sums], trainer.data) == [], 10)
        reason = trainer.queue.get(id).reason
        assert reason == "killed here; classes that answered provisionally do not answer any more: fig, plum"


def test_the_next_trainer_removes_sums_that_a_killed_one_left(tmp_path: Path) -> None:
    with trainer_of(tmp_path, "statistics") as trainer:
        trainer.queue.pause(True)
        id = trainer.submit("plum", "fig")
        with pytest.MonkeyPatch.context() as patch, trainer.running():
            wait_until(lambda: trainer.pending() == [id], 60)
            sums = trainer.sums()
            # As if it were killed there, after it has published the version without the task.
            patch.setattr("trainer.context.discard_sums", lambda store: None)
            trainer.queue.cancel(id)
            wait_until(lambda: not trainer.pending(), 60)
        assert places_of([sums], trainer.data)
        with trainer.running():
            wait_until(lambda: places_of([sums], trainer.data) == [], 30)


@pytest.mark.parametrize("keep", ["images", "statistics"])
def test_a_task_that_is_cancelled_while_another_one_is_learned_is_dropped_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: Keep
) -> None:
    with trainer_of(tmp_path, keep) as trainer:
        learn, gone = Learner.learn, list[bool]()

        def slowly(self: Learner, *arguments: Any) -> Learned:
            progress: Progress = arguments[-1]

            def is_pending(id: str) -> bool:
                progress.tick()
                return id in trainer.pending()

            late = trainer.submit("kiwi", "lime")
            wait_until(lambda: is_pending(late), 60)
            sums = trainer.sums()
            trainer.queue.cancel(late)
            wait_until(lambda: not is_pending(late), 60)
            gone.append(places_of([sums], trainer.data) == [])
            return learn(self, *arguments)

        monkeypatch.setattr(Learner, "learn", slowly)
        id = trainer.submit("plum", "fig")
        with trainer.running():
            wait_until(lambda: trainer.queue.get(id).ended, 60)
        assert trainer.queue.get(id).state == "published"
        assert gone == [keep == "statistics"]
        assert trainer.current().tasks[2:] == [["fig", "plum"]]


def test_servers_get_to_know_the_version_without_a_rejected_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_reasons", lambda *arguments: ["it forgets too much"])
    with trainer_of(tmp_path, "statistics") as trainer:
        id = trainer.submit("plum", "fig")
        with trainer.running():
            wait_until(lambda: trainer.queue.get(id).ended, 60)
        task = trainer.queue.get(id)
        note = "classes that answered provisionally do not answer any more: fig, plum"
        assert (task.state, task.reason) == ("rejected", f"it forgets too much; {note}")
        assert (trainer.current().version, trainer.announced) == (4, [3, 4])
