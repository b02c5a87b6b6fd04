"""The novelty decision with the refined feature."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from models.inference.evidence import FrozenScores, RefinedScores
from models.inference.novelty import FROZEN_SUMMARIES, Novelty, summaries
from tests.support.evidence import random_evidence
from tests.support.tiny_model import class_tasks, features_of, learn_tasks, refining_learner
from trainer.learning.novelty_fit import LEAST_HELD_OUT, Target, fit_novelty, with_refined
from trainer.learning.prior import APART, Prior


def test_the_threshold_with_the_refined_feature_accepts_the_asked_share_of_held_out_images() -> None:
    rng = np.random.default_rng(0)
    own = refining_learner()
    model = learn_tasks(own, class_tasks([5], images=20))[0].model
    keys = [f"{name}/{number}" for name in model.classes for number in range(100, 140)]
    evidence = model.evidence(features_of(own, model, keys))
    assert evidence.refined is not None
    simulations = [(rng.normal(0, 1, (50, 7)), rng.normal(-2, 1, (50, 7)))]
    plain = fit_novelty(evidence.frozen, simulations, Prior(), Target())
    weights, target = np.ones(len(keys)), Target(accept=0.9)
    held_out = np.arange(len(keys)) % 5 == 0
    scores = evidence.refined.rows(held_out)
    found = with_refined(plain, evidence.frozen, held_out, scores, simulations, Prior(), target, weights)
    assert found.uses_refined
    assert not plain.uses_refined
    assert np.flatnonzero(found.weights[len(FROZEN_SUMMARIES) : -1]).size == 2
    # The threshold was set without the refined scores of four fifths of these images.
    inputs = summaries(evidence, model.rule.log_scores(evidence))
    assert np.mean(found.scores(inputs)[~held_out] < found.threshold[0]) == pytest.approx(0.1, abs=0.05)
    assert np.mean(found.known < found.threshold[0]) == pytest.approx(0.1, abs=0.01)
    assert np.median(found.simulated) < np.median(found.known)
    few = np.cumsum(held_out) * held_out
    few = (few > 0) & (few < LEAST_HELD_OUT)
    assert with_refined(plain, evidence.frozen, few, scores, simulations, Prior(), target, weights) is plain


@pytest.fixture
def scored() -> tuple[FrozenScores, RefinedScores]:
    """Scores of 240 images for 12 classes."""
    rng = np.random.default_rng(0)
    refined = RefinedScores(rng.uniform(-1, 1, (240, 12)), rng.uniform(0.5, 10, (240, 12)))
    return random_evidence(0, [12], 240).frozen, refined


def decision(
    scored: tuple[FrozenScores, RefinedScores], shift: float, prior: Prior | None = None, target: Target | None = None
) -> Novelty:
    """With every image held out, and simulated novel images `shift` deviations from known ones."""
    frozen, refined = scored
    prior, target, rng = prior or Prior(), target or Target(), np.random.default_rng(1)
    simulations = [(rng.normal(0, 1, (200, 7)), rng.normal(shift, 1, (200, 7)))]
    plain = fit_novelty(frozen, simulations, prior, target)
    return with_refined(plain, frozen, np.ones(240, bool), refined, simulations, prior, target, np.ones(240))


def test_images_that_cannot_be_left_out_do_not_count(scored: tuple[FrozenScores, RefinedScores]) -> None:
    frozen, refined = scored
    held_out = np.arange(240) < 60
    plain = fit_novelty(frozen, [], Prior(), Target())
    given = refined.rows(held_out), [], Prior(), Target()
    missing = FrozenScores(*(getattr(frozen, field.name).copy() for field in fields(frozen)))
    for field in fields(missing):
        getattr(missing, field.name)[200:] = np.nan
    found = with_refined(plain, missing, held_out, *given, np.ones(240))
    fewer = np.arange(240) < 200
    np.testing.assert_array_equal(
        found.threshold, with_refined(plain, frozen.rows(fewer), held_out[:200], *given, np.ones(200)).threshold
    )
    assert len(found.known) == 200  # of images, however many scores each has
    assert len(found.simulated) == 0
    assert found.logistic.tolist() == [1.0, Prior().refined_novelty["known"]]  # without simulated novelty, the prior's


def test_the_threshold_of_the_refined_feature_flags_the_asked_share(
    scored: tuple[FrozenScores, RefinedScores],
) -> None:
    found = decision(scored, -2.0, target=Target(flag=0.8))
    assert np.mean(found.simulated < found.threshold[0]) == pytest.approx(0.8, abs=0.02)


def test_near_duplicates_are_not_held_out_images_enough(scored: tuple[FrozenScores, RefinedScores]) -> None:
    frozen, refined = scored
    held_out = np.arange(240) < 2 * LEAST_HELD_OUT
    plain = fit_novelty(frozen, [], Prior(), Target())
    given = plain, frozen, held_out, refined.rows(held_out), [], Prior(), Target()
    assert with_refined(*given, np.where(held_out, 0.4, 1.0)) is plain
    assert with_refined(*given, np.where(held_out, 0.6, 1.0)) is not plain


def test_the_probability_of_being_novel_follows_simulated_novelty(scored: tuple[FrozenScores, RefinedScores]) -> None:
    """Novel images that look far from all classes give a decision that is sure of known ones; near ones do not."""
    p_novel = []
    for shift in (-1.0, -6.0):
        found = decision(scored, shift)
        p_novel.append(float(found.p_novel(np.array([np.median(found.known)]))[0]))
    assert p_novel[1] < p_novel[0] / 2


def test_novel_images_are_as_far_from_the_line_of_known_ones_as_the_prior_says(
    scored: tuple[FrozenScores, RefinedScores],
) -> None:
    """The refined feature tells more novel images than follow from frozen scores; known images stay as they are."""
    near, far = (
        decision(scored, -1.0, Prior(refined_novelty={**Prior().refined_novelty, APART: apart}))
        for apart in (0.0, -1.0)
    )
    np.testing.assert_allclose(far.simulated, near.simulated - 1)
    np.testing.assert_array_equal(far.known, near.known)
    assert far.threshold == near.threshold
    middle = np.array([np.median(far.known)])
    assert far.p_novel(middle) < near.p_novel(middle)  # surer of a known image
