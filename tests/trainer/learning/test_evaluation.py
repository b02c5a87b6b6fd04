"""A version has usable decisions however few images it was learned from."""

from typing import Any

import numpy as np
import pytest

from models.inference.frozen import FrozenStatistics
from tests.support.tiny_model import class_tasks, learn_tasks, tiny_learner
from trainer.learning import evaluation
from trainer.learning.leave_out import LeaveOut
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


@pytest.mark.parametrize(
    ("settings", "images", "compared"),
    [({}, 10, True), ({}, 2, False), ({"preset": "paper", "replay_size": 40}, 10, False)],
    ids=["held out", "no image to spare", "no closed form"],
)
def test_what_training_gains_counts_only_where_held_out_images_show_it(
    settings: dict[str, Any], images: int, compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def expected(correct: Any, closed_form: Any, weights: Any, held_out: Any) -> float:
        assert len(correct) == held_out.sum() < len(held_out) == len(closed_form) == len(weights)
        calls.append(len(correct))
        return 0.125

    monkeypatch.setattr(evaluation, "expected_accuracy", expected)
    (step,) = learn_tasks(tiny_learner(**settings), class_tasks([2], images=images))
    assert bool(calls) == compared
    assert step.verdict.accuracy is not None
    assert (step.verdict.accuracy == 0.125) == compared
