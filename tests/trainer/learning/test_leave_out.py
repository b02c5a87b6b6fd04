"""Scores without some images and classes equal those of statistics that were fitted without them."""

import numpy as np
import pytest

from models.inference.evidence import Floats
from models.inference.frozen import FrozenStatistics
from trainer.learning.leave_out import LeaveOut

F, M, OUTPUT, COUNTS = 8, 12, 5, [7, 9, 6, 8]
FREEDOM = 20.0  # of the left-out covariance


def distances_in_span(image: Floats, means: Floats, precision: Floats) -> Floats:
    """By explicit projection on the span of the whitened means."""
    whitening = np.linalg.cholesky(precision)
    basis, values, _ = np.linalg.svd((means @ whitening).T, full_matrices=False)
    basis = basis[:, values > 1e-6 * max(values.max(), 1e-12)]
    out: Floats = np.linalg.norm(((image - means) @ whitening) @ basis, axis=1)
    return out


@pytest.mark.parametrize(
    ("images", "classes"),
    [([0, 1, 8, 20], []), ([], [1]), ([0, 2, 17], [1, 3]), ([], [])],
    ids=["images", "classes", "both", "nothing"],
)
def test_scores_equal_a_refit_with_the_same_shrinkage(images: list[int], classes: list[int]) -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), COUNTS)
    x = (rng.normal(size=(30, F)) + 2 * rng.normal(size=(4, F))[labels]).astype(np.float32)
    h = np.maximum(rng.normal(size=(30, M)), 0).astype(np.float32)
    full = FrozenStatistics.empty(F, M, OUTPUT).with_images(x, h, labels, 4)
    scored, gone = np.arange(0, 30, 3), np.array(classes, np.int64)
    found = LeaveOut(full, x, h, labels).scores(scored, np.array(images, np.int64), gone, FREEDOM)

    kept = np.setdiff1d(np.flatnonzero(~np.isin(labels, gone)), images)
    names = np.setdiff1d(np.arange(4), gone)
    rest = FrozenStatistics.fit(x[kept], h[kept], np.searchsorted(names, labels[kept]), len(names))
    # The amount of the identity stays that of all images.
    amount = full.shrinkage * np.trace(full.scatter) / full.freedom / F
    covariance = (1 - full.shrinkage) / FREEDOM * rest.scatter + amount * np.eye(F)
    whole, output = (found.distances, found.cosines), (found.output_distances, found.output_cosines)
    for size, (distances, cosines) in ((F, whole), (OUTPUT, output)):
        inverse = np.linalg.inv(covariance[:size, :size])
        for row, i in enumerate(scored):
            off = (x[i] - rest.means)[:, :size]
            np.testing.assert_allclose(distances[row], np.sqrt(((off @ inverse) * off).sum(axis=1)), rtol=1e-3)
            a, b = (x[i] - rest.centre)[:size], (rest.means - rest.centre)[:, :size]
            lengths = np.sqrt((a @ inverse @ a) * ((b @ inverse) * b).sum(axis=1))
            np.testing.assert_allclose(cosines[row], b @ inverse @ a / lengths, atol=1e-3)
    inverse = np.linalg.inv(covariance)
    for row, i in enumerate(scored):
        expected = distances_in_span(x[i] - rest.centre, rest.means - rest.centre, inverse)
        np.testing.assert_allclose(found.span_distances[row], expected, rtol=1e-2, atol=1e-2)
    gram = rest.gram + full.regularised_gram - full.gram
    np.testing.assert_allclose(found.ridge, h[scored] @ np.linalg.inv(gram) @ rest.moments.T, atol=1e-3)


def test_nearly_equal_degrees_of_freedom_share_a_covariance() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), COUNTS)
    x, h = (rng.normal(size=(30, size)).astype(np.float32) for size in (F, M))
    full = FrozenStatistics.empty(F, M, OUTPUT).with_images(x, h, labels, 4)
    kept, nothing, scored = LeaveOut(full, x, h, labels), np.zeros(0, np.int64), np.arange(5)
    first, near, far = (kept.scores(scored, nothing, nothing, freedom).distances for freedom in (20.0, 19.0, 16.0))
    np.testing.assert_array_equal(first, near)
    assert (far < first).all()  # of a larger covariance


def test_of_a_left_out_class_the_mean_of_images_that_are_not_at_hand_is_left_out_too() -> None:
    """Otherwise ridge regression has learned that its images are of no class: they look more novel than they are."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), COUNTS)
    x = rng.normal(size=(30, F)).astype(np.float32)
    h = (1 + 0.1 * rng.normal(size=(30, M)) + 2 * rng.random((4, M))[labels]).astype(np.float32)
    full = FrozenStatistics.empty(F, M, OUTPUT).with_images(x, h, labels, 4)
    at_hand, gone = np.setdiff1d(np.arange(30), [10, 11, 12, 13, 14, 22]), np.array([1])
    beside = h[[10, 11, 12, 13, 14]]  # of class 1
    found = LeaveOut(full, x[at_hand], h[at_hand], labels[at_hand]).scores(np.arange(24), np.zeros(0, int), gone)
    moved = np.sqrt(len(beside)) * beside.mean(axis=0).astype(np.float64)
    out = h[at_hand][labels[at_hand] == 1].astype(np.float64)
    gram = full.regularised_gram - out.T @ out - np.outer(moved, moved)
    moments = full.moments[[0, 2, 3]]
    np.testing.assert_allclose(found.ridge, h[at_hand] @ np.linalg.inv(gram) @ moments.T, atol=2e-3)
    # Nearly as if every image had been at hand: their deviations from the mean are all that stays.
    every = LeaveOut(full, x, h, labels).scores(at_hand, np.zeros(0, int), gone)
    stays = np.linalg.inv(full.regularised_gram - out.T @ out)
    novel = labels[at_hand] == 1
    error = np.abs(found.ridge - every.ridge)[novel].max()
    assert error < 0.2 * np.abs(h[at_hand] @ stays @ moments.T - every.ridge)[novel].max()
