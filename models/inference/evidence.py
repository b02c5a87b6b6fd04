"""Evidence about images: everything that the two decisions, which class and whether novel, may weigh.

Shapes, here and where it is used: n images, T tasks, c_k classes in task k, C classes in total, d dimensions of a
task's feature, f of the frozen feature, M of its random expansion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Floats = NDArray[np.float64]
SMALLEST_DISTANCE = 1e-9  # an image may lie exactly on a class mean
SPAN_RIDGE = 1e-4  # of the mean squared length of the class means: two classes may have nearly the same mean


@dataclass(frozen=True)
class Features:
    """The features of n images under each task's network and under the frozen backbone."""

    tasks: Sequence[Array]  # T times (n, d)
    frozen: Array  # (n, f)
    expanded: Array  # (n, M), random ReLU features of the frozen feature


@dataclass(frozen=True)
class FrozenScores:
    """Closed-form scores of the frozen feature for every class: (n, C) each."""

    distances: Floats  # Mahalanobis, under one covariance of all classes
    cosines: Floats  # between the whitened image and the whitened class mean
    ridge: Floats  # ridge regression of the class indicator on the expanded feature
    span_distances: Floats  # the part of each distance that lies in the span of the class means, where classes differ

    def rows(self, rows: NDArray[np.bool_]) -> FrozenScores:
        """The scores of some images."""
        return FrozenScores(*(getattr(self, field.name)[rows] for field in fields(self)))

    def first_classes(self, count: int) -> FrozenScores:
        return FrozenScores(*(getattr(self, field.name)[:, :count] for field in fields(self)))


@dataclass(frozen=True)
class Evidence:
    """The inputs of a rule, for n images."""

    logits: list[Floats]  # T times (n, c_k + 1), `ood` last
    distances: list[Floats]  # T times (n, c_k), Mahalanobis in the task's feature space
    cosines: list[Floats]  # T times (n, c_k), whitened cosine in the task's feature space
    frozen: FrozenScores


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    out: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return out


def log_distance(distances: Floats) -> Floats:
    out: Floats = np.log(np.maximum(distances, SMALLEST_DISTANCE))
    return out


def cosine(products: Floats, left: Floats, right: Floats) -> Floats:
    """Cosines from inner products (n, C) and squared lengths (n, 1) and (C,); 0 for a vector without length."""
    lengths = np.sqrt(np.maximum(left * right, 0.0))
    out: Floats = np.where(lengths > 0, products / np.where(lengths > 0, lengths, 1.0), 0.0)
    return out


def span_basis(products: Floats) -> Floats:
    """(C, C), from the inner products of C vectors: it maps inner products with them to coordinates in their span."""
    ridge = max(SPAN_RIDGE * float(np.trace(products)) / len(products), 1e-12)
    values, vectors = np.linalg.eigh(products)
    out: Floats = vectors / np.sqrt(np.maximum(values, 0.0) + ridge)  # rounding gives small negative values
    return out


def span_distance(products: Floats, basis: Floats, left: Floats, right: Floats) -> Floats:
    """Distances (n, C) in the span of the class means, from inner products and squared lengths as for `cosine`."""
    inside = np.minimum(((products @ basis) ** 2).sum(axis=1, keepdims=True), left)
    out: Floats = np.sqrt(np.maximum(inside + right - 2 * products, 0.0))
    return out
