"""Simulated novelty: what is left out is scored as new, and fitting on it pays."""

import numpy as np
import pytest
from numpy.typing import NDArray

from models.inference.frozen import FrozenStatistics
from models.inference.novelty import FROZEN_SUMMARIES, SUMMARIES, frozen_summaries
from trainer.learning import simulation
from trainer.learning.gate import auc
from trainer.learning.leave_out import LeaveOut
from trainer.learning.novelty_fit import Target, fit_novelty
from trainer.learning.prior import Prior
from trainer.learning.simulation import left_out_scores, simulated_novelty

KNOWN, NEW, IMAGES, SIZE, EXPANDED = 12, 8, 12, 24, 64


class World:
    """Classes in a plane of the first dimensions; the length of a feature says nothing, the direction everything.

    Class means lie on a sphere, so a novel image is as near to a class in distance as a known one of a noisy class.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        means = self._rng.standard_normal((KNOWN + NEW, SIZE))
        self._means = 3 * means / np.linalg.norm(means, axis=1, keepdims=True)
        self._projection = self._rng.standard_normal((SIZE, EXPANDED)) / np.sqrt(SIZE)

    def draw(self, classes: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        length = self._rng.uniform(0.3, 3.0, (len(classes), 1))
        x = (self._means[classes] + 0.7 * self._rng.standard_normal((len(classes), SIZE))) * length
        return x.astype(np.float32), np.maximum(x @ self._projection, 0).astype(np.float32)


def known_images(world: World) -> LeaveOut:
    labels = np.repeat(np.arange(KNOWN), IMAGES)
    features, expanded = world.draw(labels)
    return LeaveOut(FrozenStatistics.fit(features, expanded, labels, KNOWN), features, expanded, labels)


def test_fitting_on_simulated_novelty_raises_the_auc_on_classes_never_seen() -> None:
    # A prior that trusts the distance alone, which is useless here.
    prior = Prior(novelty={**dict.fromkeys(FROZEN_SUMMARIES, 0.0), "distance": 1.0, "known": 0.0})
    gains = []
    for seed in range(5):
        world = World(seed)
        kept = known_images(world)
        rng = np.random.default_rng(seed)
        left_out, simulations = left_out_scores(kept, rng), simulated_novelty(kept, rng)
        fitted, unfitted = (fit_novelty(left_out, used, prior, Target()) for used in (simulations, []))
        fresh = [frozen_summaries(kept.statistics.scores(*world.draw(np.arange(low, high).repeat(10))))
                 for low, high in ((0, KNOWN), (KNOWN, KNOWN + NEW))]  # fmt: skip
        padded = [np.pad(rows, ((0, 0), (0, len(SUMMARIES) - rows.shape[1]))) for rows in fresh]
        before, after = (auc(*(novelty.scores(rows) for rows in padded)) for novelty in (unfitted, fitted))
        assert before is not None
        assert after is not None
        gains.append(after - before)
    assert np.mean(gains) > 0.05
    assert min(gains) > 0


@pytest.mark.parametrize("corrected", [True, False])
def test_left_out_images_score_like_fresh_ones_although_their_class_lost_them(
    corrected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four images per class, one less moves the class mean. Without the correction they look less like it."""
    if not corrected:
        monkeypatch.setattr(simulation, "_restore", lambda *_: None)
    names = ("distances", "cosines", "ridge", "output_distances", "output_cosines")
    errors = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        means, projection = rng.standard_normal((30, 200)), rng.standard_normal((200, 300)) / 14
        labels = np.repeat(np.arange(30), 4)
        x, fresh = ((means[labels] + 1.5 * rng.standard_normal((120, 200))).astype(np.float32) for _ in range(2))
        h, fresh_h = (np.maximum(rows @ projection, 0).astype(np.float32) for rows in (x, fresh))
        kept = LeaveOut(FrozenStatistics.fit(x, h, labels, 30), x, h, labels)
        found, expected = left_out_scores(kept, rng), kept.statistics.scores(fresh, fresh_h)
        pairs = [[getattr(scores, name)[np.arange(120), labels] for scores in (found, expected)] for name in names]
        errors.append([abs(own.mean() - wanted.mean()) / wanted.std() for own, wanted in pairs])
    # In deviations of fresh images.
    assert (np.mean(errors, axis=0) < 0.2).all() == corrected
    assert (np.mean(errors, axis=0) > 0.4).all() != corrected


def test_images_of_left_out_classes_look_novel_and_the_others_known() -> None:
    kept = known_images(World(0))
    simulations = simulated_novelty(kept, np.random.default_rng(0))
    assert len(simulations) == 4
    assert sum(len(novel) for _, novel in simulations) == len(kept.columns)  # every class is left out once
    for known, novel in simulations:
        np.testing.assert_allclose(known.mean(axis=0), 0, atol=1e-9)  # standardised by the known images
        cosine = SUMMARIES.index("cosine")
        assert (auc(known[:, cosine], novel[:, cosine]) or 0) > 0.8


def test_one_class_simulates_no_novelty() -> None:
    kept = known_images(World(0))
    only = kept.columns == 0
    statistics = FrozenStatistics.fit(kept.features[only], kept.expanded[only], kept.columns[only], 1)
    single = LeaveOut(statistics, kept.features[only], kept.expanded[only], kept.columns[only])
    assert simulated_novelty(single, np.random.default_rng(0)) == []


def test_simulated_novelty_holds_if_a_part_of_the_images_is_at_hand() -> None:
    """A calibration uses few images of each class. Removing more than these would leave no covariance."""
    world = World(0)
    kept = known_images(world)
    part = np.flatnonzero(np.arange(len(kept.columns)) % IMAGES < IMAGES * 3 // 4)
    some = LeaveOut(kept.statistics, kept.features[part], kept.expanded[part], kept.columns[part])
    fresh = [frozen_summaries(kept.statistics.scores(*world.draw(np.arange(low, high).repeat(10))))
             for low, high in ((0, KNOWN), (KNOWN, KNOWN + NEW))]  # fmt: skip
    padded = [np.pad(rows, ((0, 0), (0, len(SUMMARIES) - rows.shape[1]))) for rows in fresh]
    found = []
    for images in (kept, some):
        rng = np.random.default_rng(0)
        left_out, simulations = left_out_scores(images, rng), simulated_novelty(images, rng)
        novelty = fit_novelty(left_out, simulations, Prior(), Target())
        known, novel = (novelty.scores(rows) for rows in padded)
        found.append((auc(known, novel) or 0, (novel < novelty.threshold).mean()))
    (all_auc, all_flagged), (some_auc, some_flagged) = found
    assert some_auc > all_auc - 0.03
    assert some_flagged > all_flagged - 0.1
