"""Reading a model from a version: tensors and manifest must fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.errors import CorruptVersion
from models.inference.model_cache import ModelCache
from models.inference.novelty import REFINED_SUMMARIES, SUMMARIES
from models.inference.stored_model import model_tensors, new_tensors, read_model
from models.versions.contents import HEADS, REFINED
from models.versions.reader import LoadedVersion
from models.versions.store import VersionStore
from tests.support.manifests import manifest_of
from tests.support.tiny_model import class_tasks, features_of, learn_tasks, tiny_backbone, tiny_learner
from trainer.learning import novelty_fit
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


def test_a_novelty_decision_without_a_refined_feature_is_stored_as_before_it_was_an_input(
    learned: Learned, tmp_path: Path
) -> None:
    """Servers of earlier releases read such a version."""
    heads = stored(learned, tmp_path).contents[HEADS]
    assert {len(heads[f"novelty.{name}"]) for name in ("centre", "scale", "weights")} == {
        len(SUMMARIES) - len(REFINED_SUMMARIES)
    }


def test_a_refined_feature_is_stored_with_its_version_and_shared_by_the_next_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(novelty_fit, "LEAST_HELD_OUT", 0)  # generated images are near-duplicates
    own = tiny_learner(cnn=True, tail=True)
    learned = learn_tasks(own, class_tasks([3, 2], images=30))[-1]
    before = learned.model
    assert before.refined is not None
    assert before.novelty.uses_refined
    spec = own.backbone.spec
    store = VersionStore(tmp_path)
    store.publish(manifest_of(before, spec), model_tensors(before), learned.samples.to_json())
    model, _ = read_model(store.load())
    assert model.refined is not None
    assert model.uses_refined
    keys = [f"{name}/{number}" for name in model.classes for number in range(100, 104)]
    features = features_of(own, model, keys)
    one, other = (each.rule.log_scores(each.evidence(features)) for each in (before, model))
    np.testing.assert_allclose(one, other, atol=1e-4)
    new, known = new_tensors(model)
    assert known[REFINED] == model.refined.entry
    assert not any(name.startswith(f"{REFINED}/") for name in new)
    answering = ModelCache(store).load().model
    assert answering.refined is not None
    np.testing.assert_array_equal(answering.refined.whitening, model.refined.whitening)


def test_a_rule_that_weighs_the_refined_feature_needs_it(tmp_path: Path) -> None:
    own = tiny_learner(cnn=True, tail=True)
    model = learn_tasks(own, class_tasks([3], images=10))[-1].model
    without = replace(features_of(own, model, ["class 0/100"]), refined=None)
    with pytest.raises(ValueError, match="which was not computed"):
        model.rule.log_scores(model.evidence(without))
