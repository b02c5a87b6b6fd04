"""The cascade of a transformer: frozen evidence ranks the tasks, and the networks of the best ones run.

Every task that runs costs a pass through the adapted blocks. The frozen evidence of all classes is computed for every
image anyway. The network of a task runs if a class of it scores within a margin of the best class, at most `most`
networks per image. `Cascade.choose` is the only function that decides this, for servers and for the trainer, which fits
the rule's weights on evidence of the same cascade.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Evidence, Floats, FrozenScores, log_probabilities

Chosen = NDArray[np.bool_]  # (n, T)


@dataclass(frozen=True)
class Cascade:
    """Which tasks run for an image."""

    weights: Mapping[str, float]  # of the kinds of frozen evidence
    margin: float
    most: int

    def task_scores(self, frozen: FrozenScores, counts: tuple[int, ...]) -> Floats:
        """The best weighted frozen score of each task's classes: (n, T)."""
        total = np.zeros_like(frozen.distances)
        for name, weight in self.weights.items():
            total += weight * frozen.term(name)
        out: Floats = np.maximum.reduceat(total, np.cumsum((0, *counts[:-1])), axis=1)
        return out

    def choose(self, frozen: FrozenScores, counts: tuple[int, ...]) -> Chosen:
        """The tasks to run for n images; `counts` are the classes per task. At least one task runs for every image."""
        if len(counts) <= 1:
            return np.ones((len(frozen.distances), len(counts)), bool)
        scores = self.task_scores(frozen, counts)
        order = np.argsort(-scores, axis=1, kind="stable")[:, : self.most]
        best = np.take_along_axis(scores, order, axis=1)
        out = np.zeros(scores.shape, bool)
        near = best >= best[:, :1] - self.margin
        near[:, 0] = True  # also where a score is not a number
        np.put_along_axis(out, order, near, axis=1)
        return out

    def to_dict(self) -> dict[str, Any]:
        return {"weights": dict(self.weights), "margin": self.margin, "most": self.most}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Cascade:
        return cls(dict(data["weights"]), float(data["margin"]), int(data["most"]))


def without_others(evidence: Evidence, chosen: Chosen) -> Evidence:
    """The evidence with values for the tasks that did not run, in place of whatever it has there.

    Their networks count as the least favourable one that ran: of each kind, their classes get the least value of any
    class that ran for the image, and p(y | x, k) is at most that of an undecided network, 1 / (c_k + 1). So they are
    ordered among each other by frozen evidence, and network evidence never puts them above a class that ran.
    """
    if chosen.all():
        return evidence
    ran = np.repeat(chosen, evidence.counts, axis=1)
    farthest = np.where(ran, evidence.class_distances, -np.inf).max(axis=1, keepdims=True)
    least_cosine = np.where(ran, evidence.class_cosines, np.inf).min(axis=1, keepdims=True)
    evidence = replace(
        evidence,
        class_distances=np.where(ran, evidence.class_distances, farthest),
        class_cosines=np.where(ran, evidence.class_cosines, least_cosine),
        ran=chosen,
    )
    if not evidence.has_ood:  # the logits themselves are the evidence
        least = np.where(ran, evidence.class_logits, np.inf).min(axis=1, keepdims=True)
        return replace(evidence, class_logits=np.where(ran, evidence.class_logits, least))
    lowest = np.where(ran, log_probabilities(evidence), np.inf).min(axis=1, keepdims=True)
    counts = np.array(evidence.counts, np.float64)
    p = np.exp(np.minimum(lowest, -np.log(counts + 1)))  # (n, T)
    # With an `ood` logit of 0, this logit gives c classes the probability p each.
    logit = np.log(np.maximum(p, np.finfo(np.float64).tiny)) - np.log1p(-counts * p)
    return replace(
        evidence,
        class_logits=np.where(ran, evidence.class_logits, evidence.per_class(logit)),
        ood_logits=np.where(chosen, evidence.ood_logits, 0.0),
    )
