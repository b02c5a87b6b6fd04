"""`openworld learn` refuses what it cannot learn, and leaves nothing behind when it fails."""

import errno
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models import files
from tests.support.coloured_images import coloured_image, tree, write_colours
from tests.support.images import write_classes

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("environment")

Run = Any


@pytest.fixture
def bad_batch(tmp_path: Path) -> Path:
    folder = write_colours(tmp_path / "bad", "blue")
    write_classes(folder, {"white": [b""], "Red": [coloured_image("red", 50), coloured_image("red", 51)]})
    (folder / "blue" / "broken.jpg").write_bytes(coloured_image("blue", 60)[:200])
    (folder / "loose.txt").write_text("hello")
    return folder


def test_a_bad_batch_is_refused_with_all_its_problems_and_changes_nothing(
    first: Path, bad_batch: Path, run: Run
) -> None:
    before = tree(first)
    code, _, err = run("learn", bad_batch, "--data", first)
    assert code == 2
    for problem in (
        "'white' has no image that can be read",
        "'blue/broken.jpg' cannot be read",
        "'loose.txt' lies",
        "known class 'red'",
    ):
        assert problem in err
    assert tree(first) == before


def test_a_bad_batch_creates_no_data_folder(bad_batch: Path, tmp_path: Path, run: Run) -> None:
    code, _, err = run("learn", bad_batch, "--data", tmp_path / "a" / "b")
    assert code == 2
    assert "problems" in err
    assert not (tmp_path / "a").exists()
    code, _, err = run("learn", tmp_path / "nowhere", "--data", tmp_path / "a")
    assert code == 2
    assert "does not exist" in err
    assert not (tmp_path / "a").exists()


def test_more_classes_than_the_replay_memory_holds_are_refused_before_training(
    first: Path, batches: SimpleNamespace, run: Run
) -> None:
    before = tree(first)
    code, _, err = run("learn", batches.second, "--data", first, "--memory", "3")
    assert code == 2
    assert "4 classes do not fit a memory of 3 images" in err
    assert tree(first) == before


def test_another_backbone_than_the_recorded_one_is_refused(first: Path, batches: SimpleNamespace, run: Run) -> None:
    before = tree(first)
    code, _, err = run("learn", batches.second, "--data", first, "--backbone", "resnet18")
    assert code == 2
    assert "made with tf_efficientnet_lite0" in err
    assert tree(first) == before


def test_an_unknown_backbone_leaves_only_lock_files(batches: SimpleNamespace, tmp_path: Path, run: Run) -> None:
    code, _, err = run("learn", batches.first, "--data", tmp_path / "a" / "b", "--backbone", "no_such_model")
    assert code == 2
    assert "no_such_model" in err
    assert tree(tmp_path / "a" / "b") == {"work": ""}


def test_an_invalid_setting_is_named_by_its_option_or_its_variable(
    batches: SimpleNamespace, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENWORLD_TRAIN_REPLAY_SIZE", "many")
    code, _, err = run("learn", batches.first, "--data", tmp_path / "data", "--epochs", "0")
    assert code == 2
    assert "--epochs: input should be greater than or equal to 1" in err
    assert "OPENWORLD_TRAIN_REPLAY_SIZE: input should be a valid integer" in err
    assert "Traceback" not in err
    assert not (tmp_path / "data").exists()


def test_learning_without_torch_names_the_extra_to_install(
    batches: SimpleNamespace, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = run("learn", batches.first, "--data", tmp_path / "data")
    assert code == 2
    assert "pip install 'openworld[train]'" in err


def test_two_trainings_in_one_folder_are_refused(first: Path, batches: SimpleNamespace, run: Run) -> None:
    from trainer.data_folder import training_lock

    before = tree(first)
    with training_lock(first):
        code, _, err = run("learn", batches.second, "--data", first)
    assert code == 2
    assert "another training is running" in err
    assert tree(first) == before


# A full disk


def full(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def files_in(data: Path, *ignored: str) -> dict[str, str]:
    """File name -> hash. Empty folders of images may stay: another process may be about to use them."""
    return {name: sha for name, sha in tree(data).items() if sha and not name.startswith(ignored)}


def test_too_little_disk_space_is_reported_before_anything_is_written(
    first: Path, batches: SimpleNamespace, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    before = tree(first)
    for folder in (first, tmp_path / "a" / "b"):
        code, _, err = run("learn", batches.second, "--data", folder)
        assert code == 2
        assert "not enough disk space" in err
        assert "1 MiB are free" in err
    assert tree(first) == before
    assert not (tmp_path / "a").exists()


def test_a_disk_that_fills_up_while_images_are_stored_leaves_no_files(
    first: Path, batches: SimpleNamespace, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = {first: 15, tmp_path / "a" / "b": 3}  # images; the first has 12

    def create(path: Path, data: bytes) -> bool:
        images = path.parent.parent
        if images.name == "images" and len(list(images.glob("*/*"))) >= room[images.parent]:
            full()
        return files.create_durable(path, data)

    monkeypatch.setattr("models.storage.local_files.create_durable", create)
    before = files_in(first)
    for folder in room:
        code, _, err = run("learn", batches.second, "--data", folder)
        assert code == 2
        assert "the disk is full" in err
    assert files_in(first) == before
    assert files_in(tmp_path / "a" / "b") == {}


def test_a_disk_that_is_full_at_publication_keeps_the_current_version_and_the_epochs(
    data: Path, batches: SimpleNamespace, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = ("work/", "cache/")  # checkpoints and computed features, from which the next attempt continues
    before = files_in(data, *resumed)

    def create(path: Path, content: bytes) -> bool:
        if path.parent.parent.name != "images":
            full()
        return files.create_durable(path, content)

    with monkeypatch.context() as patch:
        patch.setattr("models.storage.local_files.create_durable", create)
        code, _, err = run("learn", batches.second, "--data", data)
    assert code == 2
    assert "the disk is full, nothing was published" in err
    assert files_in(data, *resumed) == before
    code, out, err = run("learn", batches.second, "--data", data)
    assert code == 0
    assert "version 2 is current" in out
    assert "task 2: epoch" not in err, "it was trained again"


def test_publishing_removes_its_own_checkpoints_only(data: Path, batches: SimpleNamespace, run: Run) -> None:
    (data / "work" / "other").mkdir()
    (data / "work" / "other" / "task 2").write_bytes(b"epochs")
    assert run("learn", batches.more_red, "--data", data)[0] == 0
    assert sorted(path.name for path in (data / "work").iterdir()) == [".lock", "other"]
