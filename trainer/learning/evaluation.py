"""Evidence on held-out images: the ground on which a version is calibrated and compared with its parent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Evidence, Features
from models.inference.model import Model
from trainer.learning.memory import HeldOut


def held_out_evidence(model: Model, features: Features, held_out: Sequence[HeldOut]) -> Evidence:
    """The evidence of held-out images; cross-fitted ones as their folds would have seen them."""
    evidence = model.evidence(features)
    column = {name: c for c, name in enumerate(model.classes)}
    fitted = [row for row, sample in enumerate(held_out) if sample.trained_on and sample.label in column]
    columns = np.array([column[held_out[row].label] for row in fitted], np.int64)
    evidence.frozen[fitted] = model.frozen.distances_without(features.frozen[fitted], columns)
    for k, task in enumerate(model.tasks):
        own = [row for row in fitted if held_out[row].label in task.classes]
        labels = np.array([task.classes.index(held_out[row].label) for row in own], np.int64)
        distances = task.gaussians.distances_without(features.tasks[k][own], labels)
        for row, distance in zip(own, distances, strict=True):
            evidence.distances[k][row] = distance * held_out[row].distance_ratio
            evidence.logits[k][row] += held_out[row].logit_shift
    return evidence


def is_right(model: Model, evidence: Evidence, labels: Sequence[str]) -> NDArray[np.bool_]:
    """Which images get their own class, novel or not being another question: (n,)."""
    best = model.rule.log_scores(evidence).argmax(axis=1)
    return np.array([model.classes[b] == label for b, label in zip(best, labels, strict=True)], bool)


def auc(positive: NDArray[np.floating], negative: NDArray[np.floating]) -> float | None:
    """The chance that a positive scores above a negative (ties count half); None where a side is empty."""
    if len(positive) == 0 or len(negative) == 0:
        return None
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, "left") + np.searchsorted(ordered, positive, "right")
    return float(below.mean() / (2 * len(negative)))


def task_auc(model: Model, evidence: Evidence, labels: Sequence[str], task: int) -> float | None:
    """AUC_k of the paper: task k's own score, its images against all others."""
    start = int(np.searchsorted(model.task_of_class, task))
    scores = model.rule.log_scores(evidence)[:, start : start + len(model.tasks[task].classes)].max(axis=1)
    own = np.array([label in model.tasks[task].classes for label in labels], bool)
    return auc(scores[own], scores[~own])
