"""Class Gaussians of one task with a shared covariance: Mahalanobis distance (Eq. ensemble) and whitened cosine.

The scatter of the images about their class means is stored as its non-zero eigenvalues and their eigenvectors, at most
as many as there are images. The covariance is this scatter over the degrees of freedom, shrunk toward a scaled
identity, which gives every other direction the same variance, the floor. With 200 images and 1280 dimensions this takes
2 MB, a Cholesky factor 13 MB, and no inverse is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Floats, cosine
from models.inference.frozen import shrinkage


class Fixed(NamedTuple):
    """The terms of a score that do not depend on the image; computed once per model."""

    centre: Floats  # (d,), the mean of the class means
    means: Floats  # (C, d), relative to the centre
    weights: Floats  # (r,)
    projected: Floats  # (C, r)
    squares: Floats  # (C,), squared length of the whitened means
    floor: float


@dataclass(frozen=True)
class Gaussians:
    """C classes in d dimensions: one mean per class, and one scatter = basis' diag(eigenvalues) basis for all."""

    means: Floats  # (C, d)
    counts: NDArray[np.int64]  # (C,)
    basis: NDArray[np.floating]  # (r, d), orthonormal rows
    eigenvalues: Floats  # (r,)

    @classmethod
    def fit(cls, features: NDArray[np.floating], labels: NDArray[np.integer], classes: int) -> Gaussians:
        """Eq. compute_mu and Eq. compute_sigma: class means, and the covariance within classes."""
        x = np.asarray(features, np.float64)
        counts = np.bincount(labels, minlength=classes).astype(np.int64)
        if (counts == 0).any():
            raise ValueError(f"no sample for class {int(np.argmin(counts))}")
        means = np.stack([x[labels == c].mean(axis=0) for c in range(classes)])
        return cls(means, counts, *_eigen(x - means[labels]))

    def with_samples(self, features: NDArray[np.floating], labels: NDArray[np.integer]) -> Gaussians:
        """Add samples to existing classes; the result equals a fit on all samples."""
        x = np.asarray(features, np.float64)
        means, counts, rows = self.means.copy(), self.counts.copy(), [self.basis * np.sqrt(self.eigenvalues)[:, None]]
        for c in np.unique(labels):
            own, old = x[labels == c], float(counts[c])
            fresh = own.mean(axis=0)
            # The scatter of two groups about their common mean: that of each about its own mean, and the means' shift.
            shift = np.sqrt(old * len(own) / (old + len(own))) * (fresh - means[c])
            rows += [own - fresh, shift[None]]
            counts[c] += len(own)
            means[c] += (fresh - means[c]) * (len(own) / counts[c])
        basis, eigenvalues = _eigen(np.concatenate(rows))
        return replace(self, means=means, counts=counts, basis=basis, eigenvalues=eigenvalues)

    def for_answers(self) -> Gaussians:
        """With a basis of half the size: a server computes in float32 (stacked.py)."""
        return replace(self, basis=self.basis.astype(np.float32))

    def spectrum(self) -> tuple[Floats, float]:
        """The shrunk variances along the basis (r,), and the floor: the variance along every other direction."""
        d, freedom = self.means.shape[1], max(int(self.counts.sum()) - len(self.counts), 1)
        trace, square = float(self.eigenvalues.sum()), float((self.eigenvalues**2).sum())
        rho = shrinkage(trace, square, d, freedom)
        floor = rho * trace / freedom / d
        if floor <= 0:
            # One image per class, or identical images: no variance. The spread of the means, or their size, is the only
            # scale left; without a scale these distances are not comparable with those of other tasks.
            spread = self.means.var(axis=0) if len(self.means) > 1 else self.means**2
            floor = max(float(spread.mean()), 1e-12)
        return (1 - rho) * self.eigenvalues / freedom + floor, floor

    def sample(self, classes: NDArray[np.integer], rng: np.random.Generator) -> Floats:
        """One random sample per entry of `classes`: (n, d)."""
        scale, floor = self.spectrum()
        noise = rng.standard_normal((len(classes), self.means.shape[1]))
        # Noise with the floor's deviation in every direction, stretched along the basis to the deviations there.
        stretch = (noise @ self.basis.T) * (np.sqrt(scale) - np.sqrt(floor))
        out: Floats = self.means[classes] + np.sqrt(floor) * noise + stretch @ self.basis
        return out

    def scores(self, features: NDArray[np.floating]) -> tuple[Floats, Floats]:
        """Mahalanobis distance and whitened cosine of each feature (n, d) to each class: (n, C) each."""
        fixed = self.fixed
        x = np.asarray(features, np.float64) - fixed.centre
        # A product in the whitened space is the plain one over the floor, less the part along the basis, where the
        # variance is larger than the floor.
        px = (x @ self.basis.T) * fixed.weights
        lengths = ((x**2).sum(axis=1) - (px**2).sum(axis=1))[:, None] / fixed.floor
        products = (x @ fixed.means.T - px @ fixed.projected.T) / fixed.floor
        distances = np.sqrt(np.maximum(lengths + fixed.squares - 2 * products, 0.0))
        return distances, cosine(products, lengths, fixed.squares)

    @cached_property
    def fixed(self) -> Fixed:
        scale, floor = self.spectrum()
        # Relative to the mean of the means: the difference of large, nearly equal squares would lose precision.
        centre = self.means.mean(axis=0)
        means = self.means - centre
        weights = np.sqrt(np.maximum(0.0, 1 - floor / scale))
        projected = (means @ self.basis.T) * weights
        squares = ((means**2).sum(axis=1) - (projected**2).sum(axis=1)) / floor
        return Fixed(centre, means, weights, projected, squares, floor)


def _eigen(rows: Floats) -> tuple[Floats, Floats]:
    """Eigenvectors (r, d) and non-zero eigenvalues (r,) of rows' rows, by the smaller of the two Gram matrices."""
    n, d = rows.shape
    values, vectors = np.linalg.eigh(rows @ rows.T if n <= d else rows.T @ rows)
    keep = values > max(values.max(initial=0.0), 0.0) * 1e-13
    values, basis = values[keep], vectors[:, keep].T
    if n <= d:
        basis = (basis @ rows) / np.sqrt(values)[:, None]
    return np.ascontiguousarray(basis[::-1]), np.ascontiguousarray(values[::-1])
