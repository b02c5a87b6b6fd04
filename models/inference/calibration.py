"""Calibration on held-out images of known classes: the threshold, the calibrated score, p_novel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.inference.evidence import Evidence, Floats, log_distance, log_softmax

REFERENCE_POINTS = 256  # a longer list of held-out scores is stored as this many quantiles


@dataclass(frozen=True)
class Calibration:
    """Statistics of images that no part of the model was trained on."""

    reference: Floats  # sorted scores of held-out known images, at most REFERENCE_POINTS
    threshold: Floats  # (1,): an image with a lower score is novel
    tails: Floats  # (T, 2): centre and scale of the sigmoid over a task's log-distances

    @classmethod
    def fit(cls, scores: Floats, own_distances: list[Floats], accept: float) -> Calibration:
        """Fit on held-out known images; `accept` is the share of them that must be recognised as known.

        `scores` are those of the version's rule; `own_distances[k]` are the distances of task k's images to task k.
        """
        ordered = np.sort(np.asarray(scores, np.float64))
        if len(ordered) > REFERENCE_POINTS:
            ordered = np.quantile(ordered, np.linspace(0, 1, REFERENCE_POINTS))
        tails = np.array([_tail(distances, accept) for distances in own_distances]).reshape(-1, 2)
        return cls(ordered, np.array([np.quantile(scores, 1 - accept, method="lower")]), tails)

    @classmethod
    def empty(cls) -> Calibration:
        """Before the first task: every score is below the threshold."""
        return cls(np.zeros(0), np.array([np.inf]), np.zeros((0, 2)))

    def calibrated(self, scores: Floats) -> Floats:
        """The quantile in 0..1 of each score among held-out known images; comparable between versions."""
        if len(self.reference) == 0:
            return np.zeros_like(scores)
        left = np.searchsorted(self.reference, scores, "left")
        right = np.searchsorted(self.reference, scores, "right")
        return (left + right) / (2.0 * len(self.reference))

    def p_known(self, evidence: Evidence) -> Floats:
        """P'_k(x in X_k) of the theory, for each task: (n, T).

        The product of two probabilities: the task's head does not answer `ood`, and the image is not farther from the
        task's classes than the task's own held-out images are. The second factor detects novelty even for a first task,
        whose head was trained without any `ood` images.
        """
        columns = []
        for (centre, scale), logits, distances in zip(self.tails, evidence.logits, evidence.distances, strict=True):
            not_ood = -np.expm1(log_softmax(logits)[:, -1])
            nearest = log_distance(distances.min(axis=1))
            columns.append(not_ood / (1 + np.exp(np.clip((nearest - centre) / scale, -60, 60))))
        return np.stack(columns, axis=1)


def p_novel(p_known: Floats) -> Floats:
    """P(x in X+ | D) of the corollary on open-world TP: (n, T) -> (n,)."""
    none_of_them = np.prod(1 - p_known, axis=1)
    total = p_known.sum(axis=1) + none_of_them
    out: Floats = none_of_them / np.maximum(total, np.finfo(np.float64).tiny)
    return out


def _tail(distances: Floats, accept: float) -> tuple[float, float]:
    """Centre and scale; the share `accept` of the task's own images is nearer than the centre."""
    logs = log_distance(distances)
    return float(np.quantile(logs, accept)), max(float(np.std(logs)), 0.02)
