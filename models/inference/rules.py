"""Rules: pure functions from evidence to the log-score of every class.

A version records the name of its rule and the constants fitted for it; a new rule is a new function in `RULES`.
Scores are logarithms: a product of small probabilities underflows, a sum of logarithms does not, and the order of the
classes is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.inference.evidence import Evidence, Floats, log_distance, log_softmax


@dataclass(frozen=True)
class Rule:
    """A rule's name and its fitted constants, as the manifest records them."""

    name: str = "paper"
    constants: dict[str, float] = field(default_factory=dict)

    def log_scores(self, evidence: Evidence) -> Floats:
        """The log-score of every class: (n, C)."""
        return RULES[self.name](evidence, self.constants)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "constants": self.constants}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Rule:
        if data["name"] not in RULES:
            raise ValueError(f"unknown rule {data['name']!r}; this release knows {', '.join(RULES)}")
        return cls(data["name"], dict(data["constants"]))


def log_class_probabilities(logits: Floats, constants: Mapping[str, float]) -> Floats:
    """log p(Y_k | x, k): `ood` counts in the denominator and is then dropped. (n, c_k + 1) -> (n, c_k)

    The paper's temperature is 1. A head trained on tens of images per class is overconfident, and its probabilities
    then outweigh the coefficient; the temperature fitted on held-out images restores the balance. It is the scale alpha
    of the paper's output calibration, one for all tasks.
    """
    return log_softmax(logits / constants.get("temperature", 1.0))[:, :-1]


def log_coefficient(distances: Floats) -> Floats:
    """log s_k(x), Eq. ensemble: the largest inverse Mahalanobis distance to a class of the task. (n, c_k) -> (n, 1)"""
    return -log_distance(distances.min(axis=1, keepdims=True))


def log_likelihood(distances: Floats) -> Floats:
    """Gaussian log-likelihood of every class, up to a term that all classes share."""
    return -0.5 * distances**2


def plain(evidence: Evidence, constants: Mapping[str, float]) -> Floats:
    """Eq. base_prediction: the probabilities alone."""
    return np.concatenate([log_class_probabilities(x, constants) for x in evidence.logits], axis=1)


def paper(evidence: Evidence, constants: Mapping[str, float]) -> Floats:
    """Eq. final_prediction: p(Y_k | x, k) s_k(x)."""
    pairs = zip(evidence.logits, evidence.distances, strict=True)
    return np.concatenate([log_class_probabilities(x, constants) + log_coefficient(md) for x, md in pairs], axis=1)


def product(evidence: Evidence, constants: Mapping[str, float]) -> Floats:
    """The paper's score times the frozen backbone's class likelihood to the power `frozen_weight`."""
    return paper(evidence, constants) + constants["frozen_weight"] * log_likelihood(evidence.frozen)


def frozen(evidence: Evidence, constants: Mapping[str, float]) -> Floats:
    """Streaming LDA on the frozen backbone: the baseline for MORE."""
    return log_likelihood(evidence.frozen)


def logits(evidence: Evidence, constants: Mapping[str, float]) -> Floats:
    """Eq. cil_pred: the concatenated outputs of the heads, as plain HAT predicts."""
    return np.concatenate([x[:, :-1] for x in evidence.logits], axis=1)


RULES: dict[str, Callable[[Evidence, Mapping[str, float]], Floats]] = {
    "paper": paper,
    "product": product,
    "plain": plain,
    "frozen": frozen,
    "logits": logits,
}
