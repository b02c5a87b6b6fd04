"""Learning a batch in a data folder: what is read, stored and written, and what a failure leaves behind."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from models.errors import StoreError
from models.files import sha256_bytes
from models.versions.class_ids import samples_by_name
from models.versions.edits import Edit, publish_edit
from models.versions.store import VersionStore
from tasks.batch import LabelledBatch, open_batch
from tasks.images import ImageStore
from tests.support.batches import check_batch
from tests.support.images import write_classes
from tests.support.tiny_model import TinyImages, tiny_settings
from tests.support.version_stores import seen_by_name
from trainer import publish
from trainer.data_folder import Turn, training_lock
from trainer.learning.progress import Event
from trainer.publish import Outcome, learn_batch

pytestmark = pytest.mark.usefixtures("restore_torch_settings", "tiny")

IMAGES = [TinyImages().read(f"plum/{number}") for number in range(6)]


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
    new = [path for path in data.rglob("*") if str(path) not in before and path.parent.name != "images"]
    assert {path.name for path in new} <= {"work", ".lock", checkpoint.name}


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


# Another version becomes current during the training


class Interference:
    """A listener that calls `act` once, after the first epoch of the new task, and counts the epochs."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act, self.epochs = act, 0

    def __call__(self, event: Event) -> None:
        if event.phase.startswith("task"):
            self.epochs += 1
            if self.epochs == 1:
                self._act()


def learn_while(data: Path, batch: LabelledBatch, act: Callable[[], object], **more: Any) -> tuple[Outcome, int]:
    listener = Interference(act)
    return learn_batch(data, batch, tiny_settings(gate_accuracy=1, gate_auc=1), listener, **more), listener.epochs


def edit(data: Path, *what: str) -> int:
    return publish_edit(VersionStore(data), Edit(*what), "operator", "anna").version  # type: ignore[arg-type]


def test_edits_during_a_training_do_not_throw_it_away(data: Path, batch: LabelledBatch) -> None:
    def edits() -> None:
        edit(data, "rename", "class 0", "apple")
        edit(data, "merge", "class 1", "class 2")

    alone = learn(Path(shutil.copytree(data, data.parent / "alone")), batch)
    outcome, epochs = learn_while(data, batch, edits)
    assert (outcome.state, outcome.manifest.parent, epochs) == ("published", 5, 2)
    assert outcome.manifest.tasks == [["apple", "class 1"], ["class 2", "class 3"], ["class 4"], ["plum"]]
    assert outcome.manifest.aliases == {"class 1": "class 2"}
    assert outcome.manifest.metrics["advice"] is None
    # The same as without the edits, except for the manifest
    assert outcome.manifest.files == alone.manifest.files
    loaded = VersionStore(data).load()
    assert set(samples_by_name(loaded.samples, loaded.manifest)["memory"]) == {
        "apple",
        *(f"class {n}" for n in range(1, 5)),
        "plum",
    }
    assert loaded.manifest.class_ids == alone.manifest.class_ids


def test_a_version_with_other_tensors_stops_the_training_at_once_and_it_starts_again(
    data: Path, batch: LabelledBatch
) -> None:
    outcome, epochs = learn_while(data, batch, lambda: VersionStore(data).activate(1, "operator", "roll back"))
    assert (outcome.state, outcome.manifest.parent, epochs) == ("published", 1, 3)  # one on 3, two on 1
    assert outcome.manifest.tasks == [["class 0", "class 1"], ["plum"]]


def test_a_new_class_whose_name_was_given_to_another_class_extends_that_class(data: Path, batch: LabelledBatch) -> None:
    outcome, epochs = learn_while(data, batch, lambda: edit(data, "rename", "class 0", "plum"), submitted_at=3)
    assert (outcome.state, outcome.manifest.parent, epochs) == ("published", 4, 2)
    assert outcome.manifest.classes == ["plum", *(f"class {n}" for n in range(1, 5))]


def test_publishing_removes_only_the_checkpoint_of_its_own_task(data: Path, batch: LabelledBatch) -> None:
    (data / "work" / "another").mkdir(parents=True)
    learn(data, batch)
    assert [path.name for path in (data / "work").iterdir() if path.is_dir()] == ["another"]


def test_a_worker_waits_for_another_training_but_not_for_one_that_lost_its_lease(tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def wait(times: int, patience: float = 0.0) -> Turn:
        left = iter(range(times))

        def on_wait() -> None:
            if next(left, None) is None:
                raise Enough

        return Turn("this queue", patience, on_wait)

    with training_lock(tmp_path), pytest.raises(Enough), training_lock(tmp_path, wait(2)):
        pass
    other = Turn("another queue", 0.0, lambda: None)
    with training_lock(tmp_path, other), pytest.raises(Enough), training_lock(tmp_path, wait(2)):
        pass
    with training_lock(tmp_path, wait(0)):
        with pytest.raises(Enough), training_lock(tmp_path, wait(1, patience=60)):
            pass
        with training_lock(tmp_path, wait(1)):
            pass
    with training_lock(tmp_path):  # released by all
        pass


def test_an_interrupted_training_resumes_after_an_edit(data: Path, batch: LabelledBatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        learn_while(data, batch, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    edit(data, "rename", "class 0", "apple")
    outcome, epochs = learn_while(data, batch, lambda: None)
    assert (outcome.manifest.parent, epochs) == (4, 1)


def test_renames_and_merges_apply_to_a_batch_that_was_submitted_before_them(data: Path) -> None:
    names = ["class 0", "class 1", "class 3"]
    more = [(name, f"{n}.png", TinyImages().read(f"{name}/{n}")) for name in names for n in range(50, 53)]
    edit(data, "rename", "class 0", "apple")
    edit(data, "merge", "class 1", "class 2")
    outcome = learn(data, check_batch(more), submitted_at=3)
    assert outcome.manifest.metrics["images_per_class"] == {"apple": 3, "class 2": 3, "class 3": 3}
    assert outcome.manifest.classes == ["apple", "class 1", "class 2", "class 3", "class 4"]
    seen = seen_by_name(data)
    counts = {name: len(keys) for name, keys in seen.items()}
    assert counts == {"apple": 15, "class 1": 12, "class 2": 15, "class 3": 15, "class 4": 12}
