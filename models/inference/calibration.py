"""What held-out images of known classes say about scores: the threshold, the calibrated score, p_novel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.inference.rules import SMALLEST_DISTANCE, log_softmax

Floats = NDArray[np.float64]
REFERENCE_POINTS = 256  # more held-out scores than this are kept as as many quantiles


@dataclass(frozen=True)
class Calibration:
    """Fitted on images that no part of the model was trained on."""

    reference: Floats  # sorted scores of held-out known images, at most REFERENCE_POINTS
    threshold: Floats  # (1,): below it an image is novel
    tails: Floats  # (T, 2): where a task's log-distances end (centre) and how fast (scale)

    @classmethod
    def fit(cls, scores: Floats, own_distances: list[Floats], accept: float) -> Calibration:
        """`scores` of known images under the version's rule; `own_distances[k]`: of task k's images to task k."""
        ordered = np.sort(np.asarray(scores, np.float64))
        if len(ordered) > REFERENCE_POINTS:
            ordered = np.quantile(ordered, np.linspace(0, 1, REFERENCE_POINTS))
        tails = np.array([_tail(distances, accept) for distances in own_distances]).reshape(-1, 2)
        return cls(ordered, np.array([np.quantile(scores, 1 - accept, method="lower")]), tails)

    @classmethod
    def nothing(cls) -> Calibration:
        """Before the first task: no score is high enough."""
        return cls(np.zeros(0), np.array([np.inf]), np.zeros((0, 2)))

    def calibrated(self, scores: Floats) -> Floats:
        """The quantile in 0..1 of each score among held-out known images: comparable from version to version."""
        if len(self.reference) == 0:
            return np.zeros_like(scores)
        left = np.searchsorted(self.reference, scores, "left")
        right = np.searchsorted(self.reference, scores, "right")
        return (left + right) / (2.0 * len(self.reference))

    def p_known(self, logits: list[Floats], distances: list[Floats]) -> Floats:
        """P'_k(x in X_k) of the theory, for each task: (n, T).

        Not `ood` for the task's head, and not beyond the distances at which the task's own held-out images lie. The
        second factor speaks already when the first task has had nothing to be told apart from.
        """
        columns = []
        for (centre, scale), task_logits, task_distances in zip(self.tails, logits, distances, strict=True):
            not_ood = -np.expm1(log_softmax(task_logits)[:, -1])
            nearest = np.log(np.maximum(task_distances.min(axis=1), SMALLEST_DISTANCE))
            columns.append(not_ood / (1 + np.exp(np.clip((nearest - centre) / scale, -60, 60))))
        return np.stack(columns, axis=1)


def p_novel(p_known: Floats) -> Floats:
    """P(x in X+ | D) of the corollary on open-world TP: (n, T) -> (n,)."""
    none_of_them = np.prod(1 - p_known, axis=1)
    total = p_known.sum(axis=1) + none_of_them
    out: Floats = none_of_them / np.maximum(total, np.finfo(np.float64).tiny)
    return out


def _tail(distances: Floats, accept: float) -> tuple[float, float]:
    """Half-way at the distance within which the accepted share of the task's own images lies."""
    logs = np.log(np.maximum(distances, SMALLEST_DISTANCE))
    return float(np.quantile(logs, accept)), max(float(np.std(logs)), 0.02)
