"""Which class: the coefficient-weighted argmax, log p(y | x, k) + log s_{k,y}(x), over the classes of all tasks.

The coefficient s_{k,y} is a weighted sum of evidence. In the paper's rule it is the largest inverse Mahalanobis
distance to a class of task k. In the fitted rule it also looks at the frozen evidence of class y. A version records the
weights; only their ratios matter for the argmax, so the weight of log p need not be 1.

Scores are logarithms: a product of small probabilities underflows, a sum of logarithms does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.inference.evidence import Evidence, Floats, log_distance, log_softmax

FROZEN_TERMS = ("frozen_distance", "frozen_cosine", "ridge")
TERMS = ("probability", "coefficient", "task_cosine", *FROZEN_TERMS)
PAPER = {"probability": 1.0, "coefficient": 1.0}


@dataclass(frozen=True)
class Rule:
    """The weights of the evidence, and the paper's output calibration of every task."""

    name: str = "paper"
    weights: Mapping[str, float] = field(default_factory=lambda: dict(PAPER))  # by name in TERMS; absent: 0
    scales: tuple[float, ...] = ()  # alpha_k: the task's logits are multiplied by it; absent: 1
    shifts: tuple[float, ...] = ()  # beta_k: added to the scores of the task's classes; absent: 0

    def log_scores(self, evidence: Evidence) -> Floats:
        """The log-score of every class: (n, C)."""
        total = np.zeros_like(evidence.frozen.distances)
        for name, weight in self.weights.items():
            if weight:
                total += weight * term(evidence, name, self.scales)
        if self.shifts:
            total += np.repeat(self.shifts, [logits.shape[1] - 1 for logits in evidence.logits])
        return total

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "weights": dict(self.weights),
            "scales": list(self.scales),
            "shifts": list(self.shifts),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Rule:
        unknown = set(data["weights"]) - set(TERMS)
        if unknown:
            raise ValueError(f"unknown evidence {', '.join(sorted(unknown))}; this release knows {', '.join(TERMS)}")
        return cls(data["name"], dict(data["weights"]), tuple(data["scales"]), tuple(data["shifts"]))


def term(evidence: Evidence, name: str, scales: tuple[float, ...] = ()) -> Floats:
    """One kind of evidence for every class, larger for a better fit: (n, C)."""
    if name == "probability":
        factors = scales or (1.0,) * len(evidence.logits)
        parts = [log_probabilities(x, scale) for x, scale in zip(evidence.logits, factors, strict=True)]
        return np.concatenate(parts, axis=1)
    if name == "coefficient":
        return np.concatenate([log_coefficient(x) + np.zeros_like(x) for x in evidence.distances], axis=1)
    if name == "task_cosine":
        return np.concatenate(evidence.cosines, axis=1)
    if name == "frozen_distance":
        return -evidence.frozen.distances
    return evidence.frozen.cosines if name == "frozen_cosine" else evidence.frozen.ridge


def log_probabilities(logits: Floats, scale: float = 1.0) -> Floats:
    """log p(Y_k | x, k): `ood` counts in the denominator and is then dropped. (n, c_k + 1) -> (n, c_k)"""
    return log_softmax(logits * scale)[:, :-1]


def log_coefficient(distances: Floats) -> Floats:
    """log s_k(x), Eq. ensemble: the largest inverse Mahalanobis distance to a class of the task. (n, c_k) -> (n, 1)"""
    return -log_distance(distances.min(axis=1, keepdims=True))
