"""Rules: small pure functions from evidence to the log-score of every class.

A version names its rule and the constants that were fitted for it, so that a better rule is a new function here and
nothing else. Scores are logarithms throughout: products of small numbers underflow, sums do not, and argmax and order
are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from models.inference.evidence import Evidence

Floats = NDArray[np.float64]
SMALLEST_DISTANCE = 1e-9  # an image may lie exactly on a class mean


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


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    out: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return out


def log_class_probabilities(logits: Floats, constants: Mapping[str, float]) -> Floats:
    """log p(Y_k | x, k): `ood` counts in the denominator and is then dropped.

    The paper's temperature is 1. Heads that saw tens of images a class are far too sure of themselves, and their
    probabilities then drown the coefficient; the temperature that held-out images ask for lets both be heard. It is
    the scale alpha of the paper's output calibration, one for all tasks.
    """
    return log_softmax(logits / constants.get("temperature", 1.0))[:, :-1]


def log_coefficient(distances: Floats) -> Floats:
    """log s_k(x), Eq. ensemble: the largest inverse Mahalanobis distance to a class of the task. (n, 1)"""
    out: Floats = -np.log(np.maximum(distances.min(axis=1, keepdims=True), SMALLEST_DISTANCE))
    return out


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


def log_likelihood(distances: Floats) -> Floats:
    """Gaussian log-likelihood of every class, up to what all classes share."""
    return -0.5 * distances**2


def frozen(evidence: Evidence, constants: Mapping[str, float]) -> Floats:
    """Streaming LDA: the frozen backbone alone. The floor that MORE has to beat."""
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
