"""Edits of classes: rename, merge, retire and restore publish versions without training, and can be undone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.errors import ClassConflict, StaleParent, UnknownClass
from models.inference.predictor import Predictor
from models.versions.class_ids import samples_by_name
from models.versions.edits import Edit, edited, publish_edit, unusable_labels
from models.versions.store import VersionStore
from tests.support.servers import known_image, learned_folder


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(learned_folder(tmp_path / "robot"))


def edit(store: VersionStore, *what: str) -> int:
    return publish_edit(store, Edit(*what), "operator", "alice").version  # type: ignore[arg-type]


def answers(store: VersionStore, label: str) -> tuple[str | None, list[str]]:
    """The most frequent label of a class's images, and the nearest classes of one of them."""
    found = Predictor.open(store.root, device="cpu").predict([known_image(label, n) for n in range(100, 109)])
    labels = [one.label for one in found if not isinstance(one, Exception)]
    nearest = [name for name, _ in found[0].nearest] if not isinstance(found[0], Exception) else []
    return max(set(labels), key=labels.count), nearest


@pytest.mark.parametrize(
    "what", [("retire", "class 1"), ("rename", "class 1", "apple"), ("merge", "class 1", "class 0")]
)
def test_an_edit_changes_only_the_manifest_and_logs_its_author(store: VersionStore, what: tuple[str, ...]) -> None:
    assert edit(store, *what) == 4
    assert store.manifest(4).files == store.manifest(3).files
    assert store.manifest(4).class_ids == store.manifest(3).class_ids
    assert store.manifest(4).parent == 3
    assert store.log()[-1].reason == f"alice: {Edit(*what).reason}"  # type: ignore[arg-type]
    assert store.log()[-1].by == "operator"


def test_an_edited_version_does_not_repeat_advice_about_the_classes_before(store: VersionStore) -> None:
    advised = store.manifest(3).model_copy(update={"metrics": {"advice": {"weak": []}, "accuracy": 0.9}})
    manifest = edited(advised, Edit("merge", "class 1", "class 0"))
    assert manifest.metrics["advice"] is None
    assert manifest.metrics["accuracy"] == 0.9


def test_a_renamed_class_is_answered_and_trained_by_its_new_name(store: VersionStore) -> None:
    assert answers(store, "class 0")[0] == "class 0"
    edit(store, "rename", "class 0", "apple")
    assert answers(store, "class 0")[0] == "apple"
    samples = samples_by_name(store.samples(4), store.manifest(4))
    assert "apple" in samples["memory"]
    assert "apple" in samples["seen"]
    assert "class 0" not in str(samples)
    assert store.manifest(4).classes == ["apple", "class 1", "class 2", "class 3", "class 4"]


def test_a_merged_class_is_answered_as_the_other_class(store: VersionStore) -> None:
    edit(store, "merge", "class 4", "class 0")
    label, nearest = answers(store, "class 4")
    assert label == "class 0"
    assert "class 4" not in nearest
    assert len(nearest) == len(set(nearest)) == 3
    assert answers(store, "class 0")[0] == "class 0"


def test_images_of_a_retired_class_are_novel_and_it_is_not_among_the_nearest(store: VersionStore) -> None:
    edit(store, "retire", "class 0")
    label, nearest = answers(store, "class 0")
    assert label is None
    assert "class 0" not in nearest
    assert answers(store, "class 4")[0] == "class 4"


def test_restoring_undoes_retiring_and_merging(store: VersionStore) -> None:
    for what in (("retire", "class 0"), ("merge", "class 4", "class 0")):
        if what[0] == "merge":
            edit(store, "restore", "class 0")
        edit(store, *what)
    edit(store, "restore", "class 4")
    assert store.manifest(store.current() or 0).aliases == {}
    assert answers(store, "class 4")[0] == "class 4"


def test_a_merged_class_follows_the_edits_of_its_target(store: VersionStore) -> None:
    edit(store, "merge", "class 4", "class 0")
    edit(store, "rename", "class 0", "apple")
    assert answers(store, "class 4")[0] == "apple"
    edit(store, "retire", "apple")
    assert answers(store, "class 4")[0] is None
    edit(store, "restore", "apple")
    assert answers(store, "class 4")[0] == "apple"


def test_an_edit_can_be_rolled_back_like_any_version(store: VersionStore) -> None:
    edit(store, "rename", "class 0", "apple")
    store.activate(3, "operator", "roll back")
    assert answers(store, "class 0")[0] == "class 0"


@pytest.mark.parametrize(
    ("what", "error"),
    [
        (("rename", "unknown", "x"), UnknownClass),
        (("rename", "class 0", "class 1"), ClassConflict),
        (("merge", "class 0", "unknown"), UnknownClass),
        (("merge", "class 0", "class 0"), ClassConflict),
        (("restore", "class 0"), ClassConflict),
        (("retire", "class 3"), ClassConflict),
        (("merge", "class 0", "class 3"), ClassConflict),
    ],
)
def test_an_impossible_edit_is_refused_and_changes_nothing(
    store: VersionStore, what: tuple[str, ...], error: type[Exception]
) -> None:
    edit(store, "retire", "class 3")
    with pytest.raises(error):
        edit(store, *what)
    assert store.current() == 4


def test_concurrent_edits_do_not_overwrite_each_other(store: VersionStore) -> None:
    loaded = store.load()
    manifest = edited(loaded.manifest, Edit("retire", "class 0"))
    edit(store, "retire", "class 1")
    with pytest.raises(StaleParent):
        store.publish(manifest, loaded.tensors, loaded.samples)


def test_labels_of_merged_and_retired_classes_are_reported_with_a_remedy(store: VersionStore) -> None:
    edit(store, "retire", "class 0")
    edit(store, "merge", "class 1", "class 2")
    manifest = store.manifest(store.current() or 0)
    assert manifest.active_classes == ["class 2", "class 3", "class 4"]
    retired, merged = unusable_labels(manifest, ["class 0", "class 1", "class 4", "new"])
    assert "restore it" in retired
    assert "'class 2'" in merged


def test_the_shares_of_merged_classes_add_up(store: VersionStore) -> None:
    (plain,) = Predictor.open(store.root, device="cpu").predict([known_image("class 4")])
    edit(store, "merge", "class 4", "class 3")
    (merged,) = Predictor.open(store.root, device="cpu").predict([known_image("class 4")])
    assert not isinstance(plain, Exception)
    assert not isinstance(merged, Exception)
    before, after = dict(plain.nearest), dict(merged.nearest)
    assert after["class 3"] == pytest.approx(before["class 3"] + before["class 4"], abs=1e-6)
    assert np.isclose(plain.calibrated_score, merged.calibrated_score)
