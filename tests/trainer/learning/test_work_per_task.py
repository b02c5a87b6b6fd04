"""What the next task does not compute again, and what stays bounded when many tasks are learned."""

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

import trainer.learning.left_out_evidence
from models.inference.evidence import Features
from models.inference.model import Model, TaskModel
from tests.support.tiny_model import TinyImages, class_tasks, learn_tasks, silent_progress, tiny_learner
from trainer.learning.back_update import heads_to_update
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.learner import Learner
from trainer.learning.memory import Samples
from trainer.learning.provisional import provisional_model
from trainer.learning.scored_images import ScoredImages


def model_with_means(means: NDArray[np.float64]) -> Model:
    """One class per task, at these means of the frozen feature."""
    model = tiny_learner().empty()
    frozen = model.frozen.with_classes(len(means))
    frozen.means[:, : means.shape[1]] = means
    return replace(model, frozen=frozen, pending=tuple((f"class {k}",) for k in range(len(means))))


def test_a_new_task_updates_the_heads_of_similar_tasks_and_others_in_turn() -> None:
    angles = np.linspace(0, np.pi, 41)
    model = model_with_means(np.stack([np.cos(angles), np.sin(angles)], axis=1))  # the new task is near the last ones
    chosen = heads_to_update(model, 40, 8)
    assert len(chosen) == 8
    assert {35, 36, 37, 38, 39} <= {*chosen}
    assert any(k < 30 for k in chosen)


def test_every_head_has_its_turn() -> None:
    means = np.random.default_rng(0).normal(size=(61, 2))
    updated = {
        k for earlier in range(40, 60) for k in heads_to_update(model_with_means(means[: earlier + 1]), earlier, 8)
    }
    assert {*range(40)} <= updated


@pytest.mark.parametrize("most", [None, 3])
def test_few_heads_are_all_updated(most: int | None) -> None:
    assert heads_to_update(model_with_means(np.eye(4)), 3, most) == [0, 1, 2]


def test_a_refined_version_takes_over_the_left_out_evidence_of_the_provisional_one() -> None:
    learner = tiny_learner()
    images = class_tasks([3], images=8)[0]
    provisional = provisional_model(learner.tokens, learner.empty(), Samples(), {"task": images}, learner.settings)
    with patch.object(trainer.learning.left_out_evidence, "left_out_scores") as again:
        learned = learner.learn(learner.empty(), Samples(), images, Checkpoint(None), silent_progress())
    again.assert_not_called()
    np.testing.assert_array_equal(learned.model.novelty.weights, provisional.model.novelty.weights)
    alone = tiny_learner().learn(learner.empty(), Samples(), images, Checkpoint(None), silent_progress())
    np.testing.assert_array_equal(learned.model.novelty.weights, alone.model.novelty.weights)
    assert learned.model.rule == alone.model.rule


def scored(
    learner: Learner, model: Model, keys: Sequence[str], known: ScoredImages
) -> tuple[list[int], list[NDArray[np.float64]]]:
    """(passes of an image through a network, the evidence)"""
    passes = []

    def features_of(missing: Sequence[str], tasks: Sequence[TaskModel]) -> NDArray[np.float32]:
        passes.append(len(missing) * len(tasks))
        return learner.tokens.features_of_all(missing, tasks)

    frozen = model.frozen.scores(*learner.tokens.frozen(keys))
    found = known.evidence(model, keys, frozen, features_of)
    return passes, [found.class_logits, found.ood_logits, found.class_distances, found.class_cosines]


def test_only_new_images_and_changed_heads_are_scored_again() -> None:
    learner, known = tiny_learner(cascade="off"), ScoredImages()
    model = learn_tasks(learner, class_tasks([2, 1, 2]))[-1].model
    keys = [key for own in TinyImages().batch(["a", "b"], count=5).values() for key in own]
    assert scored(learner, model, keys[:8], known)[0] == [3 * 8]
    assert scored(learner, model, keys[:8], known)[0] == []
    assert scored(learner, model, keys, known)[0] == [3 * 2]
    first = model.tasks[0]
    changed = model.with_heads({0: replace(first.head, bias=first.head.bias + 1)})
    passes, found = scored(learner, changed, keys, known)
    assert passes == [10]
    for a, b in zip(found, scored(learner, changed, keys, ScoredImages())[1], strict=True):
        np.testing.assert_array_equal(a, b)  # also those that were scored with other images and tasks
    features = learner.tokens.features_of_all(keys, model.tasks)
    expected = changed.evidence(Features(features, *learner.tokens.frozen(keys)))
    np.testing.assert_allclose(found[0], expected.class_logits, atol=1e-4)


def test_scores_of_forgotten_images_are_gone() -> None:
    learner, known = tiny_learner(), ScoredImages()
    model = learn_tasks(learner, class_tasks([2]))[-1].model
    keys = [key for own in TinyImages().batch(["a"], count=4).values() for key in own]
    scored(learner, model, keys, known)
    known.keep_only(set(keys[:3]))
    assert scored(learner, model, keys, known)[0] == [1]
