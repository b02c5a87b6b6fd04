"""No network is trained on a held-out image, and its evidence does not know it."""

from typing import Any

import numpy as np
import pytest

from models.inference.evidence import Evidence
from tests.support.tiny_model import class_tasks, learn_tasks, tiny_learner
from trainer.learning import evaluation, learner
from trainer.learning.leave_out import LeaveOut
from trainer.learning.simulation import left_out_scores


def test_no_network_is_trained_on_a_held_out_image(monkeypatch: pytest.MonkeyPatch) -> None:
    trained_on: list[set[str]] = []
    train_task, prepare = learner.train_task, learner.Learner._back_update

    def spy_on_training(tokens: Any, shared: Any, data: Any, *rest: Any) -> Any:
        trained_on.append({*data.keys, *data.replay})
        return train_task(tokens, shared, data, *rest)

    def spy_on_back_update(
        self: Any, model: Any, earlier: int, memory: Any, extension: Any, new_images: Any, *rest: Any
    ) -> Any:
        trained_on.append({*new_images, *(key for own in (memory, extension) for keys in own.values() for key in keys)})
        return prepare(self, model, earlier, memory, extension, new_images, *rest)

    monkeypatch.setattr(learner, "train_task", spy_on_training)
    monkeypatch.setattr(learner.Learner, "_back_update", spy_on_back_update)
    steps = learn_tasks(tiny_learner(), class_tasks([2, 2, 3]))
    assert len(trained_on) == 6
    held_out = {sample.key for step in steps for sample in step.samples.held_out}
    assert len(held_out) >= 7  # one of each class at least
    for keys in trained_on:
        assert keys
        assert not keys & held_out
    for step in steps:
        replayed = {key for keys in step.samples.memory.values() for key in keys}
        assert not replayed & {sample.key for sample in step.samples.held_out}


def test_the_rule_is_fitted_on_evidence_without_the_image_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frozen scores of a held-out image are those of statistics that do not hold it."""
    fitted: list[Evidence] = []
    fit_trained = evaluation.fit_trained

    def spy(evidence: Evidence, *rest: Any) -> Any:
        fitted.append(evidence)
        return fit_trained(evidence, *rest)

    monkeypatch.setattr(evaluation, "fit_trained", spy)
    learner = tiny_learner()
    (step,) = learn_tasks(learner, class_tasks([3], images=12))
    held_out = step.samples.held_out
    features, expanded = learner.tokens.frozen([sample.key for sample in held_out])
    with_itself = step.model.frozen.scores(features, expanded)
    columns = [step.model.classes.index(sample.label) for sample in held_out]
    own = np.arange(len(held_out)), columns
    # In its own class's statistics, an image is nearer to the mean than a fresh image of the class.
    assert (fitted[0].frozen.distances[own] > with_itself.distances[own]).all()


def test_left_out_images_fit_their_class_less_than_fitted_ones() -> None:
    learner = tiny_learner()
    (step,) = learn_tasks(learner, class_tasks([3], images=12))
    keys = [key for own in step.samples.memory.values() for key in own]
    columns = np.array([c for c, name in enumerate(step.model.classes) for _ in step.samples.memory[name]])
    kept = LeaveOut(step.model.frozen, *learner.tokens.frozen(keys), columns)
    scores = left_out_scores(kept, np.random.default_rng(0))
    assert not np.isnan(scores.ridge).any()
    plain = step.model.frozen.scores(kept.features, kept.expanded)
    own = np.arange(len(keys)), columns
    assert (scores.distances[own] > plain.distances[own]).all()
    # 1 is what the regression aims at. The images of a fold are left out together, so not each of them is further off.
    assert abs(1 - scores.ridge[own]).mean() > abs(1 - plain.ridge[own]).mean()
