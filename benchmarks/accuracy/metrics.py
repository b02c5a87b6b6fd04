"""The paper's metrics, computed from a method's scores on the test images after each task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.learning.gate import auc

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """Log-scores of the classes learned so far for every test image, including images of future classes."""

    log_scores: Floats  # (n, C_t)
    task_of_class: NDArray[np.int64]  # (C_t,)


@dataclass(frozen=True)
class Result:
    """The metrics of one method."""

    accuracy: list[float]  # after each task, over the classes learned so far
    auc: list[float]  # after each task but the last: known against future classes
    forgetting: float
    within_task: float  # accuracy when the task is given, after the last task
    task_prediction: float  # how often the best class is of the right task, after the last task
    theorem_1: dict[str, float]  # mean cross-entropies, and the largest |H_CIL - H_WP - H_TP| of any image

    @property
    def last(self) -> float:
        return self.accuracy[-1]

    @property
    def aia(self) -> float:
        """Average incremental accuracy."""
        return float(np.mean(self.accuracy))

    @property
    def ai_auc(self) -> float:
        """Average incremental AUC."""
        return float(np.mean(self.auc))

    @property
    def mean(self) -> float:
        """The mean of AIA and AI-AUC, by which methods are compared."""
        return (self.aia + self.ai_auc) / 2

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "last": self.last, "aia": self.aia, "ai_auc": self.ai_auc, "mean": self.mean}


def measure(steps: Sequence[Step], labels: NDArray[np.int64]) -> Result:
    """`labels`: the column of each test image's class in the last step, which is its position in learning order."""
    accuracies, aucs, per_task = [], [], []
    for step in steps:
        known = labels < step.log_scores.shape[1]
        best = step.log_scores.argmax(axis=1)
        accuracies.append(float((best == labels)[known].mean()))
        task_of_image = np.where(known, step.task_of_class[np.where(known, labels, 0)], -1)
        per_task.append([float((best == labels)[task_of_image == k].mean()) for k in np.unique(step.task_of_class)])
        scores = step.log_scores.max(axis=1)
        value = auc(scores[known], scores[~known])
        if value is not None:
            aucs.append(value)
    first = [per_task[k][k] for k in range(len(steps) - 1)]
    forgetting = float(np.mean([was - now for was, now in zip(first, per_task[-1], strict=False)])) if first else 0.0
    final = steps[-1]
    task_of_image = final.task_of_class[labels]
    inside = np.where(final.task_of_class == task_of_image[:, None], final.log_scores, -np.inf)
    return Result(
        accuracy=accuracies,
        auc=aucs,
        forgetting=forgetting,
        within_task=float((inside.argmax(axis=1) == labels).mean()),
        task_prediction=float((final.task_of_class[final.log_scores.argmax(axis=1)] == task_of_image).mean()),
        theorem_1=theorem_1(final, labels),
    )


def theorem_1(step: Step, labels: NDArray[np.int64]) -> dict[str, float]:
    """H_CIL(x) = H_WP(x) + H_TP(x), with the run's own scores normalised over all classes.

    Each entropy is computed by its own route: CIL over all classes, WP over the classes of the true task, TP over the
    tasks' sums.
    """
    tasks = step.task_of_class[labels]
    own_task = step.task_of_class == tasks[:, None]  # (n, C)
    scores = step.log_scores
    by_task = np.stack([_logsumexp(scores[:, step.task_of_class == k]) for k in np.unique(step.task_of_class)], axis=1)
    true = np.take_along_axis(scores, labels[:, None], axis=1)[:, 0]
    h_cil = _logsumexp(scores) - true
    h_wp = _logsumexp(np.where(own_task, scores, -np.inf)) - true
    h_tp = _logsumexp(by_task) - np.take_along_axis(by_task, tasks[:, None], axis=1)[:, 0]
    gap = np.abs(h_cil - h_wp - h_tp) / np.maximum(1.0, np.abs(h_cil))
    return {
        "h_cil": float(h_cil.mean()),
        "h_wp": float(h_wp.mean()),
        "h_tp": float(h_tp.mean()),
        "largest_relative_gap": float(gap.max()),
    }


def _logsumexp(values: Floats) -> Floats:
    top = values.max(axis=1)
    out: Floats = top + np.log(np.exp(values - top[:, None]).sum(axis=1))
    return out
