"""The backbone of a new data folder is exported before its first task, and a worker can be stopped during that."""

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from models.network.backbone import Backbone, ResolvedBackbone
from models.versions.store import VersionStore
from tasks.queue import TaskQueue, connect
from tests.support.batches import check_batch
from tests.support.exported import export_once
from tests.support.redis_servers import RedisServer
from tests.support.tiny_model import TinyImages, tiny_backbone, tiny_settings
from trainer import context
from trainer.publish import learn_batch
from trainer.worker import worker
from trainer.worker.metrics import WorkerMetrics

pytestmark = pytest.mark.usefixtures("restore_torch_settings", "tiny")

SETTINGS = tiny_settings(gate_accuracy=1, gate_auc=1)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hash of the backbone of each export."""
    found: list[str] = []

    def counting(backbone: Backbone) -> dict[str, bytes]:
        found.append(backbone.spec.sha256)
        return export_once(backbone)

    monkeypatch.setattr(context, "_exported", {})
    monkeypatch.setattr(context, "_resolved", {})
    monkeypatch.setattr(context, "export", counting)
    monkeypatch.setattr(context, "resolve_backbone", lambda *chosen: ResolvedBackbone(tiny_backbone(), b"weights"))
    return found


def learn(data: Path) -> None:
    images = TinyImages()
    batch = check_batch((name, f"{n}.png", images.read(f"{name}/{n}")) for name in ("plum", "kiwi") for n in range(4))
    learn_batch(data, batch, SETTINGS, lambda event: None)


def test_the_first_task_uses_the_prepared_backbone_and_the_folder_is_empty_until_then(
    tmp_path: Path, exports: list[str]
) -> None:
    store = VersionStore(tmp_path / "data")
    context.prepare_backbone(store, SETTINGS)
    assert len(exports) == 1
    assert not store.root.exists()
    learn(store.root)
    assert len(exports) == 1
    assert store.current() == 1
    assert (store.root / "backbone.safetensors").read_bytes() == b"weights"


def test_another_backbone_can_be_chosen_after_the_preparation(tmp_path: Path, exports: list[str]) -> None:
    context.prepare_backbone(VersionStore(tmp_path), SETTINGS.model_copy(update={"backbone": "another"}))
    learn(tmp_path / "data")
    assert len(exports) == 1  # the tiny backbone stands for both names: its graphs are those of the folder
    assert not (tmp_path / "data" / "backbone.safetensors").exists(), "that of the other name was not recorded"


def idle_worker(data: Path, redis_url: str) -> worker.Worker:
    return worker.Worker(data, TaskQueue(connect(redis_url), "test"), SETTINGS, "worker", WorkerMetrics())


class Stopped:
    """A worker that is stopped by a signal while it prepares."""

    def __init__(self, data: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prepared: list[Path] = []
        self._worker = idle_worker(data, redis_url)
        monkeypatch.setattr(worker, "prepare_backbone", self._prepare)

    def _prepare(self, store: VersionStore, settings: Any) -> None:
        self.prepared.append(store.root)
        self._worker.stop()  # as a signal handler does, in the thread that prepares
        time.sleep(60)

    def run(self) -> float:
        """The seconds until it returns."""
        started = time.monotonic()
        if not self.prepared:
            self._worker.run()
        return time.monotonic() - started


def test_a_worker_that_prepares_can_be_stopped_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisServer(tmp_path / "redis") as redis:
        stopped = Stopped(tmp_path / "data", redis.url, monkeypatch)
        assert stopped.run() < 30
    assert stopped.prepared == [tmp_path / "data"]


def test_a_folder_with_a_version_needs_no_preparation(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "prepare_backbone", lambda *arguments: pytest.fail("the graphs are there"))
    with RedisServer(tmp_path / "redis") as redis:
        idle_worker(data, redis.url)._prepare()
    assert VersionStore(data).current() == 3


def test_a_preparation_that_fails_does_not_end_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: Any) -> None:
        raise RuntimeError("this torch cannot export")

    monkeypatch.setattr(worker, "prepare_backbone", fails)
    with RedisServer(tmp_path / "redis") as redis:
        idle_worker(tmp_path / "data", redis.url)._prepare()
    assert "cannot be exported before the first task" in caplog.text


def test_what_was_prepared_is_freed_if_another_trainer_learned_the_first_task(
    tmp_path: Path, exports: list[str]
) -> None:
    learn(tmp_path / "data")
    context.prepare_backbone(VersionStore(tmp_path / "other"), SETTINGS)
    assert context._exported
    assert context._resolved
    store = VersionStore(tmp_path / "data")
    backbone = context.backbone_of(store, SETTINGS, store.current_manifest())
    context.LearningContext.open(store, SETTINGS, backbone, store.current_manifest())
    assert not context._exported
    assert not context._resolved
