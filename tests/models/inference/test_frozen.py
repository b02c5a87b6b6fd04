"""Frozen statistics: sums that equal a fit from scratch, and scores that equal explicit inverses."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.inference.evidence import Floats
from models.inference.frozen import RIDGE, SMALL_MATRIX, FrozenStatistics, inverse_root
from tests.support.evidence import quick, seeds

F, M, OUTPUT = 6, 9, 4
counts_of_classes = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def data(seed: int, counts: list[int]) -> tuple[Floats, Floats, NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    x = rng.normal(size=(len(labels), F)) + 2 * rng.normal(size=(len(counts), F))[labels]
    return x, np.maximum(rng.normal(size=(len(labels), M)), 0), labels


def assert_same(one: FrozenStatistics, other: FrozenStatistics) -> None:
    assert one.counts.tolist() == other.counts.tolist()
    for name in ("means", "scatter", "moments", "gram"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-8, atol=1e-8)


@quick
@given(seeds, counts_of_classes, st.data())
def test_images_added_in_any_order_equal_a_fit_from_scratch(seed: int, counts: list[int], drawn: st.DataObject) -> None:
    x, h, labels = data(seed, counts)
    first = np.array([np.flatnonzero(labels == c)[0] for c in range(len(counts))])
    split = drawn.draw(st.integers(1, len(counts)))
    steps = FrozenStatistics.fit(x[first[:split]], h[first[:split]], labels[first[:split]], split)
    if split < len(counts):
        later = first[split:]
        steps = steps.with_images(x[later], h[later], labels[later], len(counts) - split)
    rest = np.random.default_rng(seed).permutation(np.setdiff1d(np.arange(len(x)), first))
    for chunk in np.array_split(rest, 3):
        steps = steps.with_images(x[chunk], h[chunk], labels[chunk])
    assert_same(steps, FrozenStatistics.fit(x, h, labels, len(counts)))
    # Removed again.
    assert_same(
        steps.without_images(x[rest], h[rest], labels[rest]),
        FrozenStatistics.fit(x[first], h[first], labels[first], len(counts)),
    )


@pytest.mark.parametrize("counts", [[5, 9, 7], [1, 1, 1], [12], [1]])
def test_scores_equal_those_of_explicit_inverses(counts: list[int]) -> None:
    x, h, labels = data(0, counts)
    statistics = FrozenStatistics.empty(F, M, OUTPUT).with_images(x, h, labels, len(counts))
    queries, expanded, _ = data(1, [8])
    scores = statistics.scores(queries, expanded)
    means = np.stack([x[labels == c].mean(axis=0) for c in range(len(counts))])
    whole, output = (scores.distances, scores.cosines), (scores.output_distances, scores.output_cosines)
    for size, (distances, cosines) in ((F, whole), (OUTPUT, output)):
        inverse = np.linalg.inv(statistics.covariance()[:size, :size])
        for i, q in enumerate(queries[:, :size]):
            for c, mean in enumerate(means[:, :size]):
                assert distances[i, c] == pytest.approx(np.sqrt((q - mean) @ inverse @ (q - mean)), rel=1e-3)
                a, b = q - means.mean(axis=0)[:size], mean - means.mean(axis=0)[:size]
                lengths = np.sqrt((a @ inverse @ a) * (b @ inverse @ b))
                assert cosines[i, c] == pytest.approx(a @ inverse @ b / lengths if lengths else 0.0, abs=1e-3)
    gram = h.T @ h
    gram += np.eye(M) * RIDGE * np.trace(gram) / M
    expected = expanded @ np.linalg.inv(gram) @ h.T @ np.eye(len(counts))[labels]
    np.testing.assert_allclose(scores.ridge, expected, rtol=1e-3, atol=1e-3)  # scores are float32


def test_a_class_without_an_image_and_the_removal_of_every_image_are_refused() -> None:
    x, h, labels = data(0, [2, 2])
    with pytest.raises(ValueError, match="no image of class 2"):
        FrozenStatistics.fit(x, h, labels, 3)
    with pytest.raises(ValueError, match="every image of a class"):
        FrozenStatistics.fit(x, h, labels, 2).without_images(x[:2], h[:2], labels[:2])


@pytest.mark.parametrize("size", [1, SMALL_MATRIX, SMALL_MATRIX + 1, 5 * SMALL_MATRIX + 3])
def test_an_inverse_root_gives_the_lengths_of_the_inverse(size: int) -> None:
    # Condition numbers up to 10,000, as those of real features; float32 keeps seven digits.
    rng = np.random.default_rng(size)
    turned = np.linalg.qr(rng.normal(size=(size, size)))[0]
    matrix = (turned * np.geomspace(1e-2, 1e2, size)) @ turned.T
    root = inverse_root(matrix.astype(np.float32))
    assert root.dtype == np.float32
    assert np.array_equal(root, np.tril(root))
    rows = rng.normal(size=(20, size))
    expected = np.einsum("ni,ij,nj->n", rows, np.linalg.inv(matrix), rows)
    np.testing.assert_allclose(((rows.astype(np.float32) @ root.T) ** 2).sum(axis=1), expected, rtol=2e-3)
