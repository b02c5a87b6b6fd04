"""Evidence about images: the logits and distances of every task, before a rule weighs them.

Shapes, here and where it is used: n images, T tasks, c_k classes in task k, C classes in total, d dimensions of a
task's feature, f of the frozen feature, M random features.
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
class Evidence:
    """The inputs of a rule, for n images."""

    logits: list[Floats]  # T times (n, c_k + 1), `ood` last
    distances: list[Floats]  # T times (n, c_k), Mahalanobis to each class under the task's covariance
    frozen: Floats  # (n, C), Mahalanobis to every class under one covariance of all classes


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    out: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return out


def log_distance(distances: Floats) -> Floats:
    out: Floats = np.log(np.maximum(distances, SMALLEST_DISTANCE))
    return out
