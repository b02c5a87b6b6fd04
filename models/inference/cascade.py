"""The cascade of a transformer: frozen evidence ranks the tasks, and the networks of the best ones run.

Every task that runs costs a pass through the adapted blocks. The frozen evidence of all classes is computed for every
image anyway. If its best class is far above the second, no network runs: none would change the answer. Otherwise the
network of a task runs if a class of it scores within a margin of the best class, at most `most` networks per image.
`Cascade.choose` is the only function that decides this, for servers and for the trainer, which fits the rule's weights
on evidence of the same cascade.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Evidence, Floats, FrozenScores, log_probabilities

Chosen = NDArray[np.bool_]  # (n, T)
NEVER = float(np.finfo(np.float64).max)  # a difference of scores that no image reaches; JSON has no infinity


@dataclass(frozen=True)
class Cascade:
    """Which tasks run for an image."""

    weights: Mapping[str, float]  # of the kinds of frozen evidence
    margin: float
    most: int
    sure: float = NEVER  # no network runs for an image whose best class is this far above the second

    def class_scores(self, frozen: FrozenScores) -> Floats:
        """The weighted frozen score of every class: (n, C)."""
        total = np.zeros_like(frozen.distances)
        for name, weight in self.weights.items():
            total += weight * frozen.term(name)
        return total

    def choose(self, frozen: FrozenScores, counts: tuple[int, ...]) -> Chosen:
        """The tasks to run for n images, none or at least one for each; `counts` are the classes per task."""
        classes = self.class_scores(frozen)
        scores = task_scores(classes, counts)
        order = np.argsort(-scores, axis=1, kind="stable")[:, : self.most]
        best = np.take_along_axis(scores, order, axis=1)
        out = np.zeros(scores.shape, bool)
        near = best >= best[:, :1] - self.margin
        near[:, :1] = True  # also where a score is not a number
        np.put_along_axis(out, order, near, axis=1)
        out[leads(classes) >= self.sure] = False
        return out

    def to_dict(self) -> dict[str, Any]:
        return {"weights": dict(self.weights), "margin": self.margin, "most": self.most, "sure": self.sure}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Cascade:
        sure = float(data.get("sure", NEVER))  # absent in versions of older releases
        return cls(dict(data["weights"]), float(data["margin"]), int(data["most"]), sure)


def task_scores(classes: Floats, counts: tuple[int, ...]) -> Floats:
    """The best score of each task's classes: (n, C) -> (n, T)."""
    out: Floats = np.maximum.reduceat(classes, np.cumsum((0, *counts[:-1])), axis=1) if counts else classes
    return out


def leads(classes: Floats) -> Floats:
    """How far the best class of each image is above the second: (n, C) -> (n,); 0 for a single class."""
    if classes.shape[1] < 2:
        return np.zeros(len(classes))
    best = np.partition(classes, -2, axis=1)
    out: Floats = best[:, -1] - best[:, -2]
    return out


def without_others(evidence: Evidence, chosen: Chosen) -> Evidence:
    """The evidence with values for the tasks that did not run, in place of whatever it has there.

    Their networks count as the least favourable one that ran: of each kind, their classes get the least value of any
    class that ran for the image, and p(y | x, k) is at most that of an undecided network, 1 / (c_k + 1). So they are
    ordered among each other by frozen evidence, and network evidence never puts them above a class that ran. If none
    ran, the values are the same for all classes, and a rule leaves them out.
    """
    if chosen.all():
        return evidence
    ran, none = np.repeat(chosen, evidence.counts, axis=1), ~chosen.any(axis=1, keepdims=True)

    def least(values: Floats, otherwise: float = 0.0) -> Floats:
        """Of the classes that ran: (n, C) -> (n, 1)."""
        return np.where(none, otherwise, np.where(ran, values, np.inf).min(axis=1, keepdims=True))

    evidence = replace(
        evidence,
        class_distances=np.where(ran, evidence.class_distances, -least(-evidence.class_distances, -1.0)),
        class_cosines=np.where(ran, evidence.class_cosines, least(evidence.class_cosines)),
        ran=chosen,
    )
    if not evidence.has_ood:  # the logits themselves are the evidence
        return replace(evidence, class_logits=np.where(ran, evidence.class_logits, least(evidence.class_logits)))
    counts = np.array(evidence.counts, np.float64)
    undecided = -np.log(np.where(none, counts.max(), counts) + 1)  # (n, T)
    p = np.exp(np.minimum(least(log_probabilities(evidence)), undecided))
    # With an `ood` logit of 0, this logit gives c classes the probability p each.
    logit = np.log(np.maximum(p, np.finfo(np.float64).tiny)) - np.log1p(-counts * p)
    return replace(
        evidence,
        class_logits=np.where(ran, evidence.class_logits, evidence.per_class(logit)),
        ood_logits=np.where(chosen, evidence.ood_logits, 0.0),
    )
