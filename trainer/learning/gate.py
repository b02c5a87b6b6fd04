"""The evaluation gate: a version that loses too much of what its parent knew is not published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from models.inference.evidence import Evidence
from models.inference.model import Model
from trainer.learning.evaluation import is_right, task_auc
from trainer.learning.settings import LearnerSettings


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
    """What the gate found."""

    tasks: tuple[TaskReport, ...]
    reasons: tuple[str, ...]  # why it is rejected; empty: accepted

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
    settings: LearnerSettings,
) -> Verdict:
    """Both versions on the same held-out images of all tasks.

    Accuracy is over all classes that a version knows. AUC is task k's own score for its images against all others,
    the new task's among them, so that the parent has it too when it knows one task only.
    """
    reports = []
    right_after = is_right(model, after, labels)
    right_before = is_right(parent, before, labels) if parent and before else None
    for k, task in enumerate(model.tasks):
        own = np.array([label in task.classes for label in labels], bool)
        old = parent is not None and before is not None and k < len(parent.tasks)
        reports.append(
            TaskReport(
                task=k,
                classes=task.classes,
                images=int(own.sum()),
                accuracy_before=float(right_before[own].mean())
                if old and right_before is not None and own.any()
                else None,
                accuracy_after=float(right_after[own].mean()) if own.any() else None,
                auc_before=task_auc(parent, before, labels, k) if old and parent and before else None,
                auc_after=task_auc(model, after, labels, k),
            )
        )
    return Verdict(tuple(reports), tuple(_reasons(reports, settings)))


def _reasons(reports: Sequence[TaskReport], settings: LearnerSettings) -> list[str]:
    """Old tasks together, weighted by their images: one task's few held-out images say little alone."""
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
