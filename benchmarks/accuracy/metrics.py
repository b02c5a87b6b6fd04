"""The metrics of one method on one stream, computed from its scores on the test images after each task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.learning.gate import auc

Floats = NDArray[np.float64]
Places = NDArray[np.int64]  # of classes in learning order; -1 for a class that is never learned
BINS = 10


@dataclass(frozen=True)
class Step:
    """What a method says about every test image after a task, images of classes that it has not learned included."""

    log_scores: Floats  # (n, C_t)
    task_of_class: NDArray[np.int64]  # (C_t,)
    novelty: Floats  # (n,), higher for known images
    flagged: NDArray[np.bool_] | None = None  # (n,), novel at the served threshold
    p_novel: Floats | None = None  # (n,)
    self_accuracy: float | None = None  # as the version reports it
    self_auc: float | None = None
    seconds: float | None = None  # of learning the task


@dataclass(frozen=True)
class Result:
    """The metrics of one method. A list has one entry per task; None where it is not defined."""

    accuracy: list[float]  # over the classes learned so far
    auc: list[float | None]  # known against all others
    fpr95: list[float | None]  # share of novel images above the score that accepts 95 % of the known ones
    rejected: list[float | None]  # share of known images flagged as novel at the served threshold
    flagged: list[float | None]  # share of novel images flagged
    ece: list[float | None]  # calibration error of p_novel where half of the images are novel
    self_accuracy: list[float | None]
    self_auc: list[float | None]
    seconds: list[float | None]
    forgetting: float
    within_task: float  # accuracy when the task is given, after the last task
    task_prediction: float  # how often the best class is of the right task, after the last task
    task_auc: list[float | None]  # of each task, after the last one: its images against those of the other tasks
    task_accuracy: list[float]  # of each task, over all classes, after the last one
    theorem_1: dict[str, float]  # mean cross-entropies, and the largest |H_CIL - H_WP - H_TP| of any image

    def figures(self) -> dict[str, float | None]:
        """The single figures of a report."""
        return {
            "last": self.accuracy[-1],
            "aia": _mean(self.accuracy),
            "ai_auc": _mean(self.auc),
            "fpr95": _mean(self.fpr95),
            "rejected": _mean(self.rejected),
            "flagged": _mean(self.flagged),
            "ece": _mean(self.ece),
            "self_accuracy": self.self_accuracy[-1],
            "self_auc": _mean(self.self_auc),
            # Measured where the version reports its own figure: it has none with one class.
            "auc_where_reported": _mean(
                [own for own, said in zip(self.auc, self.self_auc, strict=True) if said is not None]
            ),
            "seconds": _mean(self.seconds),
            "forgetting": self.forgetting,
            "within_task": self.within_task,
            "task_prediction": self.task_prediction,
        }

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "figures": self.figures()}


def measure(steps: Sequence[Step], labels: Places) -> Result:
    per_task = []
    columns: dict[str, list[float | None]] = {
        name: [] for name in ("auc", "fpr95", "rejected", "flagged", "ece", "self_accuracy", "self_auc", "seconds")
    }
    accuracies = []
    for step in steps:
        known = is_known(step, labels)
        right = step.log_scores.argmax(axis=1) == labels
        accuracies.append(float(right[known].mean()))
        task = np.where(known, step.task_of_class[np.where(known, labels, 0)], -1)
        per_task.append([float(right[task == k].mean()) for k in np.unique(step.task_of_class)])
        columns["auc"].append(auc(step.novelty[known], step.novelty[~known]))
        columns["fpr95"].append(false_positive_rate(step.novelty[known], step.novelty[~known]))
        columns["rejected"].append(None if step.flagged is None else _share(step.flagged[known]))
        columns["flagged"].append(None if step.flagged is None else _share(step.flagged[~known]))
        columns["ece"].append(None if step.p_novel is None else calibration_error(step.p_novel, known))
        columns["self_accuracy"].append(step.self_accuracy)
        columns["self_auc"].append(step.self_auc)
        columns["seconds"].append(step.seconds)
    first = [per_task[k][k] for k in range(len(steps) - 1)]
    forgetting = float(np.mean([was - now for was, now in zip(first, per_task[-1], strict=False)])) if first else 0.0
    final, learned = steps[-1], is_known(steps[-1], labels)
    places, scores = labels[learned], steps[-1].log_scores[learned]
    task = final.task_of_class[places]
    inside = np.where(final.task_of_class == task[:, None], scores, -np.inf)
    return Result(
        accuracy=accuracies,
        forgetting=forgetting,
        within_task=float((inside.argmax(axis=1) == places).mean()),
        task_prediction=float((final.task_of_class[scores.argmax(axis=1)] == task).mean()),
        task_auc=task_auc(scores, final.task_of_class, task),
        task_accuracy=per_task[-1],
        theorem_1=theorem_1(scores, final.task_of_class, places),
        **columns,
    )


def task_auc(scores: Floats, task_of_class: NDArray[np.int64], task: NDArray[np.int64]) -> list[float | None]:
    """How well each task tells its own images from those of the others, by the score of its best class."""
    best = [scores[:, task_of_class == k].max(axis=1) for k in np.unique(task_of_class)]
    return [auc(own[task == k], own[task != k]) for k, own in enumerate(best)]


def is_known(step: Step, labels: Places) -> NDArray[np.bool_]:
    out: NDArray[np.bool_] = (labels >= 0) & (labels < step.log_scores.shape[1])
    return out


def false_positive_rate(known: Floats, novel: Floats, accepted: float = 0.95) -> float | None:
    """The share of novel images that a threshold accepts which accepts this share of the known ones."""
    if len(known) == 0 or len(novel) == 0:
        return None
    return float((novel >= np.quantile(known, 1 - accepted, method="lower")).mean())


def calibration_error(p_novel: Floats, known: NDArray[np.bool_]) -> float | None:
    """Expected calibration error, ten bins; known and novel images count as half of all each."""
    if known.all() or not known.any():
        return None
    weight = np.where(known, 0.5 / known.sum(), 0.5 / (~known).sum())
    bins = np.minimum((p_novel * BINS).astype(np.int64), BINS - 1)
    difference = weight * (p_novel - ~known)
    return float(np.abs(np.bincount(bins, difference, BINS)).sum())


def theorem_1(scores: Floats, task_of_class: NDArray[np.int64], labels: Places) -> dict[str, float]:
    """H_CIL(x) = H_WP(x) + H_TP(x), with the method's own scores normalised over all classes.

    Each entropy is computed by its own route: CIL over all classes, WP over the classes of the true task, TP over the
    tasks' sums.
    """
    tasks = task_of_class[labels]
    own_task = task_of_class == tasks[:, None]  # (n, C)
    by_task = np.stack([_logsumexp(scores[:, task_of_class == k]) for k in np.unique(task_of_class)], axis=1)
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


def _share(flags: NDArray[np.bool_]) -> float | None:
    return float(flags.mean()) if len(flags) else None


def _mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None
