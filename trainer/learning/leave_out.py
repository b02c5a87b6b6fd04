"""Frozen scores of kept images under statistics that leave out some images or whole classes.

Statistics without an image differ by a few outer products, so their scores follow from inner products that are computed
once (the Woodbury identity), not from another inverse for each fold. Exact, but for two numbers of the covariance: the
amount of the identity stays that of all images, because fresh images will be scored with it, and the degrees of freedom
are the same for all folds.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Floats, FrozenScores, cosine, span_basis, span_distance
from models.inference.frozen import FrozenStatistics, inverse_root
from trainer.learning.likeness import likeness_groups

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class LeaveOut:
    """Kept images of known classes, and the statistics that hold them."""

    statistics: FrozenStatistics
    features: NDArray[np.float32]  # (n, f)
    expanded: NDArray[np.float32]  # (n, M)
    columns: Indices  # (n,), the class of each image, as a column of the scores
    _products_at: dict[float, Floats] = field(default_factory=dict)

    @cached_property
    def likeness(self) -> Indices:
        """The likeness group of each image: (n,)."""
        return likeness_groups(self.features, self.columns)

    def _products(self, freedom: float) -> Floats:
        """Inner products in the whitened space, (n + C, n + C): images about their class means, then class means."""
        if freedom not in self._products_at:
            statistics = self.statistics
            rows = np.concatenate(
                [self.features - statistics.means[self.columns], statistics.means - statistics.centre]
            ).astype(np.float32)
            whitened = rows @ inverse_root(statistics.covariance(freedom).astype(np.float32)).T
            self._products_at[freedom] = (whitened @ whitened.T).astype(np.float64)
        return self._products_at[freedom]

    @cached_property
    def _ridge_products(self) -> tuple[Floats, Floats]:
        """(products of expanded features under the inverse Gram matrix (n, n), ridge scores (n, C))"""
        root = inverse_root(self.statistics.regularised_gram.astype(np.float32))
        h, moments = self.expanded @ root.T, self.statistics.moments.astype(np.float32) @ root.T
        return (h @ h.T).astype(np.float64), (h @ moments.T).astype(np.float64)

    def scores(self, scored: Indices, images: Indices, classes: Indices, freedom: float | None = None) -> FrozenScores:
        """The scores of the images `scored` without the images `images` and without the classes `classes`.

        `freedom` is how many degrees of freedom remain, by default all. Calls with the same value share one inverse.
        One column for each remaining class. The removed images belong to remaining classes, which keep at least one
        image each. Of a removed class, the images at hand leave the statistics: those that the statistics hold beside
        them stay in the covariance. To remove each of them several times in their place would take more than is there,
        and the rest would be no covariance.
        """
        counts = self.statistics.counts
        remaining = np.setdiff1d(np.arange(len(counts)), classes)
        # Which share of a removed image the mean of its class loses: (images, remaining classes).
        member = (self.columns[images][:, None] == remaining).astype(np.float64)
        left = counts[remaining] - member.sum(axis=0)
        whole = np.flatnonzero(np.isin(self.columns, classes))
        removed = _Removed(images, member, member / left, remaining, whole, left)
        distances, cosines, span_distances = self._gaussian(scored, removed, freedom or self.statistics.freedom)
        return FrozenScores(distances, cosines, self._ridge(scored, removed), span_distances)

    def _gaussian(self, scored: Indices, removed: "_Removed", freedom: float) -> tuple[Floats, Floats, Floats]:
        products, n = self._products(freedom), len(self.columns)
        means = products[n + removed.remaining] - removed.loss.T @ products[removed.images]  # (C', n + C)
        centre = means.mean(axis=0)

        def with_plain_means(block: Floats) -> Floats:
            """Products with the means of the remaining classes: (k, n + C) -> (k, C')."""
            out: Floats = block[:, n + removed.remaining] - block[:, removed.images] @ removed.loss
            return out

        def with_means(block: Floats) -> Floats:
            """Products with the centred means of the remaining classes: (k, n + C) -> (k, C')."""
            plain = with_plain_means(block)
            out: Floats = plain - plain.mean(axis=1, keepdims=True)
            return out

        def with_scored(block: Floats) -> Floats:
            """Products with the centred scored images: (k, n + C) -> (k, s)."""
            centres = with_plain_means(block).mean(axis=1, keepdims=True)
            out: Floats = block[:, scored] + block[:, n + self.columns[scored]] - centres
            return out

        x = products[scored] + products[n + self.columns[scored]] - centre  # (s, n + C)
        means = means - centre
        # The scatter loses the rows `out`, so the covariance loses share * out' out.
        out = removed.rows(products)  # (v, n + C)
        share = (1 - self.statistics.shrinkage) / freedom
        core = share * np.linalg.inv(np.eye(len(out)) - share * removed.rows(out.T[:n]).T)
        out_x, out_means = with_scored(out), with_means(out)  # (v, s), (v, C')
        between = with_means(means) + out_means.T @ (core @ out_means)
        lengths = (with_scored(x).diagonal() + (out_x * (core @ out_x)).sum(axis=0))[:, None]
        inner = with_means(x) + out_x.T @ core @ out_means
        squares = between.diagonal()
        distances = np.sqrt(np.maximum(lengths + squares - 2 * inner, 0.0))
        basis = span_basis((between + between.T) / 2)
        return distances, cosine(inner, lengths, squares), span_distance(inner, basis, lengths, squares)

    def _ridge(self, scored: Indices, removed: "_Removed") -> Floats:
        products, predictions = self._ridge_products
        out = np.concatenate([removed.images, removed.whole])
        moments = predictions[:, removed.remaining] - products[:, removed.images] @ removed.member  # (n, C')
        core = np.eye(len(out)) - products[np.ix_(out, out)]
        change = np.linalg.solve(core, moments[out]) if len(out) else np.zeros((0, moments.shape[1]))
        result: Floats = moments[scored] + products[np.ix_(scored, out)] @ change
        return result


@dataclass(frozen=True)
class _Removed:
    """What is left out, for s scored images and C' remaining classes."""

    images: Indices  # of remaining classes
    member: Floats  # (images, C'), 1 for the class of each
    loss: Floats  # (images, C'), the mean of the class loses this share of the image's deviation
    remaining: Indices  # (C',)
    whole: Indices  # images of the removed classes
    left: Floats  # (C',), images that remain

    def rows(self, products: Floats) -> Floats:
        """The rows of the removed scatter, as combinations of the images' rows of `products`."""
        # Removing the images of a class also moves its mean, by the last of these terms.
        moved = (self.member / np.sqrt(self.left)).T @ products[self.images]
        return np.concatenate([products[self.images], moved, products[self.whole]])
