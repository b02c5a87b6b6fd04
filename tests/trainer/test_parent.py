"""The parent of a training: of a version that adds tasks to the last one that was read, only these are read."""

from pathlib import Path

import numpy as np
import pytest

from models.inference.model import Model
from models.inference.stored_model import model_tensors, read_model
from models.versions.store import VersionStore
from tests.support.servers import learned_folder
from tests.support.version_stores import record_reads
from trainer.parent import Parent


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    store = VersionStore(learned_folder(tmp_path / "robot"))
    store.activate(2, "operator", "a test")
    return store


def loaded(store: VersionStore) -> Model:
    model = Parent.load(store).model
    assert model is not None
    return model


def assert_same_bits(one: Model, other: Model) -> None:
    assert one.classes == other.classes
    for name in ("counts", "means", "moments", "scatter", "gram"):
        assert np.array_equal(getattr(one.frozen, name), getattr(other.frozen, name)), name
    mine, theirs = model_tensors(one), model_tensors(other)
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)
    shared = one.shared.tensors()
    assert all(np.array_equal(shared[name], tensor) for name, tensor in other.shared.tensors().items())


def test_the_next_version_reads_one_task_and_has_the_bits_of_a_full_read(
    store: VersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = loaded(store)
    store.activate(3, "operator", "a test")
    read = record_reads(monkeypatch)
    after = loaded(store)
    new = store.manifest(3).files["task.2"].sha256
    assert [key for key in read if key.startswith("tasks/")] == [f"tasks/{new}.safetensors"]
    assert len(after.tasks) == len(before.tasks) + 1
    assert_same_bits(after, read_model(store.load(3))[0])


def test_after_a_roll_back_the_sums_are_those_of_a_full_read(
    store: VersionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.activate(3, "operator", "a test")
    loaded(store)
    store.activate(2, "operator", "a test")
    read = record_reads(monkeypatch)
    after = loaded(store)
    assert not [key for key in read if key.startswith("tasks/")]
    assert_same_bits(after, read_model(store.load(2))[0])


def test_another_folder_is_read_on_its_own(store: VersionStore, tmp_path: Path) -> None:
    loaded(store)
    other = VersionStore(learned_folder(tmp_path / "other"))
    assert_same_bits(loaded(other), read_model(other.load())[0])
    assert_same_bits(loaded(store), read_model(store.load())[0])
