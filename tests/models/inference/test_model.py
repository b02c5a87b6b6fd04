"""Reading a model from a version: tensors and manifest must fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.errors import CorruptVersion
from models.inference.novelty import SUMMARIES
from models.inference.stored_model import model_tensors, read_model
from models.versions.contents import HEADS
from models.versions.reader import LoadedVersion
from models.versions.store import VersionStore
from tests.support.manifests import manifest_of
from tests.support.tiny_model import class_tasks, learn_tasks, tiny_backbone, tiny_learner
from trainer.learning.learner import Learned

SPEC = tiny_backbone().spec


@pytest.fixture(scope="module")
def learned() -> Learned:
    return learn_tasks(tiny_learner(), class_tasks([2, 1]))[-1]


def stored(learned: Learned, root: Path, **changes: Any) -> LoadedVersion:
    """The model, published with a changed manifest and loaded again."""
    store = VersionStore(root)
    store.publish(manifest_of(learned.model, SPEC, **changes), model_tensors(learned.model), learned.samples.to_json())
    return store.load()


def test_a_published_model_is_read_unchanged(learned: Learned, tmp_path: Path) -> None:
    model, preprocessing = read_model(stored(learned, tmp_path))
    assert preprocessing == SPEC.preprocessing
    assert model.classes == learned.model.classes
    assert model.rule == learned.model.rule
    before, after = model_tensors(learned.model), model_tensors(model)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tasks": [["class 0"], ["class 2"]]}, "task class 0 have another number of classes"),
        ({"tasks": [["class 0", "class 1", "class 3"], ["class 2"]]}, "class 3 have another number of classes"),
        ({"tasks": [["class 0", "class 1"]]}, "contents of another number of tasks"),
        ({"tasks": [["class 0", "class 1"], ["class 2"], ["class 3"]]}, "contents of another number of tasks"),
        ({"preprocessing_sha256": "a" * 64}, "the preprocessing does not match its sha256"),
        ({"rule": {"name": "paper", "weights": {"magic": 1.0}, "scales": [], "shifts": []}}, "unknown evidence magic"),
        ({"rule": {"name": "paper"}}, "weights"),
        ({"backbone": {"name": "tiny"}}, "preprocessing"),
    ],
)
def test_a_manifest_that_does_not_fit_its_tensors_is_refused(
    learned: Learned, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CorruptVersion, match=rf"version 1: not in the format that this openworld reads .*{reason}"):
        read_model(stored(learned, tmp_path, **changes))


def test_another_preprocessing_under_the_old_hash_is_refused(learned: Learned, tmp_path: Path) -> None:
    wider = replace(SPEC, preprocessing=replace(SPEC.preprocessing, resize=SPEC.preprocessing.resize + 1))
    with pytest.raises(CorruptVersion, match="the preprocessing does not match its sha256"):
        read_model(stored(learned, tmp_path, backbone=wider.to_dict()))


def test_a_novelty_decision_without_the_backbones_output_gives_it_no_weight(learned: Learned, tmp_path: Path) -> None:
    """Versions of earlier releases have one input less."""
    loaded, place = stored(learned, tmp_path), SUMMARIES.index("output_distance")
    heads = dict(loaded.contents[HEADS])
    for name in ("centre", "scale", "weights"):
        heads[f"novelty.{name}"] = np.delete(heads[f"novelty.{name}"], place)
    model, _ = read_model(replace(loaded, contents={**loaded.contents, HEADS: heads}))
    now = learned.model.novelty
    assert model.novelty.weights.tolist() == np.where(np.arange(len(SUMMARIES)) == place, 0.0, now.weights).tolist()
    rows = np.random.default_rng(0).normal(0, 5, (9, len(SUMMARIES)))
    without = replace(now, weights=model.novelty.weights)
    np.testing.assert_allclose(model.novelty.scores(rows), without.scores(rows))
