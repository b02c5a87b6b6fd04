"""Whether novel: a score, higher for known images, and a threshold that accepts the asked share of fresh known images.

The score is the log-odds of being known: a weighted sum of a few summaries of the evidence, fitted on simulated novelty
(trainer/learning/simulation.py). The paper's rule has one summary, the log-score of the best class.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.inference.evidence import Evidence, Floats, FrozenScores, RefinedScores

SUMMARIES = (
    "distance",
    "span_distance",
    "output_distance",
    "cosine",
    "cosine_gap",
    "ridge",
    "ridge_gap",
    "refined_cosine",
    "refined_distance",
    "class_score",
)
FROZEN_SUMMARIES = SUMMARIES[:7]
REFINED_SUMMARIES = SUMMARIES[7:9]  # 0 in a version without a refined feature
REFERENCE_POINTS = 256  # a longer list of scores is stored as this many quantiles


@dataclass(frozen=True)
class Novelty:
    """The fitted decision, and the scores that it was fitted on. All are statistics of images left out of the model.

    With a refined feature, what it adds to the scores of most of these images is predicted from their frozen scores.
    """

    centre: Floats  # (S,) mean of each summary over known images
    scale: Floats  # (S,) and its deviation
    weights: Floats  # (S,)
    logistic: Floats  # (2,): slope and intercept of the log-odds of being known over the score
    threshold: Floats  # (1,): an image with a lower score is novel
    known: Floats  # sorted scores of left-out known images, at most REFERENCE_POINTS
    simulated: Floats  # sorted scores of simulated novel images, at most REFERENCE_POINTS

    @classmethod
    def empty(cls) -> Novelty:
        """Before the first task: every image is novel."""
        size, nothing = len(SUMMARIES), np.zeros(0)
        return cls(np.zeros(size), np.ones(size), np.zeros(size), np.ones(2), np.array([np.inf]), nothing, nothing)

    def scores(self, summaries: Floats) -> Floats:
        """The novelty score, higher for known images: (n, S) -> (n,)."""
        used = self.weights != 0
        out: Floats = ((summaries[:, used] - self.centre[used]) / self.scale[used]) @ self.weights[used]
        return out

    def p_novel(self, scores: Floats) -> Floats:
        """The probability of being novel where half of the images are, falling in the score; 1 for a score of NaN."""
        log_odds = self.logistic[0] * scores + self.logistic[1]
        return np.where(np.isnan(log_odds), 1.0, 1 / (1 + np.exp(np.clip(log_odds, -700, 700))))

    @property
    def uses_refined(self) -> bool:
        """Whether the refined feature counts."""
        return bool(self.weights[len(FROZEN_SUMMARIES) : -1].any())

    @property
    def novel_below(self) -> float | None:
        """An image is novel if its score is lower; None: every image is."""
        return float(self.threshold[0]) if np.isfinite(self.threshold[0]) else None

    @property
    def novel_above(self) -> float:
        """An image is novel if its p_novel is larger."""
        return 0.0 if self.novel_below is None else float(self.p_novel(self.threshold)[0])

    def calibrated(self, scores: Floats) -> Floats:
        """The quantile in 0..1 of each score among left-out known images; comparable between versions."""
        if len(self.known) == 0:
            return np.zeros_like(scores)
        left = np.searchsorted(self.known, scores, "left")
        right = np.searchsorted(self.known, scores, "right")
        return (left + right) / (2.0 * len(self.known))


def summaries(evidence: Evidence, log_scores: Floats) -> Floats:
    """The inputs of the score, for n images whose classes have these log-scores: (n, S)."""
    of_class = log_scores.max(axis=1, keepdims=True)
    refined = np.zeros((len(of_class), len(REFINED_SUMMARIES)))
    if evidence.refined is not None:
        refined = refined_summaries(evidence.refined)
    return np.concatenate([frozen_summaries(evidence.frozen), refined, of_class], axis=1)


def refined_summaries(refined: RefinedScores) -> Floats:
    """The inputs that follow from the refined scores: (n, 2)."""
    return np.stack([refined.cosines.max(axis=1), -refined.distances.min(axis=1)], axis=1)


def frozen_summaries(frozen: FrozenScores) -> Floats:
    """The inputs that follow from the frozen scores: (n, 7)."""
    cosine, cosine_gap = best_and_gap(frozen.cosines)
    ridge, ridge_gap = best_and_gap(frozen.ridge)
    distances = (frozen.distances, frozen.span_distances, frozen.output_distances)
    nearest = [-values.min(axis=1) for values in distances]
    return np.stack([*nearest, cosine, cosine_gap, ridge, ridge_gap], axis=1)


def best_and_gap(scores: Floats) -> tuple[Floats, Floats]:
    """The best score of each image and how far it is above the second best; a single class has no gap."""
    if scores.shape[1] < 2:
        return scores[:, 0], np.zeros(len(scores))
    second, best = np.partition(scores, -2, axis=1)[:, -2:].T
    return best, best - second


def quantiles(scores: Floats, weights: Floats | None = None, most: int = REFERENCE_POINTS) -> Floats:
    """The scores in order, at most REFERENCE_POINTS or `most` of them; with `weights`, each as often as it weighs."""
    scores = np.asarray(scores, np.float64)
    order = np.argsort(scores, kind="stable")
    equal = weights is None or len(scores) == 0 or float(weights.min()) == float(weights.max())
    count = min(len(scores), most, REFERENCE_POINTS)
    if equal and count == len(scores):
        return scores[order]
    shares = np.ones(len(scores)) if weights is None else weights[order]
    # The place of a score: 0 for the first, 1 for the last, in between what the scores before and half of it weigh.
    places = np.cumsum(shares) - shares / 2
    places = (places - places[0]) / max(float(places[-1] - places[0]), 1e-12)
    return np.interp(np.linspace(0, 1, count), places, scores[order])
