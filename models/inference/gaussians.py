"""Class Gaussians with one shared covariance: Mahalanobis distances (Eq. ensemble) and streaming LDA.

The covariance is stored as its non-zero eigenvalues and their eigenvectors, at most as many as there are samples, plus
a floor, the variance that shrinkage gives to every direction. This is exact: the covariance of n samples has at most n
non-zero eigenvalues, and shrinkage toward a scaled identity raises all others to the same floor. With 200 images and
1280 dimensions it takes 2 MB, a Cholesky factor 13 MB, and no inverse is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Floats


class _Fixed(NamedTuple):
    """The terms of a distance that do not depend on the image; computed once per model."""

    centre: Floats  # (d,)
    means: Floats  # (C, d), relative to the centre
    squares: Floats  # (C,)
    weights: Floats  # (r,)
    projected: Floats  # (C, r)
    projected_squares: Floats  # (C,)
    floor: float


@dataclass(frozen=True)
class Gaussians:
    """C classes in d dimensions: one mean per class, and one covariance S = basis' diag(eigenvalues) basis for all."""

    means: Floats  # (C, d)
    counts: NDArray[np.int64]  # (C,)
    basis: Floats  # (r, d), orthonormal rows
    eigenvalues: Floats  # (r,)
    weights: Floats  # (C,), the weight of one sample of a class in S; the weights of all samples sum to 1

    @classmethod
    def empty(cls, dimensions: int) -> Gaussians:
        """No classes: a model that has learned nothing."""
        nothing = np.zeros((0, dimensions))
        return cls(nothing, np.zeros(0, np.int64), nothing, np.zeros(0), np.zeros(0))

    @classmethod
    def fit(cls, features: NDArray[np.floating], labels: NDArray[np.integer], classes: int) -> Gaussians:
        """Eq. compute_mu and Eq. compute_sigma: class means, and the mean of the classes' covariances."""
        x = np.asarray(features, np.float64)
        means, counts = _means(x, labels, classes)
        weights = 1 / (counts * classes)  # S is the mean over classes of (1/n_c) sum (x - mu_c)(x - mu_c)'
        rows = (x - means[labels]) * np.sqrt(weights[labels])[:, None]
        return cls(means, counts, *_eigen(rows), weights)

    def with_classes(self, features: NDArray[np.floating], labels: NDArray[np.integer], classes: int) -> Gaussians:
        """Add `classes` new classes (labels 0..classes-1); the covariance is pooled over all samples."""
        x = np.asarray(features, np.float64)
        means, counts = _means(x, labels, classes)
        grown = replace(
            self,
            means=np.concatenate([self.means, means]),
            counts=np.concatenate([self.counts, counts]),
            weights=np.concatenate([self.weights, np.zeros(classes)]),
        )
        return grown._pool(x - means[labels], np.concatenate([np.zeros_like(self.counts), counts]))

    def with_samples(self, features: NDArray[np.floating], labels: NDArray[np.integer]) -> Gaussians:
        """Add samples to existing classes: exact means, and a covariance pooled with equal weights per sample.

        `fit` gives equal weights per class instead (Eq. compute_sigma); for balanced classes the two agree.
        """
        x = np.asarray(features, np.float64)
        means, counts, rows = self.means.copy(), self.counts.copy(), []
        for c in np.unique(labels):
            own, old = x[labels == c], float(counts[c])
            fresh = own.mean(axis=0)
            # The scatter of two groups about their common mean: that of each about its own mean, and the means' shift.
            shift = np.sqrt(old * len(own) / (old + len(own))) * (fresh - means[c])
            rows += [own - fresh, shift[None]]
            counts[c] += len(own)
            means[c] += (fresh - means[c]) * (len(own) / counts[c])
        return replace(self, means=means, counts=counts)._pool(np.concatenate(rows), counts - self.counts)

    def _pool(self, rows: Floats, added: NDArray[np.int64]) -> Gaussians:
        """Pool the covariance with `rows`, the centred samples that were added to the classes."""
        total = int(self.counts.sum())
        share = (total - int(added.sum())) / total  # of the earlier samples
        old = self.basis * np.sqrt(self.eigenvalues * share)[:, None]
        basis, eigenvalues = _eigen(np.concatenate([old, rows / np.sqrt(total)]))
        weights = ((self.counts - added) * self.weights * share + added / total) / self.counts
        return replace(self, basis=basis, eigenvalues=eigenvalues, weights=weights)

    @property
    def shrinkage(self) -> float:
        """The weight of a scaled identity in S: oracle-approximating shrinkage (Chen et al. 2010).

        It depends on the eigenvalues and the sample count only, so it can be computed again when samples are added.
        """
        d, n = self.means.shape[1], int(self.counts.sum())
        trace, square = float(self.eigenvalues.sum()), float((self.eigenvalues**2).sum())
        spread = square - trace**2 / d
        if spread <= 0:
            return 1.0
        return float(min(1.0, ((1 - 2 / d) * square + trace**2) / ((n + 1 - 2 / d) * spread)))

    def spectrum(self) -> tuple[Floats, float]:
        """The shrunk variances along the basis (r,), and the floor: the variance along every other direction."""
        d, rho = self.means.shape[1], self.shrinkage
        floor = rho * float(self.eigenvalues.sum()) / d
        if floor <= 0:
            # One image per class, or identical images: no variance. The spread of the means, or their size, is the only
            # scale left; without a scale these distances are not comparable with those of other tasks.
            spread = self.means.var(axis=0) if len(self.means) > 1 else self.means**2
            floor = max(float(spread.mean()), 1e-12)
        return (1 - rho) * self.eigenvalues + floor, floor

    def sample(self, classes: NDArray[np.integer], rng: np.random.Generator) -> Floats:
        """One random sample per entry of `classes`: (n, d)."""
        scale, floor = self.spectrum()
        noise = rng.standard_normal((len(classes), self.means.shape[1]))
        # Noise with the floor's deviation in every direction, stretched along the basis to the deviations there.
        stretch = (noise @ self.basis.T) * (np.sqrt(scale) - np.sqrt(floor))
        out: Floats = self.means[classes] + np.sqrt(floor) * noise + stretch @ self.basis
        return out

    def distances(self, features: NDArray[np.floating]) -> Floats:
        """Mahalanobis distance of each feature (n, d) to each class: (n, C)."""
        if len(self.means) == 0:
            return np.zeros((len(features), 0))
        fixed = self._fixed
        x = np.asarray(features, np.float64) - fixed.centre
        # |x - mu|^2 / floor, corrected along the basis, where the variance is larger than the floor.
        plain = ((x**2).sum(1)[:, None] + fixed.squares) - 2 * x @ fixed.means.T
        px = (x @ self.basis.T) * fixed.weights
        along = ((px**2).sum(1)[:, None] + fixed.projected_squares) - 2 * px @ fixed.projected.T
        out: Floats = np.sqrt(np.maximum(plain - along, 0.0) / fixed.floor)
        return out

    @cached_property
    def _fixed(self) -> _Fixed:
        scale, floor = self.spectrum()
        # Relative to the mean of the means: the difference of large, nearly equal squares would lose precision.
        centre = self.means.mean(axis=0)
        means = self.means - centre
        weights = np.sqrt(np.maximum(0.0, 1 - floor / scale))
        projected = (means @ self.basis.T) * weights
        return _Fixed(centre, means, (means**2).sum(1), weights, projected, (projected**2).sum(1), floor)

    def distances_without(self, features: NDArray[np.floating], labels: NDArray[np.integer]) -> Floats:
        """Leave-one-out distances of fitted samples, each without itself in its class mean and in S: (n, C).

        In many dimensions, fitted samples lie closer to their mean than new images of the class do. Without a sample,
        the covariance differs by one outer product, so the Sherman-Morrison formula gives the new distance.
        """
        if len(features) == 0:
            return np.zeros((0, len(self.means)))
        scale, floor = self.spectrum()
        x = np.asarray(features, np.float64)
        n = self.counts[labels].astype(np.float64)
        if (n < 2).any():
            raise ValueError("cannot leave out the only sample of a class")
        gap = 1 / scale - 1 / floor  # the precision along the basis, relative to the floor's
        u = x - self.means[labels]  # (n, d)
        pu = u / floor + ((u @ self.basis.T) * gap) @ self.basis  # S^-1 u
        kappa = (1 - self.shrinkage) * self.weights[labels] * n / (n - 1)
        rest = np.maximum(1 - kappa * (u * pu).sum(axis=1), 1e-9)
        squared = self.distances(x) ** 2
        across = np.einsum("nd,ncd->nc", pu, x[:, None] - self.means)  # (x - mu_c)' S^-1 u
        out: Floats = squared + (kappa / rest)[:, None] * across**2
        out[np.arange(len(x)), labels] *= (n / (n - 1)) ** 2  # the mean of its class without the sample is farther away
        return np.sqrt(out)


def _means(x: Floats, labels: NDArray[np.integer], classes: int) -> tuple[Floats, NDArray[np.int64]]:
    """The means (C, d) and sample counts (C,) of the classes."""
    counts = np.bincount(labels, minlength=classes).astype(np.int64)
    if (counts == 0).any():
        raise ValueError(f"no sample for class {int(np.argmin(counts))}")
    return np.stack([x[labels == c].mean(axis=0) for c in range(classes)]), counts


def _eigen(rows: Floats) -> tuple[Floats, Floats]:
    """Eigenvectors (r, d) and non-zero eigenvalues (r,) of rows' rows, by the smaller of the two Gram matrices."""
    n, d = rows.shape
    values, vectors = np.linalg.eigh(rows @ rows.T if n <= d else rows.T @ rows)
    keep = values > max(values.max(initial=0.0), 0.0) * 1e-13
    values, basis = values[keep], vectors[:, keep].T
    if n <= d:
        basis = (basis @ rows) / np.sqrt(values)[:, None]
    return np.ascontiguousarray(basis[::-1]), np.ascontiguousarray(values[::-1])
