"""Fitting both decisions: the rule's weights, and the conformal threshold."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from models.inference.novelty import REFERENCE_POINTS, quantiles
from models.inference.rules import TERMS
from tests.support.evidence import random_evidence
from tests.support.tiny_model import class_tasks, learn_tasks, tiny_learner
from trainer.learning import leave_out, left_out_evidence
from trainer.learning.memory import Samples
from trainer.learning.novelty_fit import LEAST_FREEDOM, Target, threshold
from trainer.learning.prior import Prior
from trainer.learning.provisional import provisional_model
from trainer.learning.rule_fit import fit_rule
from trainer.learning.settings import LearnerSettings


@pytest.mark.parametrize("count", [19, 30, 38, 400])
def test_the_threshold_accepts_the_asked_share_of_fresh_images_on_average(count: int) -> None:
    rng = np.random.default_rng(0)
    limits = np.array([threshold(rng.random(count), np.zeros(0), Target(0.95)) for _ in range(3000)])
    assert 1 - limits.mean() == pytest.approx(0.95, abs=0.003)


def test_few_images_are_extrapolated_and_flag_sets_the_share_of_novel_images() -> None:
    few = np.array([-1.0, 0.0, 1.0])
    expected = stats.t.ppf(0.05, LEAST_FREEDOM) * few.std(ddof=1) * np.sqrt(4 / 3)
    assert threshold(few, np.zeros(0), Target(0.95)) == pytest.approx(expected, abs=1e-3)
    assert expected < few.min()
    novel = np.arange(100.0)
    assert (novel < threshold(few, novel, Target(0.95, flag=0.8))).mean() == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(("count", "rejected"), [(3, 0.105), (5, 0.073), (10, 0.05), (14, 0.05), (18, 0.05)])
def test_few_images_reject_the_asked_share_of_fresh_ones_on_average(count: int, rejected: float) -> None:
    """From ten images on. With the quantile of a normal distribution, they would reject 6.7 %, and three 12 %."""
    rng = np.random.default_rng(0)
    limits = np.array([threshold(rng.normal(3, 2, count), np.zeros(0), Target(0.95)) for _ in range(2000)])
    assert stats.norm.cdf((limits - 3) / 2).mean() == pytest.approx(rejected, abs=0.005)


def test_two_scenes_do_not_accept_every_image() -> None:
    """Student's t of one degree of freedom would put the threshold 11 deviations below the mean."""
    frames = np.concatenate([np.full(20, -1.0), np.full(20, 1.0)])
    limit = threshold(frames, np.zeros(0), Target(0.95), np.full(40, 1 / 20))
    assert -4 < limit < -1


def test_near_duplicates_of_some_classes_do_not_move_the_threshold_to_where_others_are_rejected() -> None:
    rng = np.random.default_rng(0)
    varied, frames = rng.normal(0, 1, 200), rng.normal(5, 0.1, 300)  # frames of three scenes
    both = np.concatenate([varied, frames])
    weights = np.concatenate([np.ones(200), np.full(300, 0.01)])
    assert (varied < threshold(both, np.zeros(0), Target(0.95), weights)).mean() == pytest.approx(0.05, abs=0.005)
    assert (varied < threshold(both, np.zeros(0), Target(0.95))).mean() > 0.1
    shown = quantiles(both, weights)  # what people see as the scores of known images
    assert len(shown) == REFERENCE_POINTS
    assert (shown > 4).mean() == pytest.approx(3 / 203, abs=0.01)
    np.testing.assert_allclose(quantiles(both, np.ones(500)), quantiles(both))


def test_parts_of_an_image_set_the_threshold_that_whole_images_set() -> None:
    """Ten near-duplicates of each of 30 images reject about as many fresh images as the 30 alone: the asked share."""
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(2000):
        images = rng.random(30)
        parts = np.repeat(images, 10) + rng.normal(0, 1e-4, 300)
        shares.append(threshold(parts, np.zeros(0), Target(0.9), np.full(300, 0.1)))
    assert np.mean(shares) == pytest.approx(0.1, abs=0.01)


def test_few_images_with_weights_are_extrapolated_from_what_they_weigh() -> None:
    twice = threshold(np.array([-1.0, 0.0, 1.0, 1.0]), np.zeros(0), Target(0.95), np.array([1, 1, 0.5, 0.5]))
    assert twice == pytest.approx(threshold(np.array([-1.0, 0.0, 1.0]), np.zeros(0), Target(0.95)))


@pytest.mark.parametrize("learned", [True, False])
def test_a_version_weighs_near_duplicates_in_its_threshold(learned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    for first in (1.0, 1e-6):  # what the images of the first scene say
        learner, (task, *_) = tiny_learner(), class_tasks([3])
        weigh = lambda scenes, first=first: np.where(scenes == 0, first, 1.0)  # noqa: E731
        monkeypatch.setattr(leave_out, "independent_weights", weigh)
        if learned:
            novelty = learn_tasks(learner, [task])[-1].model.novelty
        else:
            left_out_evidence._last.clear()
            pending = {"task": task}
            novelty = provisional_model(
                learner.tokens, learner.empty(), Samples(), pending, learner.settings
            ).model.novelty
        limits.append(float(novelty.threshold[0]))
    assert limits[0] != limits[1]


def test_without_images_the_rule_is_the_prior() -> None:
    rule = fit_rule(random_evidence(0, [2, 2], n=0), np.zeros(0, np.int64), Prior())
    assert list(rule.weights.values()) == [Prior().rule[name] for name in TERMS]
    assert (rule.scales, rule.shifts) == ((1.0, 1.0), (0.0, 0.0))


def test_the_fit_recovers_the_useful_term() -> None:
    columns = np.random.default_rng(1).integers(0, 4, 600)
    evidence = random_evidence(0, [2, 2], n=600)
    frozen = evidence.frozen
    evidence = replace(evidence, frozen=replace(frozen, ridge=frozen.ridge + np.eye(4)[columns]))
    rule = fit_rule(evidence, columns, Prior())
    assert (rule.log_scores(evidence).argmax(axis=1) == columns).mean() > 0.85
    few = fit_rule(random_evidence(0, [2, 2], n=4), columns[:4], Prior())
    np.testing.assert_allclose(few.scales, 1, atol=0.1)
    np.testing.assert_allclose(few.shifts, 0, atol=0.1)


def test_the_preset_paper_has_the_papers_rule_and_a_fixed_total_memory() -> None:
    chosen = LearnerSettings(preset="paper")
    assert (chosen.rule, chosen.epochs, chosen.replay_size) == ("paper", 20, 200)
    assert (chosen.recipe.sparsity, chosen.recipe.mask_rate, chosen.recipe.back_drawn) == (0.75, 1.0, 0.0)


@pytest.mark.parametrize("rule", ["paper", "fitted"])
def test_every_task_is_published_with_the_rule_of_the_settings(rule: str) -> None:
    for learned in learn_tasks(tiny_learner(rule=rule), class_tasks([2, 1])):
        assert learned.model.rule.name == rule
