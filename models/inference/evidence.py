"""From features to evidence: what every task and the frozen backbone say of an image, before any rule weighs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.inference.model import Model

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Features:
    """n images through each task's network and through the frozen backbone."""

    tasks: Sequence[NDArray[np.float32]]  # T times (n, d)
    frozen: NDArray[np.float32]  # (n, d)


@dataclass(frozen=True)
class Evidence:
    """All that a rule may look at, for n images."""

    logits: list[Floats]  # T times (n, c_k + 1), `ood` last
    distances: list[Floats]  # T times (n, c_k), Mahalanobis to each class under the task's covariance
    frozen: Floats  # (n, C), Mahalanobis to every class under the one covariance of all classes


def gather(model: Model, features: Features) -> Evidence:
    """Heads and Mahalanobis distances on the features: a few small matrix products."""
    pairs = list(zip(model.tasks, features.tasks, strict=True))
    return Evidence(
        logits=[task.head.logits(z) for task, z in pairs],
        distances=[task.gaussians.distances(z) for task, z in pairs],
        frozen=model.frozen.distances(features.frozen),
    )
