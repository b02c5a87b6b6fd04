"""The statistics of the refined feature, and its scores of held-out images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.inference.evidence import RefinedScores
from models.inference.model import Model
from tests.support.tiny_model import class_tasks, learn_tasks, quiet_progress, refining_learner
from trainer.learning import refined_statistics
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.forward_passes import ForwardPasses
from trainer.learning.learner import Learner
from trainer.learning.memory import Samples
from trainer.learning.refined_statistics import RefinedStatistics, left_out_refined
from trainer.learning.refinement import refined_feature

TASKS = class_tasks([2, 2], images=10)


def test_held_out_images_are_in_the_statistics_but_no_adapter_is_trained_on_them() -> None:
    own = refining_learner()
    learned = learn_tasks(own, TASKS)[-1]
    assert learned.samples.held_out
    without = replace(learned.samples, held_out=())
    found = [
        refined_feature(own.tokens, learned.model, s, own.settings, quiet_progress())
        for s in (learned.samples, without)
    ]
    one, other = found
    assert one is not None
    assert other is not None
    assert all(np.array_equal(array, other.tail[name]) for name, array in one.tail.items())
    assert not np.allclose(one.means, other.means)


def alone(features: Any, columns: Any) -> Any:
    """In place of likeness groups: every image is a scene of its own; generated ones are near-duplicates."""
    return np.arange(len(columns))


def left_out(own: Learner, model: Model, samples: Samples, keys: Sequence[str]) -> RefinedScores:
    found = left_out_refined(own.tokens, model, samples, keys, own.settings, np.random.default_rng(0))
    assert found is not None
    return found


def test_a_held_out_image_is_scored_without_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refined_statistics, "likeness_groups", alone)
    own = refining_learner()
    learned = learn_tasks(own, class_tasks([3, 2], images=20))[-1]
    model, samples = learned.model, learned.samples
    assert model.refined is not None
    keys = [sample.key for sample in samples.held_out]
    columns = np.array([model.classes.index(sample.label) for sample in samples.held_out])
    itself = np.arange(len(keys)), columns
    scores = left_out(own, model, samples, keys)
    plain = model.refined.scores(own.tokens.refined(keys, model.refined.tail))
    assert (scores.distances[itself] > plain.distances[itself]).all()
    # As if the image had never been kept, but for the amount of the identity in the covariance.
    for place, sample in enumerate(samples.held_out[:4]):
        fewer = replace(samples, held_out=tuple(other for other in samples.held_out if other != sample))
        exact = left_out(own, model, fewer, [sample.key])
        np.testing.assert_allclose(scores.distances[place], exact.distances[0], rtol=0.1)
        np.testing.assert_allclose(scores.cosines[place], exact.cosines[0], atol=0.1)


def test_a_held_out_image_is_scored_without_those_of_its_scene(monkeypatch: pytest.MonkeyPatch) -> None:
    own = refining_learner(keep_per_class=20)
    learned = learn_tasks(own, class_tasks([3, 2], images=20))[-1]
    keys = [sample.key for sample in learned.samples.held_out]
    columns = np.array([learned.model.classes.index(sample.label) for sample in learned.samples.held_out])
    assert np.bincount(columns).min() > 1

    def mean_distance(scene: bool) -> float:
        """Of the images to their classes, if all images of a class are of one scene, or none of them."""
        groups = lambda _, columns: columns if scene else np.arange(len(columns))  # noqa: E731
        monkeypatch.setattr(refined_statistics, "likeness_groups", groups)
        found = left_out(own, learned.model, learned.samples, keys)
        return float(found.distances[np.arange(len(keys)), columns].mean())

    assert mean_distance(scene=True) > mean_distance(scene=False)


def test_the_only_held_out_image_of_a_class_can_be_left_out() -> None:
    own = refining_learner()
    learned = learn_tasks(own, class_tasks([2], images=5))[-1]
    one_of_each = {sample.label: sample for sample in learned.samples.held_out}
    keys = [sample.key for sample in one_of_each.values()]
    samples = replace(learned.samples, held_out=tuple(one_of_each.values()))
    assert len(keys) == 2
    scores = left_out(own, learned.model, samples, keys)
    assert np.isfinite(scores.cosines).all()
    plain = learned.model.refined
    assert plain is not None
    assert not np.allclose(scores.cosines, plain.scores(own.tokens.refined(keys, plain.tail)).cosines)


def test_a_parent_whose_images_are_gone_is_compared_without_its_refined_feature() -> None:
    own = refining_learner()
    first = learn_tasks(own, TASKS[:1])[0]
    assert first.model.uses_refined
    plain = replace(own, settings=own.settings.model_copy(update={"keep": "features"}))
    own.tokens.refined = not_called  # type: ignore[method-assign]
    second = plain.learn(first.model, first.samples, TASKS[1], Checkpoint(None), quiet_progress())
    assert second.verdict.tasks[0].accuracy_before is not None


def not_called(*arguments: Any) -> Any:
    raise AssertionError("an image is passed through the tail")


def test_a_trainer_that_was_started_again_passes_the_parents_images_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every later task only those that are new to it."""
    own = refining_learner()
    tasks = class_tasks([2, 2, 2, 2], images=10)
    before = learn_tasks(own, tasks[:1])[0]
    again = refining_learner()
    passed: list[list[int]] = []
    compute = ForwardPasses.refined_features

    def recorded(self: ForwardPasses, maps: Any, tail: Any) -> Any:
        passed[-1].append(len(maps))
        return compute(self, maps, tail)

    monkeypatch.setattr(ForwardPasses, "refined_features", recorded)
    for number, task in enumerate(tasks[1:]):
        passed.append([])
        learned = again.learn(before.model, before.samples, task, Checkpoint(None), quiet_progress())
        # The images of the version, and under its parent the new ones of the gate; after the start also the parent's.
        new = sum(sample.label in task for sample in learned.samples.held_out)
        parents = 0 if number else len(before.samples.learned_keys)
        assert sum(passed[-1]) == len(learned.samples.learned_keys) + new + parents
        before = learned


def test_outputs_of_the_tail_are_forgotten_with_their_image() -> None:
    own = refining_learner()
    learned = learn_tasks(own, TASKS[:1])[0]
    assert learned.model.refined is not None
    tail, keys = learned.model.refined.tail, list(TASKS[0]["class 0"])
    first = own.tokens.refined(keys, tail)
    own.tokens.keep_only(keys[1:])
    assert all(keys[0] not in rows for rows in own.tokens._refined.values())
    np.testing.assert_allclose(own.tokens.refined(keys, tail), first, rtol=1e-5)


def test_with_many_classes_held_out_images_come_first_in_the_statistics() -> None:
    own = refining_learner(refined_images=8)
    learned = learn_tasks(own, TASKS)[-1]
    assert learned.model.refined is not None
    given = own.tokens, learned.model.refined.tail, learned.model.classes, learned.samples, own.settings
    found = RefinedStatistics.of(*given)
    assert found is not None
    assert len(found.columns) == 8
    assert np.bincount(list(found.columns.values())).tolist() == [2, 2, 2, 2]
    held_out = {sample.key for sample in learned.samples.held_out}
    assert len(held_out & {*found.columns}) == 4  # beside one image of each class that the adapters were trained on
