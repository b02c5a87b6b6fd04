"""Fitting a rule's constants on held-out images of known classes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models.evidence import Evidence
from models.rules import Rule, log_softmax
from trainer.settings import LearnerSettings

FROZEN_WEIGHTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
SHARPNESS = tuple(2.0**k for k in range(-6, 4))  # a score's scale does not change its order, so it is free


def fit_rule(settings: LearnerSettings, evidence: Evidence, columns: NDArray[np.int64]) -> Rule:
    """The rule of the settings; `columns` are the right classes' columns in its scores."""
    if settings.rule != "product":
        return Rule(settings.rule)
    if settings.frozen_weight is not None:
        return Rule("product", {"frozen_weight": settings.frozen_weight})
    rules = [Rule("product", {"frozen_weight": weight}) for weight in FROZEN_WEIGHTS]
    losses = [_loss(rule.log_scores(evidence), columns) for rule in rules]
    return rules[int(np.argmin(losses))]


def _loss(log_scores: NDArray[np.float64], columns: NDArray[np.int64]) -> float:
    """Cross-entropy of the right class at the sharpness that suits the scores best.

    Accuracy would do on thousands of images; on tens it hardly tells two weights apart.
    """
    right = np.arange(len(columns)), columns
    return min(float(-log_softmax(sharpness * log_scores)[right].mean()) for sharpness in SHARPNESS)
