"""Learning a batch in a data folder: what is read, stored and written, and what a failure leaves behind."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from models.errors import StoreError
from models.files import sha256_bytes
from models.versions.store import VersionStore
from tasks.batch import LabelledBatch, open_batch
from tasks.images import ImageStore
from tests.support.batches import check_batch
from tests.support.images import write_classes
from tests.support.servers import learned_folder
from tests.support.tiny_model import TinyImages, tiny_backbone, tiny_settings
from trainer import publish
from trainer.data_folder import training_lock
from trainer.publish import Outcome, learn_batch

pytestmark = pytest.mark.usefixtures("restore_torch_settings")

IMAGES = [TinyImages().read(f"plum/{number}") for number in range(6)]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "open_backbone", lambda *arguments: tiny_backbone())


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learned_folder(tmp_path_factory.mktemp("learned") / "robot")


@pytest.fixture
def data(learned: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(learned, tmp_path / "data"))


@pytest.fixture
def batch() -> LabelledBatch:
    return check_batch(("plum", f"{number}.png", image) for number, image in enumerate(IMAGES))


def learn(data: Path, batch: LabelledBatch, **more: Any) -> Outcome:
    return learn_batch(data, batch, tiny_settings(gate_accuracy=1, gate_auc=1), lambda event: None, **more)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The versions that are loaded, in order."""
    found: list[int | None] = []
    load = VersionStore.load

    def recording(self: VersionStore, n: int | None = None, **more: Any) -> Any:
        loaded = load(self, n, **more)
        found.append(loaded.manifest.version)
        return loaded

    monkeypatch.setattr(VersionStore, "load", recording)
    return found


def test_the_parent_is_loaded_once_per_task(data: Path, batch: LabelledBatch, loads: list[int | None]) -> None:
    assert learn(data, batch).manifest.parent == 3
    assert loads == [3]


def test_the_parent_is_loaded_again_if_another_version_became_current_before_the_lock(
    data: Path, batch: LabelledBatch, loads: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def activate_then_lock(root: Path, timeout: float | None) -> Any:
        VersionStore(root).activate(2, "operator", "between the checks and the lock")
        loads.clear()
        return training_lock(root, timeout)

    monkeypatch.setattr(publish, "training_lock", activate_then_lock)
    assert learn(data, batch).manifest.parent == 2
    assert loads == [2]


def test_images_that_are_stored_are_neither_read_from_the_batch_nor_stored_again(
    data: Path, batch: LabelledBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = ImageStore(data)
    for image in IMAGES:
        images.put(image)
    stored = data / "images"
    for path in stored.glob("*/*"):
        os.utime(path, (1, 1))

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("the image is in the store")

    monkeypatch.setattr(ImageStore, "put", refuse)
    known = LabelledBatch(batch.images, refuse, batch.duplicates)
    assert learn(data, known, images_stored=True).state == "published"
    assert {path.stat().st_mtime for path in stored.glob("*/*")} == {1}


def test_an_image_that_changes_between_the_check_and_the_store_stops_the_task(data: Path, tmp_path: Path) -> None:
    folder = write_classes(tmp_path / "batch", {"plum": IMAGES})
    before = sorted(str(path) for path in data.rglob("*"))
    with open_batch(folder) as batch:
        (folder / "plum" / "3.jpg").write_bytes(TinyImages().read("fig/0"))
        checkpoint = data / "work" / batch.task_id
        checkpoint.mkdir(parents=True)  # of an interrupted training
        with pytest.raises(StoreError, match=r"'plum/3.jpg' changed while the batch was read"):
            learn(data, batch)
        assert checkpoint.is_dir()
    assert VersionStore(data).current() == 3
    assert not any(sha256_bytes(image) in ImageStore(data) for image in IMAGES)
    new = {path for path in map(str, data.rglob("*")) if path not in before}
    assert {Path(path).name for path in new} <= {"work", ".lock", checkpoint.name}


def test_an_interrupted_training_continues_without_the_files_whose_images_are_stored(
    data: Path, tmp_path: Path
) -> None:
    folder = write_classes(tmp_path / "batch", {"plum": IMAGES})
    images = ImageStore(data)
    for image in IMAGES[1:]:
        images.put(image)
    damaged = sha256_bytes(IMAGES[1])
    (data / "images" / damaged[:2] / damaged).write_bytes(b"damaged")
    with open_batch(folder) as batch:
        (folder / "plum" / "2.jpg").unlink()
        assert learn(data, batch).state == "published"
    assert images.read(damaged) == IMAGES[1]


def test_a_failed_first_training_leaves_only_the_lock_files_behind(
    batch: LabelledBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise StoreError("not now")

    monkeypatch.setattr(VersionStore, "publish", fail)
    with training_lock(tmp_path), pytest.raises(StoreError, match="another training"):
        learn(tmp_path, batch)
    locks = {path: path.stat().st_ino for path in (tmp_path / ".lock", tmp_path / "work" / ".lock")}
    (tmp_path / "FORMAT").unlink()
    for _ in range(2):
        with pytest.raises(StoreError, match="not now"):
            learn(tmp_path, batch)
        assert {path: path.stat().st_ino for path in tmp_path.rglob("*") if path.is_file()} == locks
