"""Loading versions for answering: only what no loaded version has is read, and the answers are those of a full load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.errors import CorruptVersion, NothingLearned
from models.inference.model import Model
from models.inference.model_cache import ModelCache
from models.inference.stored_model import read_model
from models.versions.edits import Edit, publish_edit
from models.versions.store import VersionStore
from tests.support.servers import learned_folder
from tests.support.version_stores import flip_byte, record_reads


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(learned_folder(tmp_path / "robot"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return record_reads(monkeypatch)


def assert_same_answers(one: Model, other: Model) -> None:
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(6, one.frozen.means.shape[1])).astype(np.float32)
    expanded = np.maximum(rng.normal(size=(6, one.frozen.moments.shape[1])), 0).astype(np.float32)
    for name, scores in vars(one.frozen.scores(queries, expanded)).items():
        np.testing.assert_allclose(scores, getattr(other.frozen.scores(queries, expanded), name), rtol=1e-3, atol=1e-4)
    assert one.classes == other.classes
    for mine, theirs in zip(one.tasks, other.tasks, strict=True):
        assert np.array_equal(mine.head.weight, theirs.head.weight)
        assert np.array_equal(mine.adapters.w1, theirs.adapters.w1)


def test_the_next_version_reads_one_task_and_shares_the_others(store: VersionStore, read: list[str]) -> None:
    cache = ModelCache(store)
    two = cache.load(2).model
    read.clear()
    three = cache.load(3).model
    new = store.manifest(3).files["task.2"].sha256
    assert [key for key in read if key.startswith("tasks/")] == [f"tasks/{new}.safetensors"]
    assert all(one.gaussians is other.gaussians for one, other in zip(two.tasks, three.tasks, strict=False))
    assert_same_answers(three, read_model(store.load(3))[0])


def test_a_roll_back_reads_no_task_but_those_that_it_removes_from_the_sums(
    store: VersionStore, read: list[str]
) -> None:
    cache = ModelCache(store)
    kept = cache.load(3)
    read.clear()
    two = cache.load(2).model
    gone = store.manifest(3).files["task.2"].sha256
    assert [key for key in read if key.startswith("tasks/")] == [f"tasks/{gone}.safetensors"]
    assert_same_answers(two, read_model(store.load(2))[0])
    assert kept.manifest.version == 3


def test_an_edited_version_reads_no_task_and_solves_nothing_again(store: VersionStore, read: list[str]) -> None:
    cache = ModelCache(store)
    before = cache.load().model
    publish_edit(store, Edit("rename", "class 0", "apple"), "operator", "a test")
    read.clear()
    after = cache.load().model
    assert not [key for key in read if key.startswith("tasks/")]
    assert after.frozen is before.frozen
    assert after.classes[0] == "apple"


def test_a_version_that_nothing_holds_any_more_is_read_again(store: VersionStore, read: list[str]) -> None:
    cache = ModelCache(store)
    cache.load(3)
    read.clear()
    cache.load(3)
    assert len([key for key in read if key.startswith("tasks/")]) == 3


def test_a_task_of_the_loaded_version_that_was_pruned_is_not_needed_to_load_another(
    store: VersionStore, tmp_path: Path
) -> None:
    cache = ModelCache(store)
    kept = cache.load(3)
    store.content_path(3, "task.2").unlink()
    assert_same_answers(cache.load(2).model, read_model(store.load(2))[0])
    assert kept.manifest.version == 3


def test_a_damaged_task_is_refused_although_the_other_tasks_are_loaded(store: VersionStore) -> None:
    cache = ModelCache(store)
    kept = cache.load(2)
    flip_byte(store.content_path(3, "task.2"))
    with pytest.raises(CorruptVersion, match=r"version 3: task\.2 does not match its sha256"):
        cache.load(3)
    assert kept.manifest.version == 2


def test_what_only_a_trainer_needs_is_not_kept(store: VersionStore) -> None:
    model = ModelCache(store).load().model
    assert all(task.sums is None and task.update is None for task in model.tasks)
    assert all(task.gaussians.basis.dtype == np.float32 for task in model.tasks)
    assert model.shared.bottleneck == 0


def test_nothing_learned_is_said(tmp_path: Path) -> None:
    with pytest.raises(NothingLearned):
        ModelCache(VersionStore(tmp_path)).load()
