"""Gaussians: the paper's means and covariance, exact updates, and finite distances from few images."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial.distance import mahalanobis

from models.inference.gaussians import Gaussians

Floats = NDArray[np.float64]
quick = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def sample(rng: np.random.Generator, counts: list[int], d: int) -> tuple[Floats, NDArray[np.int64]]:
    """Classes apart from each other, in correlated dimensions of different scales."""
    labels = np.repeat(np.arange(len(counts)), counts)
    mixing = rng.normal(size=(d, d)) * rng.uniform(0.1, 3, d)
    x = rng.normal(size=(len(labels), d)) @ mixing + 3 * rng.normal(size=(len(counts), d))[labels]
    order = rng.permutation(len(labels))
    return x[order], labels[order]


def oas(covariance: Floats, n: int) -> tuple[Floats, float]:
    """Chen, Wiesel, Eldar and Hero (2010), Eq. 23, on the matrix itself: (shrunk covariance, intensity)."""
    p = len(covariance)
    tr, tr2 = np.trace(covariance), np.trace(covariance @ covariance)
    rho = min(1.0, ((1 - 2 / p) * tr2 + tr**2) / ((n + 1 - 2 / p) * (tr2 - tr**2 / p)))
    return (1 - rho) * covariance + rho * tr / p * np.eye(p), float(rho)


def covariance_of(gaussians: Gaussians) -> Floats:
    """The shrunk covariance as a matrix (d, d)."""
    scale, floor = gaussians.spectrum()
    return (gaussians.basis.T * (scale - floor)) @ gaussians.basis + floor * np.eye(gaussians.means.shape[1])


@quick
@given(seeds, st.lists(st.integers(2, 20), min_size=1, max_size=4), st.integers(2, 30))
def test_distances_are_scipys_mahalanobis(seed: int, counts: list[int], d: int) -> None:
    rng = np.random.default_rng(seed)
    x, labels = sample(rng, counts, d)
    gaussians = Gaussians.fit(x, labels, len(counts))
    queries, inverse = 3 * rng.normal(size=(7, d)), np.linalg.inv(covariance_of(gaussians))
    expected = [[mahalanobis(q, mean, inverse) for mean in gaussians.means] for q in queries]
    np.testing.assert_allclose(gaussians.scores(queries)[0], expected, rtol=1e-6)


def test_distances_by_hand() -> None:
    # One class at (1, 0) with variance 4 along the first axis and 1 along the second, almost no shrinkage.
    gaussians = Gaussians(np.array([[1.0, 0.0]]), np.array([10**9]), np.eye(2), np.array([4.0, 1.0]) * (10**9 - 1))
    np.testing.assert_allclose(
        gaussians.scores(np.array([[5.0, 0.0], [1.0, 3.0], [1.0, 0.0]]))[0][:, 0], [2, 3, 0], atol=1e-6
    )


@quick
@given(seeds, st.lists(st.integers(2, 9), min_size=1, max_size=4), st.integers(2, 25))
def test_samples_added_later_give_the_same_as_all_at_once(seed: int, counts: list[int], d: int) -> None:
    rng = np.random.default_rng(seed)
    x, labels = sample(rng, counts, d)
    late = rng.random(len(x)) < 0.5
    late[[np.flatnonzero(labels == c)[0] for c in range(len(counts))]] = False  # a class starts with an image
    steps = Gaussians.fit(x[~late], labels[~late], len(counts))
    for chunk in np.array_split(np.flatnonzero(late), 2):
        if len(chunk):
            steps = steps.with_samples(x[chunk], labels[chunk])
    assert_pooled(steps, x, labels, len(counts))


def assert_pooled(gaussians: Gaussians, x: Floats, labels: NDArray[np.int64], classes: int) -> None:
    means = np.stack([x[labels == c].mean(axis=0) for c in range(classes)])
    centred = x - means[labels]
    shrunk, _ = oas(centred.T @ centred / (len(x) - classes), len(x) - classes)
    np.testing.assert_allclose(gaussians.means, means, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(covariance_of(gaussians), shrunk, atol=1e-8 * np.trace(shrunk))
    assert gaussians.counts.tolist() == np.bincount(labels, minlength=classes).tolist()
    once = Gaussians.fit(x, labels, classes)
    np.testing.assert_allclose(gaussians.scores(x[:5])[0], once.scores(x[:5])[0], rtol=1e-6, atol=1e-6)


@quick
@given(seeds, st.integers(2, 6), st.lists(st.integers(0, 15), min_size=1, max_size=3).filter(any), st.integers(2, 12))
def test_samples_added_to_a_fit_are_pooled_with_equal_weights_per_image(
    seed: int, start: int, more: list[int], d: int
) -> None:
    """A balanced fit, then different numbers per class: exact means, and equal weights per image."""
    x, labels = sample(np.random.default_rng(seed), [start + count for count in more], d)
    first = np.concatenate([np.flatnonzero(labels == c)[:start] for c in range(len(more))])
    late = np.setdiff1d(np.arange(len(x)), first)
    steps = Gaussians.fit(x[first], labels[first], len(more)).with_samples(x[late], labels[late])
    assert_pooled(steps, x, labels, len(more))


def test_drawn_samples_have_the_means_and_the_covariance_of_their_classes() -> None:
    rng = np.random.default_rng(0)
    x, labels = sample(rng, [6, 5], 8)  # fewer samples than would fill every direction without the floor
    gaussians = Gaussians.fit(x, labels, 2)
    classes = np.repeat([0, 1], [60_000, 40_000])
    draws = gaussians.sample(classes, rng)
    covariance = covariance_of(gaussians)
    for c in range(2):
        off = draws[classes == c].mean(axis=0) - gaussians.means[c]
        assert (np.abs(off) < 5 * np.sqrt(np.diag(covariance) / 40_000)).all()
    found = np.cov(draws - gaussians.means[classes], rowvar=False)
    scale = np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    np.testing.assert_allclose(found / scale, covariance / scale, atol=0.03)


def test_distances_of_drawn_samples_are_chi_squared() -> None:
    """The squared distance to the class mean has d degrees of freedom, also after a fit on few samples."""
    rng = np.random.default_rng(1)
    gaussians = Gaussians.fit(*sample(rng, [3, 3], 40), 2)
    squared = gaussians.scores(gaussians.sample(np.zeros(5000, np.int64), rng))[0][:, 0] ** 2
    assert squared.mean() == pytest.approx(40, rel=0.02)
    assert squared.var() == pytest.approx(80, rel=0.15)


def test_drawing_works_without_variance_and_repeats_with_the_seed() -> None:
    gaussians = Gaussians.fit(np.eye(6)[:2], np.arange(2), 2)
    classes = np.array([1, 0, 1])
    one, same = (gaussians.sample(classes, np.random.default_rng(3)) for _ in range(2))
    assert np.isfinite(one).all()
    assert np.array_equal(one, same)
    assert gaussians.sample(np.zeros(0, np.int64), np.random.default_rng(0)).shape == (0, 6)


def test_three_images_in_1280_dimensions_give_finite_ordered_distances() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 1280))
    gaussians = Gaussians.fit(x, np.zeros(3, np.int64), 1)
    mean, direction = x.mean(axis=0), rng.normal(size=1280)
    distances = gaussians.scores(np.stack([mean + step * direction for step in (0.0, 0.01, 0.1, 1.0, 10.0)]))[0][:, 0]
    assert np.isfinite(distances).all()
    assert (np.diff(distances) > 0).all()
    assert len(gaussians.basis) <= 3


def test_identical_images_give_finite_ordered_distances() -> None:
    x = np.repeat(np.random.default_rng(0).normal(size=(2, 20)), 4, axis=0)
    gaussians = Gaussians.fit(x, np.repeat([0, 1], 4), 2)
    distances = gaussians.scores(np.stack([x[0], x[0] * 0.9 + x[4] * 0.1, x[4]]))[0]
    assert np.isfinite(distances).all()
    assert (np.diff(distances[:, 0]) > 0).all()
    assert (np.diff(distances[:, 1]) < 0).all()


def test_one_image_per_class_gives_finite_ordered_distances() -> None:
    x = np.eye(6)[:3]
    distances, _ = Gaussians.fit(x, np.arange(3), 3).scores(x)
    assert np.isfinite(distances).all()
    assert distances.argmin(axis=1).tolist() == [0, 1, 2]


def test_distances_without_variance_are_comparable_with_those_of_other_tasks() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 50))
    single = Gaussians.fit(x, np.arange(2), 2).scores(rng.normal(size=(1, 50)))[0]
    several = Gaussians.fit(np.repeat(x, 20, 0) + 0.3 * rng.normal(size=(40, 50)), np.repeat([0, 1], 20), 2)
    assert single.min() < 1000 * several.scores(rng.normal(size=(1, 50)))[0].min()


def test_a_class_without_an_image_is_refused() -> None:
    with pytest.raises(ValueError, match="no sample for class 1"):
        Gaussians.fit(np.zeros((2, 3)), np.array([0, 2]), 3)
