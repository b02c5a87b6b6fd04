"""Evidence about images: everything that the two decisions, which class and whether novel, may weigh.

Shapes, here and where it is used: n images, T tasks, c_k classes in task k, C classes in total, d dimensions of a
task's feature, f of the frozen feature, M of its random expansion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Floats = NDArray[np.float64]
SMALLEST_DISTANCE = 1e-9  # an image may lie exactly on a class mean


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
