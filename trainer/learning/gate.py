"""The evaluation gate: reject a version that loses too much of what its parent knew."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Evidence
from models.inference.model import Model
from trainer.learning.advice import Advice
from trainer.learning.closed_form import NetworkGain
from trainer.learning.settings import LearnerSettings

# Expected standard deviations, beside chance: of how much harder held-out images are in closed form than all left-out
# ones, and of what training gains.
DIFFICULTY_DEVIATION, GAIN_DEVIATION = 0.04, 0.03


@dataclass(frozen=True)
class TaskReport:
    """One task on its held-out images, under the parent and under the new version."""

    task: int
    classes: tuple[str, ...]
    images: int
    accuracy_before: float | None
    accuracy_after: float | None
    auc_before: float | None
    auc_after: float | None


@dataclass(frozen=True)
class Verdict:
    """What a version reports of itself, measured on left-out images, or draws: fresh images should confirm it."""

    tasks: tuple[TaskReport, ...]
    reasons: tuple[str, ...]  # why the version is rejected; empty if it is accepted
    accuracy: float | None = None  # over all classes
    novelty_auc: float | None = None  # known images against images of classes that were left out in turn
    advice: Advice = field(default_factory=Advice)  # what would help the next version
    networks: NetworkGain | None = None  # what training adds to the class decision; None if it was not compared
    drawn: int = 0  # of the images behind these figures and both decisions, draws from class statistics

    @property
    def accepted(self) -> bool:
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        return {"accepted": self.accepted, **asdict(self)}


def judge(
    parent: Model | None,
    model: Model,
    before: Evidence | None,
    after: Evidence,
    labels: Sequence[str],
    novelty_auc: float | None,
    settings: LearnerSettings,
) -> Verdict:
    """Compare both versions on the same held-out images of all tasks.

    Accuracy counts all classes that a version knows. AUC compares task k's own score for its images with all other
    images, those of the new task included, so that a parent with one task has an AUC too.
    """
    new = _measure(model, after, labels)
    old = _measure(parent, before, labels) if parent and before else []
    reports, images = [], _own_images(model, labels).sum(axis=1).tolist()
    for k, task in enumerate(model.tasks):
        accuracy_before, auc_before = old[k] if k < len(old) else (None, None)
        accuracy_after, auc_after = new[k]
        reports.append(TaskReport(k, task.classes, images[k], accuracy_before, accuracy_after, auc_before, auc_after))
    return Verdict(tuple(reports), tuple(_reasons(reports, settings)), novelty_auc=novelty_auc)


def _measure(model: Model, evidence: Evidence, labels: Sequence[str]) -> list[tuple[float | None, float | None]]:
    """Accuracy and AUC of each task."""
    correct, own = is_correct(model, evidence, labels), _own_images(model, labels)
    accuracies = [float(correct[rows].mean()) if rows.any() else None for rows in own]
    return list(zip(accuracies, task_aucs(model, evidence, labels), strict=True))


def _own_images(model: Model, labels: Sequence[str]) -> NDArray[np.bool_]:
    """Which images belong to each task: (T, n)."""
    task_of = {name: k for k, task in enumerate(model.tasks) for name in task.classes}
    tasks = np.array([task_of.get(label, -1) for label in labels], np.int64)
    out: NDArray[np.bool_] = np.arange(len(model.tasks))[:, None] == tasks
    return out


def _reasons(reports: Sequence[TaskReport], settings: LearnerSettings) -> list[str]:
    """Losses of all old tasks together, weighted by images: a single task has too few held-out images to judge."""
    reasons = []
    for what, before, after, margin in (
        ("accuracy", "accuracy_before", "accuracy_after", settings.gate_accuracy),
        ("AUC", "auc_before", "auc_after", settings.gate_auc),
    ):
        rows = [(getattr(r, before), getattr(r, after), r.images) for r in reports]
        pairs = [(b, a, n) for b, a, n in rows if b is not None and a is not None]
        total = sum(n for _, _, n in pairs)
        if not total:
            continue
        old, new = (sum(row[i] * row[2] for row in pairs) / total for i in (0, 1))
        if old - new > margin:
            reasons.append(
                f"old tasks' {what} fell from {old:.3f} to {new:.3f}, more than {margin:g} "
                f"(OPENWORLD_TRAIN_GATE_{what.upper()} sets the margin)"
            )
    return reasons


def expected_accuracy(
    correct: NDArray[np.bool_],
    correct_in_closed_form: NDArray[np.bool_],
    weights: NDArray[np.float64],
    held_out: NDArray[np.bool_],
) -> float:
    """The accuracy of fresh images, from held-out ones (h,) and from the closed form on all left-out ones (n,).

    `held_out` (n,) says which of the left-out images are held out; `weights` (n,) are those of `independent_weights`.
    Held-out images alone show what training gains, and they are whole scenes, which are harder. With few images per
    class they are few: both differences are multiplied by the share of their variance that chance does not explain.
    """
    own = weights[held_out]
    images, every, few = float(own.sum()), float(weights.sum()), correct_in_closed_form[held_out]
    closed_form = float(np.average(correct_in_closed_form, weights=weights))
    harder = np.average(few, weights=own) - closed_form
    gained = np.average(correct.astype(float) - few, weights=own)
    differing = (float(own[correct != few].sum()) + 1) / (images + 1)
    harder *= _beyond_chance(DIFFICULTY_DEVIATION, closed_form * (1 - closed_form) * (1 / images - 1 / every))
    gained *= _beyond_chance(GAIN_DEVIATION, differing / images)
    return float(closed_form + harder + gained)


def _beyond_chance(deviation: float, chance: float) -> float:
    """The share of a difference that is expected to be more than chance, whose variance is `chance`."""
    return deviation**2 / (deviation**2 + max(chance, 0.0))


def is_correct(model: Model, evidence: Evidence, labels: Sequence[str]) -> NDArray[np.bool_]:
    """Whether the best class of each image is its label, novel or not: (n,)."""
    best = model.rule.log_scores(evidence).argmax(axis=1)
    return np.array([model.classes[b] == label for b, label in zip(best, labels, strict=True)], bool)


def task_aucs(model: Model, evidence: Evidence, labels: Sequence[str]) -> list[float | None]:
    """AUC_k of the paper for every task: its own score, its images against all others."""
    starts = np.cumsum((0, *model.counts[:-1]))
    best = np.maximum.reduceat(model.rule.log_scores(evidence), starts, axis=1)
    return [auc(best[own, k], best[~own, k]) for k, own in enumerate(_own_images(model, labels))]


def auc(positive: NDArray[np.floating], negative: NDArray[np.floating]) -> float | None:
    """Probability that a positive scores above a negative (ties count half); None if either is empty."""
    if len(positive) == 0 or len(negative) == 0:
        return None
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, "left") + np.searchsorted(ordered, positive, "right")
    return float(below.mean() / (2 * len(negative)))
