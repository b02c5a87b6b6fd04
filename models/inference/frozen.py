"""Closed-form class scores of the frozen backbone: Mahalanobis distance, whitened cosine and ridge regression.

All three follow from sums over images. Adding or removing images changes the sums, and nothing is fitted again:

    counts, means    per class
    scatter          sum over all images of (x - mu)(x - mu)', mu the mean of the image's class
    gram, moments    sum of h h', and per class the sum of h, where h is the random ReLU expansion of x (RanPAC)

Images are scored against all classes at once by matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Array, Floats, FrozenScores, cosine, distance, span_basis, span_distance

# The ridge penalty, relative to the mean diagonal of the Gram matrix; chosen on training images of Grocery and Caltech.
RIDGE = 0.1
# The least share of the scaled identity: the covariance stays invertible in float32 when images outnumber dimensions.
LEAST_SHRINKAGE = 1e-3
SMALL_MATRIX = 64  # LAPACK is faster
Labels = NDArray[np.integer]
Rows = NDArray[np.floating]


class _Solved(NamedTuple):
    """What scores are computed from; solved once per model."""

    centre: Floats  # (f,), the mean of the class means
    means: Array  # (C, f), centred and whitened
    squares: Floats  # (C,), their squared lengths
    basis: Floats  # (C, C) of their span
    output_squares: Floats  # (C,), squared lengths of their first part
    coefficients: Array  # (M, C) of the ridge regression


@dataclass(frozen=True)
class FrozenStatistics:
    """Sums over the images of C classes."""

    counts: NDArray[np.int64]  # (C,)
    means: Floats  # (C, f)
    scatter: Floats  # (f, f)
    moments: Floats  # (C, M)
    gram: Floats  # (M, M)
    output: int | None = None  # dimensions of the first part of the feature, the backbone's output; None: all

    @classmethod
    def empty(cls, dimensions: int, expanded: int, output: int | None = None) -> FrozenStatistics:
        """No classes: a model that has learned nothing."""
        return cls(
            np.zeros(0, np.int64),
            np.zeros((0, dimensions)),
            np.zeros((dimensions, dimensions)),
            np.zeros((0, expanded)),
            np.zeros((expanded, expanded)),
            output,
        )

    @classmethod
    def fit(cls, features: Rows, expanded: Rows, labels: Labels, classes: int) -> FrozenStatistics:
        """The sums of images with labels 0 .. classes - 1."""
        return cls.empty(features.shape[1], expanded.shape[1]).with_images(features, expanded, labels, classes)

    def with_images(self, features: Rows, expanded: Rows, labels: Labels, new_classes: int = 0) -> FrozenStatistics:
        """Add images of known classes and of `new_classes` further ones, whose labels follow the known ones."""
        changed = self.with_classes(new_classes)._changed(features, expanded, labels, 1)
        if (changed.counts == 0).any():
            raise ValueError(f"no image of class {int(np.argmin(changed.counts))}")
        return changed

    def with_classes(self, new_classes: int) -> FrozenStatistics:
        """Further classes, without images yet."""
        counts = np.concatenate([self.counts, np.zeros(new_classes, np.int64)])
        means = np.concatenate([self.means, np.zeros((new_classes, self.means.shape[1]))])
        moments = np.concatenate([self.moments, np.zeros((new_classes, self.moments.shape[1]))])
        return replace(self, counts=counts, means=means, moments=moments)

    def without_images(self, features: Rows, expanded: Rows, labels: Labels) -> FrozenStatistics:
        """Remove images that were added before; every class keeps at least one."""
        if (self.counts <= np.bincount(labels, minlength=len(self.counts))).any():
            raise ValueError("cannot remove every image of a class")
        return self._changed(features, expanded, labels, -1)

    def _changed(self, features: Rows, expanded: Rows, labels: Labels, sign: int) -> FrozenStatistics:
        """Add (1) or remove (-1) images: exact sums, by the scatter of two groups about their common mean."""
        x, h = np.asarray(features, np.float64), np.asarray(expanded, np.float64)
        group, amounts, indicator = self._group_means(x, labels)
        counts = self.counts + sign * amounts
        means = self.means + sign * (group - self.means) * (amounts / np.maximum(counts, 1))[:, None]
        rows, _ = self.scatter_rows(x, labels, sign)
        return FrozenStatistics(
            counts,
            means,
            self.scatter + sign * (rows.T @ rows),
            self.moments + sign * (indicator @ h),
            self.gram + sign * (h.T @ h),
            self.output,
        )

    def scatter_rows(self, features: Rows, labels: Labels, sign: int) -> tuple[Floats, Labels]:
        """The rows whose outer products the scatter gains (1) or loses (-1) with these images, and their classes."""
        x = np.asarray(features, np.float64)
        group, amounts, _ = self._group_means(x, labels)
        present = np.flatnonzero(amounts)
        # Between the mean of these images and that of the other images of the class, before or after.
        counts = self.counts + sign * amounts
        others = self.counts if sign > 0 else counts
        means = self.means
        if sign < 0:
            means = means - (group - means) * (amounts / np.maximum(counts, 1))[:, None]
        weight = (amounts * others / np.maximum(amounts + others, 1))[present]
        between = (group - means)[present] * np.sqrt(weight)[:, None]
        return np.concatenate([x - group[labels], between]), np.concatenate([labels, present])

    def _group_means(self, x: Floats, labels: Labels) -> tuple[Floats, NDArray[np.int64], Floats]:
        """Of images that come or go: their mean per class (C, f), their number (C,), and the class of each (C, n)."""
        amounts = np.bincount(labels, minlength=len(self.counts))
        indicator = np.zeros((len(self.counts), len(x)))
        indicator[labels, np.arange(len(x))] = 1.0
        return (indicator @ x) / np.maximum(amounts, 1)[:, None], amounts, indicator

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the covariance within classes."""
        return max(int(self.counts.sum()) - len(self.counts), 1)

    @cached_property
    def shrinkage(self) -> float:
        """The weight of a scaled identity in the covariance."""
        trace, square = float(np.trace(self.scatter)), float((self.scatter**2).sum())
        return max(shrinkage(trace, square, len(self.scatter), self.freedom), LEAST_SHRINKAGE)

    def covariance(self, freedom: float | None = None) -> Floats:
        """The pooled covariance within classes, shrunk toward a scaled identity: (f, f).

        Another number of degrees of freedom scales the pooled part, not the identity.
        """
        variance = float(np.trace(self.scatter)) / self.freedom / len(self.scatter)
        if variance <= 0:
            # One image per class: there is no variance. The spread of the means, or their size, is the only scale left.
            spread = self.means.var(axis=0) if len(self.means) > 1 else self.means**2
            return np.eye(len(self.scatter)) * max(float(spread.mean()), 1e-12)
        out: Floats = self.scatter * ((1 - self.shrinkage) / (freedom or self.freedom))
        out[np.diag_indices(len(out))] += self.shrinkage * variance
        return out

    def scores(self, features: Rows, expanded: Rows) -> FrozenScores:
        """Score n images against every class."""
        if len(self.counts) == 0:
            nothing = np.zeros((len(features), 0))
            return FrozenScores(*(nothing for _ in fields(FrozenScores)))
        solved = self._solved
        x = (features - solved.centre).astype(np.float32) @ self.whitening.T
        lengths = (x * x).sum(axis=1, keepdims=True, dtype=np.float64)
        products = (x @ solved.means.T).astype(np.float64)
        ridge = (expanded.astype(np.float32, copy=False) @ solved.coefficients).astype(np.float64)
        # The whitening is triangular: the first dimensions of a whitened feature are its first part, whitened alone.
        first = x[:, : self.output]
        first_lengths = (first * first).sum(axis=1, keepdims=True, dtype=np.float64)
        first_products = (first @ solved.means[:, : self.output].T).astype(np.float64)
        return FrozenScores(
            distance(products, lengths, solved.squares),
            cosine(products, lengths, solved.squares),
            ridge,
            span_distance(products, solved.basis, lengths, solved.squares),
            distance(first_products, first_lengths, solved.output_squares),
            cosine(first_products, first_lengths, solved.output_squares),
        )

    @property
    def centre(self) -> Floats:
        """The mean of the class means: (f,)."""
        out: Floats = self.means.mean(axis=0)
        return out

    @cached_property
    def whitening(self) -> Array:
        """(f, f), rows @ whitening.T have the identity as covariance. In float32: half the memory traffic."""
        return inverse_root(self.covariance().astype(np.float32))

    @property
    def regularised_gram(self) -> Floats:
        """The Gram matrix with the ridge penalty: (M, M)."""
        penalty = RIDGE * float(np.trace(self.gram)) / len(self.gram)
        return self.gram + np.eye(len(self.gram)) * max(penalty, 1e-12)

    @cached_property
    def _solved(self) -> _Solved:
        means = (self.means - self.centre).astype(np.float32) @ self.whitening.T
        inner = means.astype(np.float64) @ means.T
        coefficients = np.linalg.solve(self.regularised_gram.astype(np.float32), self.moments.T.astype(np.float32))
        return _Solved(
            self.centre,
            means,
            inner.diagonal(),
            span_basis(inner),
            (means[:, : self.output].astype(np.float64) ** 2).sum(axis=1),
            coefficients.astype(np.float32),
        )


def inverse_root(matrix: Array) -> Array:
    """The lower triangular W with W' W the inverse of a symmetric, positive definite matrix.

    By halves, so that nearly all work is products of matrices: five times as fast as `numpy.linalg.inv` with 1712
    dimensions, and as accurate. The inverse itself by halves would not be: it loses twice as many digits.
    """
    if len(matrix) <= SMALL_MATRIX:
        return np.tril(np.linalg.inv(np.linalg.cholesky(matrix)))  # LAPACK pivots: small values above the diagonal
    half = len(matrix) // 2
    first = inverse_root(matrix[:half, :half])
    below = matrix[half:, :half] @ first.T  # of the Cholesky factor
    second = inverse_root(matrix[half:, half:] - below @ below.T)
    out = np.zeros_like(matrix)
    out[:half, :half], out[half:, half:] = first, second
    out[half:, :half] = -second @ (below @ first)
    return out


def shrinkage(trace: float, square: float, dimensions: int, freedom: int) -> float:
    """Oracle-approximating shrinkage from the trace of a scatter matrix and of its square.

    It is invariant to the scale of the matrix. `freedom` is the number of images minus the number of class means that
    were estimated from them.
    """
    spread = square - trace**2 / dimensions
    if spread <= 0 or freedom < 1:
        return 1.0
    d = dimensions
    return float(min(1.0, ((1 - 2 / d) * square + trace**2) / ((freedom + 1 - 2 / d) * spread)))
