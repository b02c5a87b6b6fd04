"""Plain HAT and plain SupSup, which the benchmark compares with the methods."""

import numpy as np
import pytest

from tests.support.tiny_model import TinyImages, class_tasks, features_of, learn_tasks, tiny_learner


@pytest.mark.parametrize(
    ("method", "without"), [("more", "replay"), ("hat-csi", "contrastive"), ("sup-csi", "contrastive")]
)
def test_a_head_that_never_saw_another_task_has_no_ood(method: str, without: str) -> None:
    learner = tiny_learner(method=method, rule="paper", epochs=8, learning_rate=0.02, **{without: False})
    model = learn_tasks(learner, class_tasks([2, 2], images=8))[-1].model
    assert [task.head.bias[-1] for task in model.tasks] == [-np.inf, -np.inf]
    assert all(task.head.turned_weight is None for task in model.tasks)
    assert model.rule.weights == {"logit": 1.0}
    assert model.rule.rotations == 1
    keys = [key for own in TinyImages().batch(model.classes, count=5, start=100).values() for key in own]
    evidence, true = model.evidence(features_of(learner, model, keys)), np.repeat(np.arange(4), 5)
    assert not evidence.has_ood
    assert not evidence.rows(np.zeros(len(keys), bool)).has_ood  # the heads decide it, not the images
    own_task = model.task_of_class == model.task_of_class[true][:, None]
    within = np.where(own_task, model.rule.log_scores(evidence), -np.inf)
    assert (within.argmax(axis=1) == true).mean() >= 0.9


def test_a_head_of_more_has_ood() -> None:
    learner = tiny_learner(method="more", rule="paper")
    model = learn_tasks(learner, class_tasks([2, 2]))[-1].model
    keys = TinyImages().batch(["a"], count=1)["a"]
    assert model.evidence(features_of(learner, model, keys)).has_ood
