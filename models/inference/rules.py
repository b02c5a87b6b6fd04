"""Which class: the coefficient-weighted argmax, log p(y | x, k) + log s_{k,y}(x), over the classes of all tasks.

The coefficient s_{k,y} is a weighted sum of evidence. In the paper's rule it is the largest inverse Mahalanobis
distance to a class of task k. In the fitted rule it also looks at the frozen evidence of class y. A version records the
weights; only their ratios matter for the argmax, so the weight of log p need not be 1. Rules without networks, the
closed form and the refined rule, take p(y | x, k) from the terms that they weigh (`without_networks`).

A head without `ood` says nothing about other tasks in log p(y | x, k). Its rule weighs the logits themselves, as the
paper's rule of HAT+CSI and Sup+CSI does: the argmax over the concatenated outputs of all tasks (Eq. cil_pred).

Scores are logarithms: a product of small probabilities underflows, a sum of logarithms does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.inference.cascade import Cascade
from models.inference.evidence import (
    Evidence,
    Floats,
    FrozenScores,
    RefinedScores,
    log_coefficients,
    log_probabilities,
)

LOGIT = "logit"
REFINED = "refined_cosine"  # of versions with a refined feature (refined.py)
NETWORK_TERMS = ("probability", "coefficient", "task_cosine", LOGIT)
FROZEN_TERMS = ("frozen_distance", "frozen_cosine", "output_cosine", "ridge")
TERMS = (*NETWORK_TERMS[:3], *FROZEN_TERMS)  # of a fitted rule
REFINED_TERMS = (*FROZEN_TERMS, REFINED)  # of a refined rule
TERMS_WITHOUT_OOD = (LOGIT, *TERMS[1:])  # where heads have no `ood`
PAPER = {"probability": 1.0, "coefficient": 1.0}
PAPER_WITHOUT_OOD = {LOGIT: 1.0}


@dataclass(frozen=True)
class Rule:
    """The weights of the evidence, and the paper's output calibration of every task."""

    name: str = "paper"
    weights: Mapping[str, float] = field(default_factory=lambda: dict(PAPER))  # by the name of a term; absent: 0
    scales: tuple[float, ...] = ()  # alpha_k: the task's logits are multiplied by it; absent: 1
    shifts: tuple[float, ...] = ()  # beta_k: added to the scores of the task's classes; absent: 0
    cascade: Cascade | None = None  # which networks run; None: all, exactly
    rotations: int = 1  # of an image, that the networks see (rotations.py): 1 or 4

    @property
    def uses_networks(self) -> bool:
        """Whether any evidence of the tasks' networks counts; that of a provisional version does not."""
        return any(self.weights.get(name) for name in NETWORK_TERMS)

    @property
    def uses_refined(self) -> bool:
        """Whether the refined feature counts."""
        return bool(self.weights.get(REFINED))

    def log_scores(self, evidence: Evidence) -> Floats:
        """The log-score of every class: (n, C)."""
        total = np.zeros_like(evidence.frozen.distances)
        for name, weight in self.weights.items():
            if weight:
                total += weight * term(evidence, name, self.scales)
        if self.shifts:
            total += evidence.per_class(np.array(self.shifts))
        if evidence.ran is None or self.uses_refined:  # which is there whether or not a network ran
            return total
        # Where no network ran, there is no output to calibrate either.
        some = evidence.ran.any(axis=1, keepdims=True)
        return total if some.all() else np.where(some, total, self.frozen_scores(evidence.frozen))

    def frozen_scores(self, frozen: FrozenScores) -> Floats:
        """The part of every class's log-score that the frozen evidence gives: (n, C)."""
        total = np.zeros_like(frozen.distances)
        for name in FROZEN_TERMS:
            total += self.weights.get(name, 0.0) * frozen.term(name)
        return total

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"name": self.name, "weights": dict(self.weights)}
        out |= {"scales": list(self.scales), "shifts": list(self.shifts)}
        out |= {"rotations": self.rotations} if self.rotations > 1 else {}
        return out | ({"cascade": self.cascade.to_dict()} if self.cascade else {})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Rule:
        known = (*TERMS, LOGIT, REFINED)
        unknown = set(data["weights"]) - set(known)
        if unknown:
            raise ValueError(f"unknown evidence {', '.join(sorted(unknown))}; this release supports {', '.join(known)}")
        cascade = Cascade.from_dict(data["cascade"]) if data.get("cascade") else None
        rotations = int(data.get("rotations", 1))
        return cls(
            data["name"], dict(data["weights"]), tuple(data["scales"]), tuple(data["shifts"]), cascade, rotations
        )


def without_networks(
    rule: Rule, counts: tuple[int, ...], frozen: FrozenScores, refined: RefinedScores | None = None
) -> Evidence:
    """The evidence without networks: the frozen feature takes the place of every task's own.

    p(y | x, k) is the softmax of the rule's scores over the classes of task k, without `ood`.
    """
    scores = rule.frozen_scores(frozen)
    if refined is not None:
        scores = scores + rule.weights.get(REFINED, 0.0) * refined.cosines
    nothing = (len(scores), len(counts))
    return Evidence(
        counts,
        class_logits=scores,
        ood_logits=np.full(nothing, -np.inf),
        class_distances=frozen.distances,
        class_cosines=frozen.cosines,
        frozen=frozen,
        ran=np.zeros(nothing, bool),
        has_ood=False,
        refined=refined,
    )


def term(evidence: Evidence, name: str, scales: tuple[float, ...] = ()) -> Floats:
    """One kind of evidence for every class, larger for a better fit: (n, C)."""
    if name == "probability":
        return log_probabilities(evidence, scales)
    if name == LOGIT:
        return evidence.class_logits * evidence.per_class(np.array(scales)) if scales else evidence.class_logits
    if name == "coefficient":
        return evidence.per_class(log_coefficients(evidence))
    if name == "task_cosine":
        return evidence.class_cosines
    if name == REFINED:
        if evidence.refined is None:
            raise ValueError("the rule weighs the refined feature, which was not computed")
        return evidence.refined.cosines
    return evidence.frozen.term(name)
