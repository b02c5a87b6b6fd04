"""Frozen scores of kept images under statistics that leave out some images or whole classes.

Statistics without an image differ by a few outer products, so their scores follow from inner products that are computed
once (the Woodbury identity), not from another inverse for each fold. Exact, but for two numbers of the covariance: the
amount of the identity stays that of all images, because fresh images will be scored with it, and the degrees of freedom
are the same for all folds. Products are in float32, as those of a server are.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Array, Floats, FrozenScores, cosine, distance, distance_in_span, lengths_in_span
from models.inference.frozen import FrozenStatistics, inverse_root
from trainer.learning.likeness import find_scenes, independent_weights, likeness_groups

Indices = NDArray[np.int64]
NEARLY = 0.1  # of the degrees of freedom: distances then differ by a twentieth, those of known and novel images alike


@dataclass(frozen=True)
class LeaveOut:
    """Kept images of known classes, and the statistics that hold them."""

    statistics: FrozenStatistics
    features: NDArray[np.float32]  # (n, f)
    expanded: NDArray[np.float32]  # (n, M)
    columns: Indices  # (n,), the class of each image, as a column of the scores
    _whitened_at: dict[float, tuple["_Rows", "_Rows"]] = field(default_factory=dict)

    @cached_property
    def _scenes(self) -> Indices:
        return find_scenes(self.features, self.columns)

    @cached_property
    def likeness(self) -> Indices:
        """The likeness group of each image: (n,)."""
        return likeness_groups(self.features, self.columns, self._scenes)

    @cached_property
    def weights(self) -> Floats:
        """What each image says about fresh ones: (n,)."""
        return independent_weights(self._scenes)

    def _rows(self, freedom: float) -> tuple["_Rows", "_Rows"]:
        """Whitened rows of the whole feature, and of its first part, whose whitened dimensions are the first ones."""
        if freedom not in self._whitened_at:
            statistics = self.statistics
            root = inverse_root(statistics.covariance(freedom).astype(np.float32))
            images = (self.features - statistics.means[self.columns]).astype(np.float32) @ root.T
            means = (statistics.means - statistics.centre).astype(np.float32) @ root.T
            first = slice(statistics.output)
            self._whitened_at[freedom] = _Rows.of(images, means), _Rows.of(images[:, first], means[:, first])
        return self._whitened_at[freedom]

    def mean_lengths(self, freedom: float) -> tuple[Floats, Floats]:
        """Squared lengths of the whitened class means with all images: of the feature, and of its first part. (C,)"""
        feature, output = (rows.of_means.diagonal().astype(np.float64) for rows in self._rows(self._shared(freedom)))
        return feature, output

    def _shared(self, freedom: float) -> float:
        """Degrees of freedom of which there is an inverse already, if they are nearly the same."""
        nearest = min(self._whitened_at, key=lambda known: abs(known - freedom), default=freedom)
        return nearest if abs(nearest - freedom) < NEARLY * freedom else freedom

    @cached_property
    def _ridge_products(self) -> tuple[Array, Array]:
        """Of n expanded features, then a row for each class `_partly` at hand, under the inverse Gram matrix.

        (products (n + p, n + p), ridge scores (n + p, C)). Of the k images of a class that are not at hand, the sum is
        known, and so their mean m. The Gram matrix holds k m m' and their deviations from m: the row is sqrt(k) m.
        """
        root = inverse_root(self.statistics.regularised_gram.astype(np.float32))
        h, moments = self.expanded @ root.T, self.statistics.moments.astype(np.float32) @ root.T
        beside = moments.copy()
        np.subtract.at(beside, self.columns, h)
        numbers = self._not_at_hand[self._partly, None].astype(np.float32)
        rows = np.concatenate([h, beside[self._partly] / np.sqrt(numbers)])
        return rows @ rows.T, rows @ moments.T

    @cached_property
    def _not_at_hand(self) -> Indices:
        """Images of each class that the statistics hold beside these: (C,)."""
        return self.statistics.counts - np.bincount(self.columns, minlength=len(self.statistics.counts))

    @cached_property
    def _partly(self) -> Indices:
        """The classes of which not all images are at hand."""
        return np.flatnonzero(self._not_at_hand > 0)

    def scores(self, scored: Indices, images: Indices, classes: Indices, freedom: float | None = None) -> FrozenScores:
        """The scores of the images `scored` without the images `images` and without the classes `classes`.

        `freedom` is how many degrees of freedom remain, by default all. Calls with nearly the same value share
        an inverse. One column for each remaining class. The removed images belong to remaining classes, which
        keep at least one image each. Of a removed class, the images at hand leave the statistics, and of those
        that the statistics hold beside them, what is known, their mean. Their deviations from it stay: to remove
        images at hand several times in their place would take more than is there.
        """
        counts = self.statistics.counts
        remaining = np.setdiff1d(np.arange(len(counts)), classes)
        touched, member = np.unique(self.columns[images], return_inverse=True)
        left = (counts[touched] - np.bincount(member, minlength=len(touched))).astype(np.float32)
        whole = np.flatnonzero(np.isin(self.columns, classes))
        removed = _Removed(images, np.searchsorted(remaining, touched), member, left, remaining, whole)
        freedom = self._shared(freedom or self.statistics.freedom)
        part = np.unique(np.concatenate([scored, images, whole]))  # the images that take part
        places = [np.searchsorted(part, rows) for rows in (scored, images, whole)]
        local = replace(removed, images=places[1], whole=places[2])
        feature, output = (
            self._whitened(own.products(part), self.columns[part], places[0], local, freedom)
            for own in self._rows(freedom)
        )
        inside = lengths_in_span(feature.products, (feature.means + feature.means.T) / 2)
        return FrozenScores(
            distance(feature.products, feature.lengths, feature.squares),
            cosine(feature.products, feature.lengths, feature.squares),
            self._ridge(scored, removed, np.flatnonzero(np.isin(self._partly, classes))),
            distance_in_span(inside, feature.products, feature.lengths, feature.squares),
            distance(output.products, output.lengths, output.squares),
            cosine(output.products, output.lengths, output.squares),
        )

    def _whitened(
        self, products: Array, columns: Indices, scored: Indices, removed: "_Removed", freedom: float
    ) -> "_Whitened":
        """From the products of n images with these classes and of the C class means: (n + C, n + C)."""
        n = len(columns)
        means = removed.without(products[n + removed.remaining], products[removed.images])  # (C', n + C)
        centre = means.mean(axis=0)

        def with_means(block: Array) -> tuple[Array, Array]:
            """Products with the centred means of the remaining classes, (k, n + C) -> (k, C'), and their centre."""
            plain = removed.without(block[:, n + removed.remaining].T, block[:, removed.images].T).T
            mean: Array = plain.mean(axis=1, keepdims=True)
            return plain - mean, mean

        x = products[scored] + products[n + columns[scored]] - centre  # (s, n + C)
        inner, own_centre = with_means(x)
        lengths = x[np.arange(len(scored)), scored] + x[np.arange(len(scored)), n + columns[scored]]
        lengths = lengths[:, None] - own_centre
        between, _ = with_means(means - centre)
        # The scatter loses the rows `out`, so the covariance loses share * out' out.
        out = removed.rows(products)  # (v, n + C)
        share = np.float32((1 - self.statistics.shrinkage) / freedom)
        out_means, out_centre = with_means(out)  # (v, C')
        out_x = out[:, scored] + out[:, n + columns[scored]] - out_centre  # (v, s)
        left = np.eye(len(out), dtype=np.float32) - share * removed.rows(out.T[:n]).T
        solved = share * np.linalg.solve(left, np.concatenate([out_x, out_means], axis=1))
        core_x, core_means = solved[:, : len(scored)], solved[:, len(scored) :]
        return _Whitened(
            (inner + out_x.T @ core_means).astype(np.float64),
            (lengths + (out_x * core_x).sum(axis=0)[:, None]).astype(np.float64),
            (between + out_means.T @ core_means).astype(np.float64),
        )

    def _ridge(self, scored: Indices, removed: "_Removed", beside: Indices) -> Floats:
        """Without the images and classes that are removed; `beside` are the places of the latter in `_partly`."""
        products, predictions = self._ridge_products
        out = np.concatenate([removed.images, removed.whole, len(self.columns) + beside])

        def moments(rows: Indices) -> Array:
            """Ridge scores of images without the removed images as examples of their classes: (rows, C')."""
            plain = predictions[np.ix_(rows, removed.remaining)]
            np.subtract.at(plain.T, removed.touched[removed.member], products[np.ix_(rows, removed.images)].T)
            return plain

        core = np.eye(len(out), dtype=np.float32) - products[np.ix_(out, out)]
        change = np.linalg.solve(core, moments(out)) if len(out) else np.zeros((0, len(removed.remaining)))
        result: Floats = (moments(scored) + products[np.ix_(scored, out)] @ change).astype(np.float64)
        return result


class _Rows(NamedTuple):
    """Whitened images about their class means, and class means; products that every fold needs are computed once."""

    images: Array  # (n, f)
    of_images: Array  # (n, C), their inner products with the means
    of_means: Array  # (C, C)

    @classmethod
    def of(cls, images: Array, means: Array) -> "_Rows":
        return cls(images, images @ means.T, means @ means.T)

    def products(self, part: Indices) -> Array:
        """Inner products of some images, then of all class means: (part + C, part + C)."""
        rows, with_means = self.images[part], self.of_images[part]
        return np.block([[rows @ rows.T, with_means], [with_means.T, self.of_means]])


class _Whitened(NamedTuple):
    """Inner products of s scored images and C' class means, both centred and whitened."""

    products: Floats  # (s, C')
    lengths: Floats  # (s, 1), squared, of the images
    means: Floats  # (C', C'), of the means with each other

    @property
    def squares(self) -> Floats:
        """Squared lengths of the means: (C',)."""
        return self.means.diagonal()


@dataclass(frozen=True)
class _Removed:
    """What is left out. Few of the C' remaining classes lose images in a fold: the others need no work."""

    images: Indices  # of remaining classes
    touched: Indices  # (t,), the remaining classes that lose images, as places in `remaining`
    member: Indices  # (images,), the class of each image, as a place in `touched`
    left: Array  # (t,), images that remain of these classes
    remaining: Indices  # (C',)
    whole: Indices  # images of the removed classes

    def without(self, classes: Array, images: Array) -> Array:
        """Rows per class (C', k), those of class means, after the classes have lost images with these rows."""
        out = classes.copy()
        out[self.touched] -= self._summed(images) / self.left[:, None]
        return out

    def rows(self, products: Array) -> Array:
        """The rows of the removed scatter, as combinations of the images' rows of `products`."""
        # Removing the images of a class also moves its mean, which takes another row. That of a single image is
        # parallel to the image's own, so both are one longer row.
        several = np.bincount(self.member, minlength=len(self.touched)) > 1
        length = np.where(several, np.float32(1), np.sqrt(1 + 1 / self.left))[self.member]
        own = products[self.images]
        shifts = self._summed(own)[several] / np.sqrt(self.left[several])[:, None]
        return np.concatenate([own * length[:, None], shifts, products[self.whole]])

    def _summed(self, images: Array) -> Array:
        """The sum of the images' rows per class that loses some: (t, k)."""
        if len(images) == 0:
            return np.zeros((0, images.shape[1]), np.float32)
        order = np.argsort(self.member, kind="stable")
        out: Array = np.add.reduceat(images[order], np.searchsorted(self.member[order], np.arange(len(self.touched))))
        return out
