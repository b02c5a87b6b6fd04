"""A version has usable decisions however few images it was learned from."""

import numpy as np
import pytest

from models.inference.frozen import FrozenStatistics
from tests.support.tiny_model import class_tasks, learn_tasks, tiny_learner
from trainer.learning.closed_form import NAME, fit_closed_form
from trainer.learning.leave_out import LeaveOut
from trainer.learning.left_out_evidence import left_out_evidence
from trainer.learning.simulation import left_out_scores


@pytest.mark.parametrize("rule", ["fitted", "paper"])
@pytest.mark.parametrize("images", [2, 3, 12])
def test_few_images_give_a_finite_threshold(rule: str, images: int) -> None:
    for step in learn_tasks(tiny_learner(rule=rule), class_tasks([2, 2], images=images)):
        assert np.isfinite(step.model.novelty.threshold).all()
        assert np.isfinite(step.model.novelty.centre).all()
        assert 0 < step.model.novelty.novel_above < 1


def test_images_without_a_common_direction_can_be_left_out() -> None:
    """Their covariance is shrunk to the identity alone, so leaving one out changes no variance."""
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    features, expanded = (rng.standard_normal((40, size)).astype(np.float32) for size in (300, 50))
    statistics = FrozenStatistics.fit(features, expanded, labels, 2)
    assert statistics.shrinkage == 1
    scores = left_out_scores(LeaveOut(statistics, features, expanded, labels), rng)
    assert all(np.isfinite(part).all() for part in (scores.distances, scores.cosines, scores.ridge))


def test_a_version_in_closed_form_reports_the_accuracy_of_all_left_out_images() -> None:
    """Not of the held-out ones alone: there are few, and the closed form has seen none of the others either."""
    learner = tiny_learner(cnn=True, networks="if they pay", epochs=1, replay_size=100)
    step = learn_tasks(learner, class_tasks([3, 3], images=12))[-1]
    assert step.model.rule.name == NAME
    known = left_out_evidence(learner.tokens, step.model, step.samples, learner.settings)
    left = ~np.isnan(known.scores.ridge).any(axis=1)
    rule = fit_closed_form(known.scores, known.kept.columns, learner.settings.recipe.prior)
    right = rule.frozen_scores(known.scores).argmax(axis=1) == known.kept.columns
    assert left.sum() > 2 * len(step.samples.held_out)
    expected = np.average(right[left], weights=known.kept.weights[left])
    assert step.verdict.accuracy == pytest.approx(expected)
