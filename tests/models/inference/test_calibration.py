"""Calibration: the threshold, the calibrated score and the probability of being novel."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.inference.calibration import REFERENCE_POINTS, Calibration, p_novel
from models.inference.evidence import Evidence, Floats
from tests.support.evidence import class_counts, quick, random_evidence, seeds

scores_of_known = st.lists(st.floats(-50, 5), min_size=1, max_size=60).map(np.array)


@quick
@given(scores_of_known, st.lists(st.floats(-60, 10), min_size=2, max_size=20))
def test_the_calibrated_score_is_a_quantile_and_rises_with_the_score(reference: Floats, scores: list[float]) -> None:
    calibration = Calibration.fit(reference, [np.ones(3)], 0.95)
    calibrated = calibration.calibrated(np.sort(scores))
    assert ((calibrated >= 0) & (calibrated <= 1)).all()
    assert (np.diff(calibrated) >= 0).all()
    assert calibration.calibrated(np.array([-1e6, 1e6])).tolist() == [0, 1]


def test_the_calibrated_score_by_hand() -> None:
    calibration = Calibration.fit(np.array([3.0, 1.0, 2.0, 2.0]), [np.ones(3)], 0.95)
    assert calibration.calibrated(np.array([0.0, 1.0, 1.5, 2.0, 9.0])).tolist() == [0, 0.125, 0.25, 0.5, 1]


@quick
@given(scores_of_known, st.floats(0.51, 0.99))
def test_the_threshold_accepts_at_least_the_wanted_share(scores: Floats, accept: float) -> None:
    threshold = Calibration.fit(scores, [np.ones(3)], accept).threshold[0]
    assert (scores >= threshold).mean() >= accept - 1e-9


@quick
@given(seeds, st.floats(0.51, 0.99), st.sampled_from([400, 1000]))
def test_with_many_scores_the_threshold_accepts_the_wanted_share(seed: int, accept: float, count: int) -> None:
    scores = np.random.default_rng(seed).normal(size=count)
    calibration = Calibration.fit(scores, [np.ones(3)], accept)
    share = (scores >= calibration.threshold[0]).mean()
    assert accept - 1e-9 <= share < accept + 2 / count  # the image at the quantile and the one below it at most
    assert len(calibration.reference) == REFERENCE_POINTS
    assert calibration.calibrated(calibration.threshold)[0] == pytest.approx(1 - accept, abs=0.01)


def test_p_novel_by_hand() -> None:
    # None of the two: 0.1 * 0.8 = 0.08, out of 0.9 + 0.2 + 0.08.
    assert p_novel(np.array([[0.9, 0.2]]))[0] == pytest.approx(0.08 / 1.18)
    assert p_novel(np.array([[0.5]]))[0] == pytest.approx(0.5)
    assert p_novel(np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])).tolist() == [1, 0, 0]


known = st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=5).map(np.array)


@quick
@given(known)
def test_the_tasks_and_the_novel_share_one_probability(p: Floats) -> None:
    novel = p_novel(p)
    none = (1 - p[:, 0]) * (1 - p[:, 1]) * (1 - p[:, 2])
    tasks = p / (p.sum(axis=1) + none)[:, None]  # P(x in X_k | D) of the corollary
    assert ((novel >= 0) & (novel <= 1)).all()
    np.testing.assert_allclose(tasks.sum(axis=1) + novel, 1)


@quick
@given(known, st.floats(0, 1))
def test_p_novel_rises_as_every_task_disowns_the_image(p: Floats, factor: float) -> None:
    assert (p_novel(p * factor) >= p_novel(p) - 1e-12).all()


@quick
@given(seeds, class_counts)
def test_p_known_falls_with_the_distance_and_with_the_ood_logit(seed: int, counts: list[int]) -> None:
    evidence = random_evidence(seed, counts)
    calibration = Calibration(np.zeros(1), np.zeros(1), np.tile([1.0, 0.5], (len(counts), 1)))
    p = calibration.p_known(evidence)
    assert p.shape == (6, len(counts))
    assert ((p >= 0) & (p <= 1)).all()
    farther = calibration.p_known(replace(evidence, distances=[x * 1.5 for x in evidence.distances]))
    assert (farther <= p).all()
    more_ood = [x + np.eye(x.shape[1])[-1] for x in evidence.logits]
    assert (calibration.p_known(replace(evidence, logits=more_ood)) <= p).all()


def test_p_known_by_hand() -> None:
    # Not `ood`: 3 of 4. Half-way at distance 2, where the tail is centred.
    calibration = Calibration(np.zeros(1), np.zeros(1), np.array([[np.log(2.0), 0.5]]))
    p = calibration.p_known(Evidence([np.log([[1.0, 2.0, 1.0]])], [np.array([[7.0, 2.0]])], np.zeros((1, 2))))
    assert p[0, 0] == pytest.approx(0.75 * 0.5)


def test_a_tail_is_half_way_where_the_accepted_share_of_a_tasks_own_images_ends() -> None:
    distances = np.exp(np.linspace(0, 1, 101))
    (centre, scale), (_, narrow) = Calibration.fit(np.zeros(5), [distances, np.full(9, 3.0)], 0.95).tails
    assert centre == pytest.approx(0.95)
    assert scale == pytest.approx(np.linspace(0, 1, 101).std())
    assert narrow == 0.02
